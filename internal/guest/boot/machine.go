package boot

import (
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guest"
	"github.com/warren-vm/warren/internal/guest/proc"
	"github.com/warren-vm/warren/internal/guestapi"
)

// machine is the VM that the agent runs on: guest.System for real.
type machine struct {
	console *console
	port    string
	reaper  *proc.Reaper
	agent   *guest.Agent
	oom     oomWatch
	cgroups cgroups
	freezer *freezer // of all programs
	// processors are there when Prepare returns.
	processors *processors
	data       int // the data disk's root folder, -1 before Prepare
	identity   identityFiles
}

// Prepare makes this VM one of its own. The order matters: nothing that could
// run or be read by a program comes before the generator was reseeded.
func (m *machine) Prepare(id guestapi.Identity) (info guestapi.PrepareInfo, err error) {
	info.PhasesUS, err = walk("prepare", []step{
		{"reseed", func() error { return reseed(id.Entropy) }},
		{"clock", func() error { return m.SetClock(time.Unix(0, id.UnixNano)) }},
		{"data", func() (err error) { m.data, err = mountDataDisk(); return err }},
		{"overlay", mountOverlay},
		{"root", enterRoot},
		{"identity", func() error { return m.identity.put(id) }},
		{"processors", m.processors.wait},
	})
	return info, err
}

// SetClock sets the wall clock. Timers run on the other one and do not jump.
func (m *machine) SetClock(t time.Time) error {
	ts := unix.NsecToTimespec(t.UnixNano())
	return os.NewSyscallError("set clock", unix.ClockSettime(unix.CLOCK_REALTIME, &ts))
}

// reseed gives the kernel's generator the host's bytes and makes it use them
// now: two copies of one VM must not go on with the same numbers.
func reseed(entropy []byte) error {
	fd, err := unix.Open("/dev/urandom", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: "/dev/urandom", Err: err}
	}
	defer unix.Close(fd)
	// struct rand_pool_info: bits, bytes, the bytes. An array of int32 is
	// aligned as the kernel wants it.
	info := make([]int32, 2+(len(entropy)+3)/4)
	info[0], info[1] = int32(len(entropy)*8), int32(len(entropy))
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&info[2])), len(entropy)), entropy)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&info[0])))
	runtime.KeepAlive(info)
	if errno != 0 {
		return os.NewSyscallError("add entropy", errno)
	}
	if err := unix.IoctlSetInt(fd, unix.RNDRESEEDCRNG, 0); err != nil {
		return os.NewSyscallError("reseed the kernel's generator", err)
	}
	return nil
}
