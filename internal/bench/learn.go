package bench

import (
	"bytes"
	"fmt"
	"os"
)

// asStarted takes from the command line of one of Warren's own QEMUs what a
// floor must have in common with it: the program, the accelerator, the
// processor and the kernel command line. Read from the running process, they
// cannot drift away from what is compared.
func asStarted(pid int) (plain, error) {
	file := fmt.Sprintf("/proc/%d/cmdline", pid)
	data, err := os.ReadFile(file)
	if err != nil {
		return plain{}, fmt.Errorf("command line of QEMU: %w", err)
	}
	var argv []string
	for arg := range bytes.SplitSeq(bytes.TrimSuffix(data, []byte{0}), []byte{0}) {
		argv = append(argv, string(arg))
	}
	p, err := fromCommandLine(argv)
	if err != nil {
		return plain{}, fmt.Errorf("command line of QEMU (process %d): %w", pid, err)
	}
	return p, nil
}

// fromCommandLine is asStarted for a known command line.
func fromCommandLine(argv []string) (plain, error) {
	var p plain
	for i := 0; i+1 < len(argv); i++ {
		switch value := argv[i+1]; argv[i] {
		case "-accel", "-cpu":
			p.Accel = append(p.Accel, argv[i], value)
		case "-append":
			p.Cmdline = value
		default:
			continue
		}
		i++
	}
	if len(p.Accel) < 4 || p.Cmdline == "" {
		return plain{}, fmt.Errorf("no -accel, -cpu or -append in it")
	}
	return p, nil
}
