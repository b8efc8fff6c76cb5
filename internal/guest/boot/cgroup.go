package boot

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	cgroupRoot = "/sys/fs/cgroup"
	// cgroupName holds every program the agent starts.
	cgroupName = "exec"
	// spareThreads is what programs can never take from the agent and the
	// kernel: a Go program that cannot make a thread dies, and this one is
	// PID 1.
	spareThreads = 256
)

// makeCgroup makes the cgroup for programs and returns a descriptor of it.
// A fork bomb inside ends at its limit, with the agent still able to stop it.
func makeCgroup() (fd int, err error) {
	if err := os.WriteFile(cgroupRoot+"/cgroup.subtree_control", []byte("+pids"), 0); err != nil {
		return 0, err
	}
	dir := cgroupRoot + "/" + cgroupName
	if err := os.Mkdir(dir, 0o755); err != nil {
		return 0, err
	}
	data, err := os.ReadFile("/proc/sys/kernel/threads-max")
	if err != nil {
		return 0, err
	}
	threads, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return 0, fmt.Errorf("threads-max: %w", err)
	}
	limit := strconv.Itoa(max(threads-spareThreads, threads/2))
	if err := os.WriteFile(dir+"/pids.max", []byte(limit), 0); err != nil {
		return 0, err
	}
	fd, err = unix.Open(dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	return fd, nil
}
