package supervisor

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Name is the name of the supervisor's program.
const Name = "abox-vmm"

// FindVMM is the path of the supervisor's program: configured, if that is not
// empty, else the one in PATH, else the one beside the running program.
func FindVMM(configured string) (string, error) {
	if configured != "" {
		if err := executable(configured); err != nil {
			return "", fmt.Errorf("%s not found: %w; correct the configured path", Name, err)
		}
		return filepath.Abs(configured)
	}
	if path, err := exec.LookPath(Name); err == nil {
		return filepath.Abs(path)
	}
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), Name)
		if executable(beside) == nil {
			return beside, nil
		}
	}
	return "", fmt.Errorf("%s not found: it is neither in PATH nor beside this program; run `make build`, or put it into PATH", Name)
}

func executable(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.IsDir() || info.Mode()&0o111 == 0 {
		return fmt.Errorf("%s is no program", path)
	}
	return nil
}
