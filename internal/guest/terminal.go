package guest

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guest/proc"
)

// terminal is the agent's side of a pseudo terminal. Its file belongs to the
// run's output, which closes it; everything here works through the file, so
// that nothing reaches a descriptor that was closed and given to another.
type terminal struct {
	file *os.File
	raw  syscall.RawConn
}

// openTerminal opens a pair. Both sides are close-on-exec and belong to the
// caller. The program's side belongs to the user, or su and screen could not
// open it again.
func openTerminal(user proc.User, rows, cols uint16) (master, program int, err error) {
	// O_NOCTTY: an agent with a controlling terminal would be hung up with it.
	master, err = unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, 0, &os.PathError{Op: "open", Path: "/dev/ptmx", Err: err}
	}
	program = -1
	defer func() {
		if err != nil {
			unix.Close(master)
			if program >= 0 {
				unix.Close(program)
			}
		}
	}()
	if err = unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return 0, 0, os.NewSyscallError("unlock terminal", err)
	}
	// By the master's descriptor, whatever is mounted on /dev/pts.
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		err = os.NewSyscallError("open terminal", errno)
		return 0, 0, err
	}
	program = int(fd)
	if int(user.UID) != os.Geteuid() {
		if err = unix.Fchown(program, int(user.UID), -1); err != nil {
			return 0, 0, os.NewSyscallError("chown terminal", err)
		}
	}
	if rows != 0 && cols != 0 {
		if err = setWindow(master, rows, cols); err != nil {
			return 0, 0, err
		}
	}
	return master, program, nil
}

func setWindow(master int, rows, cols uint16) error {
	size := unix.Winsize{Row: rows, Col: cols}
	return os.NewSyscallError("resize terminal", unix.IoctlSetWinsize(master, unix.TIOCSWINSZ, &size))
}

func (t *terminal) resize(rows, cols uint16) error {
	var err error
	if e := t.raw.Control(func(fd uintptr) { err = setWindow(int(fd), rows, cols) }); e != nil {
		return e
	}
	return err
}

// endInput tells a program that reads by lines that there are no more. A
// terminal does that by a character at the start of a line; in the middle of
// one, the first only sends the line.
func (t *terminal) endInput(last byte) {
	var eof []byte
	_ = t.raw.Control(func(fd uintptr) { // closed: nobody to tell
		mode, err := unix.IoctlGetTermios(int(fd), unix.TCGETS)
		if err == nil && mode.Lflag&unix.ICANON != 0 {
			eof = append(eof, mode.Cc[unix.VEOF])
		}
	})
	if last != 0 && last != '\n' && last != '\r' {
		eof = append(eof, eof...)
	}
	if len(eof) > 0 {
		t.file.Write(eof)
	}
}
