package guest

import (
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestapi"
)

// frameBuffers have room for one whole frame. A buffer is taken when there is
// something to read and given back when it has been sent, so that a thousand
// silent programs hold none.
var frameBuffers = sync.Pool{New: func() any {
	return new([guestapi.FrameHeader + guestapi.MaxFrame]byte)
}}

// output reads what a program writes and sends it as frames.
type output struct {
	run  *run
	kind guestapi.FrameKind
	file *os.File // non-blocking
	raw  syscall.RawConn
	fd   int
	tty  bool
	wide bool // see widen

	// mu is held while something is read and sent, so that what finish reads
	// comes after what the goroutine read.
	mu    sync.Mutex
	ended bool // nothing will ever come
	over  bool // the program has ended: what comes is not its own
}

// newOutput takes fd over.
func newOutput(r *run, kind guestapi.FrameKind, fd int, tty bool) (*output, error) {
	file := os.NewFile(uintptr(fd), "output")
	raw, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return nil, err
	}
	return &output{run: r, kind: kind, file: file, raw: raw, fd: fd, tty: tty}, nil
}

// follow sends what comes until nothing more can come, then closes.
func (o *output) follow() {
	defer o.run.agent.runs.giveBack(1)
	defer o.close()
	// The only error is that the file cannot be waited for: as good as its end.
	_ = o.raw.Read(func(uintptr) bool { return o.move() })
	if o.tty {
		// No process has the terminal open, but it is still the session's:
		// closing our side would hang up a program that runs on without it.
		<-o.run.process.Done()
	}
}

func (o *output) close() {
	o.mu.Lock()
	o.ended = true // finish must not use the descriptor's number any more
	o.mu.Unlock()
	o.file.Close()
}

// move sends what there is to read. It returns true at the end, false when
// there may be more.
func (o *output) move() (end bool) {
	for {
		n, done := o.step()
		if done {
			return true
		}
		if n == 0 {
			// Only now: the poller tells of a change once, and data and end
			// may have come as one.
			return false
		}
	}
}

// step sends one frame. n is the bytes read, 0 when there are none now.
func (o *output) step() (n int, done bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended {
		return 0, true
	}
	n = o.read(guestapi.MaxFrame)
	return n, o.ended
}

// read reads once and sends what came, or drops it after the program's end.
// It returns 0 when there is nothing, and sets ended when there never will be.
func (o *output) read(most int) int {
	buf := frameBuffers.Get().(*[guestapi.FrameHeader + guestapi.MaxFrame]byte)
	defer frameBuffers.Put(buf)
	for {
		n, err := syscall.Read(o.fd, buf[guestapi.FrameHeader:guestapi.FrameHeader+most])
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			return 0
		case err != nil || n == 0:
			o.ended = true // EIO: the terminal has no other side
			return 0
		}
		if n == guestapi.MaxFrame && !o.wide && !o.tty {
			o.wide = true
			widen(o.fd)
		}
		if !o.over {
			o.run.send(o.kind, buf[:], n)
		}
		return n
	}
}

// finish is called when the program has ended: it sends what was written until
// now and makes the goroutine drop what others write from now on.
func (o *output) finish() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for left := o.pending(); left > 0 && !o.ended; {
		n := o.read(min(left, guestapi.MaxFrame))
		if n == 0 {
			break
		}
		left -= n
	}
	o.over = true
}

// pending is how much there is to read at most: what others write meanwhile
// must not keep a run from ending.
func (o *output) pending() int {
	if o.ended {
		return 0
	}
	if o.tty {
		// The kernel cannot tell for a terminal, which has 64 KiB under way
		// and a line's worth ready at most.
		return 4 * guestapi.MaxFrame
	}
	n, err := unix.IoctlGetInt(o.fd, unix.TIOCINQ)
	if err != nil {
		return 0
	}
	return n
}
