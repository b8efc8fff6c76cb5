package boot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// loadModules loads the modules that dir/order lists, one file name a line,
// in that order, and removes the files: in an initramfs they are memory.
// A module that the kernel has already is passed over.
func loadModules(dir string) (int, error) {
	order, err := os.ReadFile(filepath.Join(dir, "order"))
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil // all built into the kernel
	}
	if err != nil {
		return 0, err
	}
	loaded := 0
	for name := range strings.FieldsSeq(string(order)) {
		if err := loadModule(filepath.Join(dir, name)); err != nil {
			return loaded, fmt.Errorf("module %s: %w", name, err)
		}
		loaded++
	}
	return loaded, nil
}

func loadModule(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.FinitModule(fd, "", 0); err != nil && err != unix.EEXIST {
		return err
	}
	return unix.Unlink(path)
}
