package jail

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestapi"
)

// Name is argv[0] of stage 2.
const Name = "warren-jail"

// FirstFD is the number of Command.FDs[0] in the program; the others follow.
const FirstFD = 4

// controlFD is where stage 2 finds its Command and leaves its error. The
// program never sees it.
const controlFD = 3

// maxCommand bounds the command and the error that cross controlFD, in bytes.
const maxCommand = 1 << 20

// Command is one program and its room.
type Command struct {
	// Path is the program on the host, absolute; it is found at the same
	// path in the jail, because it lies in /usr or in one of Prefixes.
	Path string `json:"path"`
	// Args follow argv[0], which is Path.
	Args []string `json:"args"`
	// Env is the program's whole environment.
	Env []string `json:"env"`
	// Prefixes are folders outside /usr that the program needs: see Prefixes.
	Prefixes []string `json:"prefixes"`
	// Files are the only other files there.
	Files []File `json:"files"`
	// Devices are bound from /dev at their own path, beside null and urandom.
	Devices []string `json:"devices"`
	// User is who the program runs as. It is set when and only when the
	// caller is root.
	User *User `json:"user"`
	// Limits bound the program.
	Limits Limits `json:"limits"`

	// FDs are inherited as FirstFD and up. They stay the caller's.
	FDs []*os.File `json:"-"`
	// Output is the program's stdout and stderr; nil is /dev/null.
	Output *os.File `json:"-"`
}

// File is a file of the host at another place in the jail.
type File struct {
	Host     string `json:"host"`
	Inside   string `json:"inside"`
	Writable bool   `json:"writable"`
}

// User is a user without rights. Groups are supplementary ones.
type User struct {
	UID    int   `json:"uid"`
	GID    int   `json:"gid"`
	Groups []int `json:"groups"`
}

// Limits are hard. Zero means none.
type Limits struct {
	// FileSize is how long a file may become by writing, in bytes.
	FileSize uint64 `json:"file_size"`
	// OpenFiles is how many descriptors there may be.
	OpenFiles uint64 `json:"open_files"`
}

// Process is a running program.
type Process struct {
	process *os.Process
	done    chan struct{}
	state   *os.ProcessState // valid once done is closed
}

// PID is the program's process id as the caller sees it.
func (p *Process) PID() int { return p.process.Pid }

// Signal sends a signal; os.ErrProcessDone after the program's end. The
// program is init of its namespace: what it does not handle does nothing to
// it, except SIGKILL.
func (p *Process) Signal(s syscall.Signal) error { return p.process.Signal(s) }

// Done is closed when the program has ended and is reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// State is how it ended; call it after Done.
func (p *Process) State() *os.ProcessState { return p.state }

// Start runs the program. When it returns without an error, the program has
// been executed inside the jail; when it returns an error nothing is running.
// ctx bounds the start only.
func Start(ctx context.Context, c Command) (*Process, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	data, err := json.Marshal(wireCommand{c, len(c.FDs)})
	if err != nil {
		return nil, err
	}
	if len(data) > maxCommand {
		return nil, fmt.Errorf("jail: a command of %d bytes", len(data))
	}
	ours, theirs, err := controlPair()
	if err != nil {
		return nil, err
	}
	defer ours.Close()
	p, err := c.spawn(theirs)
	theirs.Close()
	if err != nil {
		return nil, explainSpawn(err)
	}
	if err := handshake(ctx, ours, data); err != nil {
		p.process.Kill()
		<-p.done
		return nil, err
	}
	return p, nil
}

func (c Command) check() error {
	switch isRoot := os.Geteuid() == 0; {
	case isRoot && c.User == nil:
		return errors.New("jail: root must name the user to become")
	case isRoot && (c.User.UID <= 0 || c.User.GID <= 0):
		return fmt.Errorf("jail: user %d:%d is not an unprivileged one", c.User.UID, c.User.GID)
	case !isRoot && c.User != nil:
		return errors.New("jail: only root can become another user")
	}
	for _, f := range c.Files {
		if !filepath.IsAbs(f.Host) || !filepath.IsAbs(f.Inside) {
			return fmt.Errorf("jail: file %q at %q: paths must be absolute", f.Host, f.Inside)
		}
	}
	if !filepath.IsAbs(c.Path) {
		return fmt.Errorf("jail: program %q: the path must be absolute", c.Path)
	}
	return nil
}

