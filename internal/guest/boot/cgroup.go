package boot

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Cgroups. The agent and the kernel's threads stay in the root; the limits
// are on programs as a whole, so that whatever they do the agent can still
// think, make threads (a Go program that cannot dies, and this one is PID 1)
// and stop them. Runs are in a leaf, because a group with limits for its
// children may hold no processes itself.
//
// The processor is shared between the root and all programs together, not
// among a thousand equals. With a fork bomb under emulation Hello took 1 to 15 s
// without that, and the bomb minutes to die; with it 20 ms and 7 s. The cost
// of the three controllers for one run was lost in the noise.
const (
	cgroupRoot  = "/sys/fs/cgroup"
	programs    = cgroupRoot + "/programs"
	runsCgroup  = programs + "/exec"
	controllers = "+cpu +pids +memory"
)

// spareMemory is what programs cannot take: over twice what the agent was
// seen to need under load, or an eighth of a small machine.
const spareMemory = 64 << 20

// threadShare is the part of the kernel's threads that programs may have. The
// kernel allows as many as would fill an eighth of memory with their stacks
// alone; with what else a process takes, half of them is a machine without
// memory, which no process limit then saves.
const threadShare = 4

// cgroups are descriptors of groups, which find them whatever the guest has
// mounted over their paths.
type cgroups struct {
	top  int // the root, where hooks have a group beside the programs'
	runs int // where runs are started
}

// makeCgroups makes the groups for programs and sets their limits.
func makeCgroups() (c cgroups, err error) {
	if err := os.WriteFile(cgroupRoot+"/cgroup.subtree_control", []byte(controllers), 0); err != nil {
		return c, err
	}
	if err := os.MkdirAll(runsCgroup, 0o755); err != nil {
		return c, err
	}
	if err := limitPrograms(); err != nil {
		return c, err
	}
	if c.top, err = openDir(cgroupRoot); err != nil {
		return c, err
	}
	c.runs, err = openDir(runsCgroup)
	return c, err
}

func openDir(path string) (fd int, err error) {
	fd, err = unix.Open(path, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

func limitPrograms() error {
	threads, err := readNumber("/proc/sys/kernel/threads-max")
	if err != nil {
		return err
	}
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return os.NewSyscallError("sysinfo", err)
	}
	for name, limit := range map[string]int64{
		"pids.max":   threads / threadShare,
		"memory.max": programMemory(int64(info.Totalram) * int64(info.Unit)),
	} {
		if err := os.WriteFile(programs+"/"+name, strconv.AppendInt(nil, limit, 10), 0); err != nil {
			return err
		}
	}
	return nil
}

// programMemory is what programs may use of a machine's memory.
func programMemory(total int64) int64 { return total - min(spareMemory, total/8) }

func readNumber(path string) (int64, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return n, nil
}
