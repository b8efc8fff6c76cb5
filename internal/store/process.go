package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// Process names one process for good: a pid alone is given out again, but
// not with the same start time in the same boot of the host.
type Process struct {
	PID int `json:"pid"`
	// Start is when it started, in clock ticks since the host booted.
	Start uint64 `json:"start"`
	// Boot is the host's boot id.
	Boot string `json:"boot"`
}

// FindProcess describes the process that has pid now.
func FindProcess(pid int) (Process, error) {
	start, err := startTime(pid)
	if err != nil {
		return Process{}, err
	}
	boot, err := bootID()
	return Process{PID: pid, Start: start, Boot: boot}, err
}

// BootID names this boot of the host.
func BootID() (string, error) { return bootID() }

var bootID = sync.OnceValues(func() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return string(bytes.TrimSpace(data)), err
})

// startTime reads field 22 of /proc/PID/stat. The second field, the name, may
// hold spaces and brackets, so the count starts after its last bracket.
func startTime(pid int) (uint64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields := bytes.Fields(data[bytes.LastIndexByte(data, ')')+1:])
	if len(fields) < 20 {
		return 0, fmt.Errorf("/proc/%d/stat has no start time", pid)
	}
	return strconv.ParseUint(string(fields[19]), 10, 64)
}

// Kill ends the process with SIGKILL and waits until it is gone. It reports
// whether there was anything to kill: a pid that belongs to another process
// by now is left alone.
func (p Process) Kill(ctx context.Context) (bool, error) {
	if p.PID <= 1 {
		return false, nil
	}
	// The pidfd comes before the check, so that what was checked is what is
	// killed even if the pid is given out again in between.
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open process %d: %w", p.PID, err)
	}
	defer unix.Close(fd)
	if now, err := FindProcess(p.PID); err != nil || now != p {
		return false, nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
		if errors.Is(err, unix.ESRCH) {
			return false, nil
		}
		return false, fmt.Errorf("kill process %d: %w", p.PID, err)
	}
	return true, waitExit(ctx, fd, p.PID)
}

func waitExit(ctx context.Context, pidfd, pid int) error {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 50)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for process %d: %w", pid, err)
		}
		if n > 0 {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("process %d was killed but does not end: %w", pid, context.Cause(ctx))
		}
	}
}

// Alive is true while the process runs (or is not yet reaped).
func (p Process) Alive() bool {
	now, err := FindProcess(p.PID)
	return err == nil && now == p
}
