package guest

import (
	"context"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/warren-vm/warren/internal/guest/proc"
	"github.com/warren-vm/warren/internal/guestapi"
)

func (a *Agent) hello(context.Context, guestapi.Empty) (guestapi.HelloInfo, error) {
	return guestapi.HelloInfo{
		Protocol: guestapi.Protocol,
		ImageID:  a.opt.ImageID,
		Kernel:   kernelRelease(),
		Prepared: a.state.Load() == statePrepared,
		Frozen:   a.gate.frozen(),
		UptimeMS: uptime().Milliseconds(),
	}, nil
}

func kernelRelease() string {
	data, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(data))
}

// uptime is the time since the kernel started.
func uptime() time.Duration {
	data, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(data), " ")
	s, err := strconv.ParseFloat(first, 64)
	if err != nil {
		return 0
	}
	return time.Duration(s * float64(time.Second))
}

func (a *Agent) figures(context.Context, guestapi.Empty) (f guestapi.FiguresInfo, err error) {
	mem, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return f, err
	}
	f.MemTotal, f.MemAvailable = parseMemory(string(mem))
	var disk syscall.Statfs_t
	if err := syscall.Statfs("/", &disk); err != nil {
		return f, os.NewSyscallError("statfs /", err)
	}
	f.DiskTotal = int64(disk.Blocks) * disk.Bsize
	f.DiskFree = int64(disk.Bavail) * disk.Bsize
	for pid, stat := range proc.Processes() {
		// Kernel threads are children of kthreadd.
		if pid != 2 && stat.Parent != 2 {
			f.Processes++
		}
	}
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	f.AgentHeap = int64(m.HeapAlloc)
	f.AgentMemory = int64(m.Sys - m.HeapReleased)
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return f, err
	}
	f.AgentFDs = len(fds) - 1 // without the one that reads them
	f.AgentGoroutines = runtime.NumGoroutine()
	f.Execs = a.runs.count()
	return f, nil
}

// parseMemory reads /proc/meminfo.
func parseMemory(text string) (total, available int64) {
	for line := range strings.Lines(text) {
		name, rest, _ := strings.Cut(line, ":")
		kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		if err != nil {
			continue
		}
		switch name {
		case "MemTotal":
			total = kib << 10
		case "MemAvailable":
			available = kib << 10
		}
	}
	return total, available
}

// shutdown answers before the machine goes down: the answer is handed to the
// link's port while everything still runs.
func (a *Agent) shutdown(context.Context, guestapi.Empty) (guestapi.Empty, error) {
	a.goingDown.Do(func() {
		time.AfterFunc(shutdownDelay, func() { a.safely(a.opt.System.Shutdown) })
	})
	return guestapi.Empty{}, nil
}

// shutdownDelay is the time an answer has to leave.
const shutdownDelay = 50 * time.Millisecond
