package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/vm/jail"
	"github.com/warren-vm/warren/internal/vm/qmp"
	"github.com/warren-vm/warren/internal/vm/ram"
)

// QMP is the connection to QEMU's monitor.
type QMP = qmp.Client

// Options are what Start needs beside the machine itself.
type Options struct {
	// Console gets what the guest writes to its serial console, from one
	// goroutine, until QEMU has ended. It should be bounded (BoundedLog) and
	// must not block: while it does the guest's console stands still. Its
	// errors are ignored. nil drops the output.
	Console io.Writer
}

// VM is one QEMU, running or ended. All methods may be called from any
// goroutine.
type VM struct {
	process    *jail.Process
	qmp        *qmp.Client
	events     *qmp.Subscription
	diskErrors *qmp.Subscription
	link       net.Conn
	console    net.Conn
	stderr     *os.File
	errText    tail
	readers    sync.WaitGroup // of console and stderr

	// What a restored VM needs to be snapshotted, by one caller at a time.
	accel    Accel
	capture  sync.Mutex   // held while the RAM is looked at
	ram      *ram.Process // nil when closed
	memory   *ram.Tracker // nil when the RAM is not a file's private mapping
	state    *lentState   // for the next capture; may be nil
	overlays int          // how many were added
	diskNode string       // the overlay that is written to
	diskSeen uint64       // diskWrites when it was put on top

	stopping atomic.Bool
	exited   chan struct{}
	exit     ExitInfo // valid once exited is closed
}

// How long each step of an end may take. They are long because a machine may
// be busy; nothing waits for them when all is well.
const (
	quitDeadline = 5 * time.Second
	termDeadline = 3 * time.Second
	killDeadline = 20 * time.Second
	// monitorGrace is how long QEMU may live on without its monitor. It
	// closes the monitor a moment before it ends.
	monitorGrace = 5 * time.Second
	// drainDeadline bounds the wait for output after QEMU's end.
	drainDeadline = 5 * time.Second
)

// Start runs QEMU confined and returns once its monitor has greeted; the guest
// is running then, unless s.Paused. With a state to restore it returns when
// QEMU has it, and the guest goes on at Resume. ctx bounds the start only.
//
// As root, Start gives s.DataDisk and s.Memory to the user QEMU runs as (see
// VMUser). An error means that nothing runs; a file that was created or given
// away stays so. s is checked first, see Spec.Check.
//
// The caller always calls Stop in the end, also after the VM has ended by
// itself.
func Start(ctx context.Context, s Spec, o Options) (*VM, error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	user, err := vmUser(s.Accel)
	if err != nil {
		return nil, err
	}
	command, err := jailCommand(s, user)
	if err != nil {
		return nil, err
	}
	if err := prepareFiles(s, user); err != nil {
		return nil, err
	}
	v := &VM{exited: make(chan struct{}), errText: tail{keep: maxStderr}, accel: s.Accel, diskNode: "data"}
	monitor, err := v.spawn(ctx, command)
	if err != nil {
		return nil, err
	}
	v.readers.Go(func() { drain(o.Console, v.console) })
	v.readers.Go(func() { drain(&v.errText, v.stderr) })
	v.qmp, err = qmp.New(ctx, monitor)
	if err != nil {
		return nil, v.abandon(err)
	}
	v.events = v.qmp.Subscribe("SHUTDOWN", "GUEST_PANICKED")
	v.diskErrors = v.qmp.Subscribe("BLOCK_IO_ERROR")
	go v.watch()
	if s.State != "" {
		if err := v.load(ctx, s); err != nil {
			return nil, v.giveUp(ctx, err)
		}
	}
	return v, nil
}

// giveUp ends a VM whose state could not be restored.
func (v *VM) giveUp(ctx context.Context, why error) error {
	if v.processEnds(0) {
		why = &StartError{Exit: v.Exit()}
	}
	return errors.Join(why, v.Stop(context.WithoutCancel(ctx)))
}

