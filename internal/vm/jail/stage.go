package jail

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// Main is stage 2. A program that calls Start calls Main first thing in its
// own main; it returns at once unless it was started by Start, and then never.
//
// Called by hand under stage 2's name it does nothing and exits with 2: it
// goes on only as the first process of a pid namespace with the starter's
// socket as descriptor 3, because what it does to its mounts must not
// happen to anyone else's.
func Main() {
	if len(os.Args) == 0 || os.Args[0] != Name {
		return
	}
	// Everything below is about this one thread, which execs in the end;
	// exec ends the others.
	runtime.LockOSThread()
	if err := byHand(); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v; it is a part of abox-vmm and not for use by hand\n", Name, err)
		os.Exit(2)
	}
	f := stage2()
	if data, err := json.Marshal(f); err == nil {
		unix.Write(controlFD, data)
	}
	os.Exit(2)
}

func byHand() error {
	if os.Getpid() != 1 {
		return errors.New("not the first process of a jail")
	}
	if kind, err := unix.GetsockoptInt(controlFD, unix.SOL_SOCKET, unix.SO_DOMAIN); err != nil || kind != unix.AF_UNIX {
		return errors.New("no command from a starter")
	}
	return nil
}

// stage2 only returns with what went wrong.
func stage2() fault {
	// The program must not inherit it, and its closing tells the starter that
	// the program runs.
	unix.CloseOnExec(controlFD)
	c, err := readCommand()
	if err != nil {
		return faultOf("read the command", err, false)
	}
	// The room is for another user; the starter may have kept others out.
	unix.Umask(0o022)
	if step, err := c.buildRoom(); err != nil {
		return faultOf(step, err, true)
	}
	if step, err := c.becomeNobody(); err != nil {
		return faultOf(step, err, false)
	}
	// The starter may have died before PDEATHSIG was set; its end of the
	// socket is closed then.
	poll := []unix.PollFd{{Fd: controlFD}}
	if _, err := unix.Poll(poll, 0); err != nil || poll[0].Revents&unix.POLLHUP != 0 {
		return faultOf("look for the starter", unix.ESRCH, false)
	}
	first := uint(FirstFD + c.Kept)
	if err := unix.CloseRange(first, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return faultOf("close other descriptors", err, false)
	}
	err = syscall.Exec(c.Path, append([]string{c.Path}, c.Args...), c.Env)
	return faultOf("run "+c.Path, err, false)
}

// wireCommand is what crosses controlFD.
type wireCommand struct {
	Command
	// Kept is how many descriptors from FirstFD on the program keeps.
	Kept int `json:"kept"`
}

func readCommand() (wireCommand, error) {
	var c wireCommand
	var data []byte
	buf := make([]byte, 16<<10)
	for len(data) == 0 || data[len(data)-1] != '\n' {
		n, err := unix.Read(controlFD, buf)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return c, err
		case n == 0 || len(data)+n > maxCommand+1:
			return c, errors.New("cut short or too long")
		}
		data = append(data, buf[:n]...)
	}
	return c, json.Unmarshal(data, &c)
}

func faultOf(step string, err error, mounts bool) fault {
	f := fault{Step: step, Mounts: mounts}
	if !errors.As(err, &f.Errno) {
		f.Text = err.Error()
	}
	return f
}
