package boot

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// grace is what programs have between SIGTERM and SIGKILL; killed is what the
// kernel has to end them.
const (
	grace  = 1500 * time.Millisecond
	killed = 2 * time.Second
)

// Shutdown stops every program, leaves the disk clean and powers off.
func (m *machine) Shutdown() {
	m.stopPrograms()
	m.quietDisk()
	powerOff()
}

func (m *machine) stopPrograms() {
	type attempt struct {
		signal unix.Signal
		wait   time.Duration
	}
	attempts := []attempt{{unix.SIGTERM, grace}, {unix.SIGKILL, killed}}
	if m.freezer.frozen.Load() {
		// They would not hear of it, and must not run to do so: this may be a
		// copy that was not renewed. The kernel ends them where they stand.
		attempts = attempts[1:]
	}
	for _, step := range attempts {
		// To everybody but this process; ESRCH: there is nobody.
		if unix.Kill(-1, step.signal) == unix.ESRCH {
			return
		}
		// A stopped program would never see the signal.
		_ = unix.Kill(-1, unix.SIGCONT)
		select {
		case <-m.reaper.None():
			return
		case <-time.After(step.wait):
		}
	}
}

// quietDisk makes the data disk read-only, its journal empty. Neither mount
// can be undone while this program's root is on it.
func (m *machine) quietDisk() {
	unix.Sync()
	if m.data < 0 {
		return
	}
	remount := func(target string) {
		if err := unix.Mount("", target, "", unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOATIME, ""); err != nil {
			m.console.line(fmt.Sprintf("shutdown: %s stays writable: %v; its journal covers it", target, err))
		}
	}
	remount("/")
	if err := unix.Fchdir(m.data); err == nil {
		remount(".")
	}
}

// powerOff ends the machine. Should the kernel refuse, so be it: the host
// has its own deadline.
func powerOff() {
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {}
}
