package boot

import (
	"bytes"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestapi"
)

// freezer stops the programs of a cgroup and lets them run on. Its files are
// opened once: freezing comes out of the time in which the VM stands still,
// and by descriptor the group is found whatever the guest has mounted over its
// path.
//
// It stops what is in the group and below. The guest's root can move a process
// out of it, as it can do anything else to its own guest.
type freezer struct {
	order  int         // cgroup.freeze
	events int         // cgroup.events
	frozen atomic.Bool // the order stands, as far as is known
}

// freezeSettles is how long freeze waits for the kernel to say that all have
// stopped. Only a task that waits uninterruptibly in the kernel takes longer
// than a few milliseconds, and that one runs no code of its own first.
const freezeSettles = 250 * time.Millisecond

// openFreezer opens the files of the cgroup in dir.
func openFreezer(dir string) (*freezer, error) {
	open := func(name string, flag int) (int, error) {
		path := filepath.Join(dir, name)
		fd, err := unix.Open(path, flag|unix.O_CLOEXEC, 0)
		if err != nil {
			return 0, &os.PathError{Op: "open", Path: path, Err: err}
		}
		return fd, nil
	}
	// Not by os.File: the runtime's poller would wake the agent for every
	// first and last process of the group.
	order, err := open("cgroup.freeze", unix.O_WRONLY)
	if err != nil {
		return nil, err
	}
	events, err := open("cgroup.events", unix.O_RDONLY)
	if err != nil {
		unix.Close(order)
		return nil, err
	}
	return &freezer{order: order, events: events}, nil
}

// freeze gives the order and waits until the kernel says that all programs
// have stopped, but not for longer than within. The only error is that the
// order could not be given; nothing has changed then.
func (f *freezer) freeze(within time.Duration) (guestapi.FreezeInfo, error) {
	begin := time.Now()
	if err := f.write('1'); err != nil {
		return guestapi.FreezeInfo{}, os.NewSyscallError("freeze programs", err)
	}
	f.frozen.Store(true)
	settled := f.settle(begin, within)
	return guestapi.FreezeInfo{Frozen: settled, SettledUS: time.Since(begin).Microseconds()}, nil
}

// settle waits. Not to know is not to have settled: it says false at once.
func (f *freezer) settle(begin time.Time, within time.Duration) bool {
	// The kernel tells of a change at most every 10 ms and may tell late, so
	// looking again does not wait for it alone.
	for wait := 200 * time.Microsecond; ; wait = min(2*wait, 16*time.Millisecond) {
		if frozen, err := f.settled(); err != nil || frozen {
			return frozen
		}
		if time.Since(begin) >= within {
			return false
		}
		fds := []unix.PollFd{{Fd: int32(f.events), Events: unix.POLLPRI}}
		timeout := unix.NsecToTimespec(wait.Nanoseconds())
		if _, err := unix.Ppoll(fds, &timeout, nil); err != nil && err != unix.EINTR {
			return false
		}
	}
}

// settled reads whether all have stopped. Reading also arms the next poll.
func (f *freezer) settled() (bool, error) {
	var buf [256]byte // two short lines
	n, err := unix.Pread(f.events, buf[:], 0)
	if err != nil {
		return false, err
	}
	for line := range bytes.Lines(buf[:n]) {
		if bytes.Equal(line, []byte("frozen 1\n")) {
			return true, nil
		}
	}
	return false, nil
}

// thaw takes the order back. After an error the programs are as they were.
func (f *freezer) thaw() error {
	if err := f.write('0'); err != nil {
		return os.NewSyscallError("thaw programs", err)
	}
	f.frozen.Store(false)
	return nil
}

func (f *freezer) write(order byte) error {
	for {
		_, err := unix.Pwrite(f.order, []byte{order}, 0)
		if err != unix.EINTR {
			return err
		}
	}
}

// Freeze stops every program.
func (m *machine) Freeze() (guestapi.FreezeInfo, error) { return m.freezer.freeze(freezeSettles) }

// Thaw lets them run on.
func (m *machine) Thaw() error { return m.freezer.thaw() }
