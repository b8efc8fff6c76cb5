package guest

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guest/proc"
	"github.com/warren-vm/warren/internal/guestapi"
)

// open makes the channels between agent and program. On an error everything
// but r's own sides, which closeOurs closes, is closed again.
func (r *run) open(user proc.User) (p programSide, err error) {
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	if r.req.TTY {
		return p, r.openTerminal(user, &p)
	}
	null := r.agent.null
	p.files = [3]uintptr{null, null, null}
	if r.req.Stdin {
		ours, err := p.pipe(0)
		if err != nil {
			return p, err
		}
		r.in = &input{file: os.NewFile(uintptr(ours), "stdin")}
	}
	if r.out, err = r.openOutput(&p, 1, guestapi.FrameStdout); err != nil {
		return p, err
	}
	r.err, err = r.openOutput(&p, 2, guestapi.FrameStderr)
	return p, err
}

func (r *run) openOutput(p *programSide, n int, kind guestapi.FrameKind) (*output, error) {
	ours, err := p.pipe(n)
	if err != nil {
		return nil, err
	}
	return newOutput(r, kind, ours, false)
}

func (r *run) openTerminal(user proc.User, p *programSide) error {
	master, program, err := openTerminal(user, r.req.Rows, r.req.Cols)
	if err != nil {
		return err
	}
	p.owned = append(p.owned, program)
	p.files = [3]uintptr{uintptr(program), uintptr(program), uintptr(program)}
	if r.out, err = newOutput(r, guestapi.FrameStdout, master, true); err != nil {
		return err
	}
	r.tty = &terminal{file: r.out.file, raw: r.out.raw}
	r.in = &input{file: r.out.file, tty: r.tty}
	return nil
}

// pipe makes a pipe whose one side is the program's descriptor n and returns
// the other, non-blocking. Only our side is: programs expect to wait.
func (p *programSide) pipe(n int) (ours int, err error) {
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil {
		return 0, os.NewSyscallError("pipe", err)
	}
	ours, theirs := fds[0], fds[1]
	if n == 0 {
		ours, theirs = theirs, ours
	}
	p.files[n] = uintptr(theirs)
	p.owned = append(p.owned, theirs)
	// Everything else is known, so setting the flag needs no reading first.
	access := syscall.O_RDONLY
	if n == 0 {
		access = syscall.O_WRONLY
	}
	if _, _, e := syscall.Syscall(syscall.SYS_FCNTL, uintptr(ours), syscall.F_SETFL, uintptr(access|syscall.O_NONBLOCK)); e != 0 {
		syscall.Close(ours)
		return 0, os.NewSyscallError("fcntl", e)
	}
	return ours, nil
}

// widePipe is as large as the kernel lets every user make one.
const widePipe = 1 << 20

// widen enlarges a pipe through which much is going: agent and program then
// take turns less often, and each turn costs an emulated processor its address
// translations. It is not done from the start because most programs say
// little. A kernel that does not allow it leaves the pipe as it is.
func widen(fd int) {
	_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETPIPE_SZ, widePipe)
}