func controlPair() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	// Stage 2 reads with plain blocking calls.
	if err := unix.SetNonblock(fds[1], false); err != nil {
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "jail control"), os.NewFile(uintptr(fds[1]), "jail control"), nil
}

// spawn starts stage 2 on a thread of its own, which waits for its end.
func (c Command) spawn(control *os.File) (*Process, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	output := c.Output
	if output == nil {
		output = null
	}
	attr := &os.ProcAttr{
		Env:   []string{"LC_ALL=C"}, // nothing of the user's environment
		Files: append([]*os.File{null, output, output, control}, c.FDs...),
		Sys:   sysProcAttr(),
	}
	started := make(chan error, 1)
	p := &Process{done: make(chan struct{})}
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		var err error
		p.process, err = os.StartProcess("/proc/self/exe", []string{Name}, attr)
		started <- err
		if err != nil {
			return
		}
		p.state, _ = p.process.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

func sysProcAttr() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET |
			unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP,
		Setsid:    true, // the terminal's signals are not for the VM
		Pdeathsig: unix.SIGKILL,
	}
	if uid, gid := os.Geteuid(), os.Getegid(); uid != 0 {
		attr.Cloneflags |= unix.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}}
		// The user is not 0 in there either, so that no exec ever brings
		// capabilities back; what stage 2 needs comes as ambient ones.
		attr.AmbientCaps = []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_SETPCAP}
	}
	return attr
}

// handshake gives stage 2 its command and waits until it has become the
// program, which closes its end, or has said why it cannot.
func handshake(ctx context.Context, control *os.File, command []byte) error {
	// os.File on a non-blocking socket knows deadlines.
	stop := context.AfterFunc(ctx, func() { control.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := control.Write(append(command, '\n')); err != nil && !errors.Is(err, syscall.EPIPE) {
		return startFault(ctx, err)
	}
	said, err := io.ReadAll(io.LimitReader(control, maxCommand))
	if err != nil && !errors.Is(err, syscall.ECONNRESET) {
		return startFault(ctx, err)
	}
	if len(said) == 0 {
		return nil
	}
	var f fault
	if json.Unmarshal(said, &f) != nil {
		return fmt.Errorf("jail: %s", guestapi.CleanLineTail(said, 512))
	}
	return f.explain()
}

func startFault(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return fmt.Errorf("jail: stage 2 does not answer: %w", err)
}

// fault is what stage 2 says when it cannot go on.
type fault struct {
	Step  string        `json:"step"`
	Errno syscall.Errno `json:"errno"`
	// Text is set when there is no errno.
	Text string `json:"text"`
	// Mounts: the step was part of building the room.
	Mounts bool `json:"mounts"`
}

const userNamespaceRemedy = "allow unprivileged user namespaces " +
	"(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces=10000; " +
	"in a container run it with that right), or run as root"

func (f fault) explain() error {
	if f.Errno == 0 {
		return fmt.Errorf("confine the VM: %s: %s", f.Step, f.Text)
	}
	err := fmt.Errorf("confine the VM: %s: %w", f.Step, f.Errno)
	switch {
	case f.Errno == unix.ENOSYS:
		return fmt.Errorf("%w; Linux 5.12 or newer is needed", err)
	case f.Mounts && (f.Errno == unix.EPERM || f.Errno == unix.EACCES) && os.Geteuid() != 0 && !strings.HasPrefix(f.Step, "open "):
		return fmt.Errorf("%w; %s", err, userNamespaceRemedy)
	}
	return err
}

// explainSpawn adds the remedy to a clone that was refused.
func explainSpawn(err error) error {
	err = fmt.Errorf("confine the VM: new namespaces: %w", err)
	if os.Geteuid() == 0 {
		if errors.Is(err, unix.EPERM) {
			return fmt.Errorf("%w; root here may not make namespaces: run as an ordinary user, or in a container with CAP_SYS_ADMIN", err)
		}
		return err
	}
	for _, refused := range []error{unix.EPERM, unix.EACCES, unix.ENOSPC, unix.EUSERS, unix.EINVAL, unix.ENOSYS} {
		if errors.Is(err, refused) {
			return fmt.Errorf("%w; %s", err, userNamespaceRemedy)
		}
	}
	return err
}