// jailCommand is QEMU and its room.
func jailCommand(s Spec, user *vmIdentity) (jail.Command, error) {
	found, err := findQEMU(s.QEMU)
	if err != nil {
		return jail.Command{}, err
	}
	path, prefixes, err := jail.Prefixes(found)
	if err != nil {
		return jail.Command{}, fmt.Errorf("QEMU: %w", err)
	}
	c := jail.Command{
		Path:     path,
		Prefixes: prefixes,
		Args:     Args(s, inJail, FDs{QMP: jail.FirstFD, Link: jail.FirstFD + 1, Console: jail.FirstFD + 2}),
		Env:      environment,
		Limits:   jail.Limits{FileSize: s.maxFile(), OpenFiles: 4096},
	}
	if user != nil {
		c.User = &user.User
	}
	if s.Accel == KVM {
		c.Devices = []string{"/dev/kvm"}
	}
	for _, f := range []jail.File{
		{Host: s.Kernel, Inside: inJail.Kernel},
		{Host: s.Initramfs, Inside: inJail.Initramfs},
		{Host: s.RootDisk, Inside: inJail.RootDisk},
		{Host: s.DataBase, Inside: inJail.DataBase},
		{Host: s.DataDisk, Inside: inJail.DataDisk, Writable: true},
		{Host: s.Memory, Inside: inJail.Memory, Writable: true},
	} {
		if f.Host != "" {
			c.Files = append(c.Files, f)
		}
	}
	for _, path := range hugePages {
		if _, err := os.Stat(path); err == nil {
			c.Files = append(c.Files, jail.File{Host: path, Inside: path})
		}
	}
	for i, path := range s.Overlays {
		c.Files = append(c.Files, jail.File{Host: path, Inside: inJail.Overlay(i)})
	}
	return c, nil
}

// environment is all that QEMU gets of one. Its heap in huge pages saves some
// two thousand page faults of a start, which made it a third shorter where
// faults are dear: 83 ms instead of 120 on a host that is a VM itself. One heap
// for all threads: each of its own took a huge page for 4 KiB, 18 MiB in all.
var environment = []string{"LC_ALL=C", "HOME=/",
	"GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.top_pad=33554432:glibc.malloc.arena_max=1"}

// hugePages are where glibc looks whether there are any.
var hugePages = []string{"/sys/kernel/mm/transparent_hugepage/enabled", "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size"}

// maxFile is the length no file of the VM can honestly pass: an overlay that
// was written everywhere is its base plus a thousandth of tables, and the
// RAM's file has the RAM's size. It keeps a QEMU that was taken over from
// filling the disk without end.
func (s Spec) maxFile() uint64 {
	most := uint64(s.MemBytes())
	if info, err := os.Stat(s.DataBase); err == nil {
		most = max(most, uint64(info.Size()))
	}
	return most + most/8 + 1<<30
}

// prepareFiles makes the RAM's file and lets QEMU's user write what it has to.
func prepareFiles(s Spec, user *vmIdentity) error {
	if s.Memory != "" {
		if err := createMemory(s.Memory, s.MemBytes()); err != nil {
			return fmt.Errorf("memory file: %w", err)
		}
	}
	for _, path := range []string{s.Memory, s.DataDisk} {
		if err := user.own(path); err != nil {
			return err
		}
	}
	return nil
}

// Own gives a file to the user that QEMU runs as, if that is another.
func Own(path string) error {
	user, err := vmUser(TCG)
	if err != nil {
		return err
	}
	return user.own(path)
}

// own gives the file at path to the user; "" and a user that is nil are fine.
// A file that is his already is not touched: its change time is what a
// snapshot is recognised by.
func (id *vmIdentity) own(path string) error {
	if id == nil || path == "" {
		return nil
	}
	info, err := os.Stat(path)
	if err == nil {
		if st := info.Sys().(*syscall.Stat_t); int(st.Uid) == id.UID && int(st.Gid) == id.GID {
			return nil
		}
		err = os.Chown(path, id.UID, id.GID)
	}
	if err != nil {
		return fmt.Errorf("give the file to QEMU's user: %w", err)
	}
	return nil
}

// createMemory makes a sparse file; one that is there has been checked.
func createMemory(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	err = f.Truncate(size)
	if closed := f.Close(); err == nil {
		err = closed
	}
	if err != nil {
		os.Remove(path) // or the next start would find it with the wrong size
	}
	return err
}

// spawn makes the channels and starts QEMU on their other ends.
func (v *VM) spawn(ctx context.Context, c jail.Command) (monitor *net.UnixConn, err error) {
	var ours [3]*net.UnixConn
	defer func() {
		for _, f := range c.FDs {
			f.Close()
		}
		if err == nil {
			return
		}
		for _, conn := range ours {
			if conn != nil {
				conn.Close()
			}
		}
	}()
	for i := range ours {
		var theirs *os.File
		if ours[i], theirs, err = socketpair(); err != nil {
			return nil, err
		}
		c.FDs = append(c.FDs, theirs)
	}
	stderr, output, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer output.Close()
	c.Output = output
	if v.process, err = jail.Start(ctx, c); err != nil {
		stderr.Close()
		return nil, err
	}
	v.link, v.console, v.stderr = ours[1], ours[2], stderr
	return ours[0], nil
}

// socketpair returns our end, ready for use, and a file to be inherited.
func socketpair() (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "QEMU's end")
	end := os.NewFile(uintptr(fds[0]), "our end")
	defer end.Close() // FileConn has its own
	conn, err := net.FileConn(end)
	if err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return conn.(*net.UnixConn), theirs, nil
}

// Link is the host's end of the guest's virtio-serial port LinkPort. Its Read
// ends with QEMU. The caller may close it; Stop does.
func (v *VM) Link() net.Conn { return v.link }

// QMP is the monitor. It is closed when the VM ends. To close it is to have
// QEMU killed.
func (v *VM) QMP() *QMP { return v.qmp }

// PID is QEMU's process id.
func (v *VM) PID() int { return v.process.PID() }

// Exited is closed when QEMU has ended and everything it wrote to the console
// has been delivered.
func (v *VM) Exited() <-chan struct{} { return v.exited }

// Exit is how QEMU ended. It is valid after Exited and waits for it.
func (v *VM) Exit() ExitInfo {
	<-v.exited
	return v.exit
}

// JailMain is the other half of Start: a program that calls Start calls it
// first thing in main. It returns at once unless Start has started the
// program as stage 2, and then never; see package jail.
func JailMain() { jail.Main() }

// abandon ends a QEMU that has not greeted and says why it has not.
func (v *VM) abandon(why error) error {
	// QEMU that gives up closes the monitor first: let it finish its sentence.
	ended := errors.Is(why, qmp.ErrGone) && v.processEnds(monitorGrace)
	if !ended {
		v.process.Signal(syscall.SIGKILL)
		<-v.process.Done()
	}
	v.release()
	v.link.Close()
	info := ending{state: v.process.State(), stderr: v.errText.bytes()}.info()
	if !ended {
		if words := info.lastWords(); words != "" {
			return fmt.Errorf("start QEMU: %w%s", why, words)
		}
		return fmt.Errorf("start QEMU: %w", why)
	}
	return &StartError{Exit: info}
}

// StartError is a QEMU that ended instead of starting.
type StartError struct{ Exit ExitInfo }

func (e *StartError) Error() string { return "start QEMU: " + e.Exit.String() }

// processEnds waits for the process to end by itself.
func (v *VM) processEnds(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-v.process.Done():
		return true
	case <-timer.C:
		return false
	}
}

// release closes what is left after the process has ended, once what it wrote
// has been delivered. A console writer that blocks is not waited for.
func (v *VM) release() {
	read := make(chan struct{})
	go func() { v.readers.Wait(); close(read) }()
	timer := time.NewTimer(drainDeadline)
	defer timer.Stop()
	select {
	case <-read:
	case <-timer.C:
	}
	v.console.Close()
	v.stderr.Close()
}
