package guest

import (
	"io"
	"os"
	"sync"

	"github.com/warren-vm/warren/internal/guestapi"
)

// input is the program's side of what the host sends.
type input struct {
	file   *os.File // non-blocking; with a terminal, the terminal itself
	tty    *terminal
	ending sync.Once // closes file

	// Only feed's goroutine uses these.
	closed   bool
	lastByte byte
	written  int64
	wide     bool // see widen
}

// inputSize is what one read of the stream asks for.
const inputSize = 64 << 10

var inputBuffers = sync.Pool{New: func() any { return new([inputSize]byte) }}

// feed gives the program what the frames on r carry, until the last frame,
// the end of r or a frame that is none. However it ends, the program then sees
// the end of its input, also when the host has gone or, in a copy, was another:
// nobody can send the rest any more, and a program that waited for it would
// wait for ever. It runs on. Frames are passed on in pieces as
// they come, which saves gathering them. What a program does not read any
// more is dropped: the host must not wait for it.
func (in *input) feed(r io.Reader) {
	defer in.end()
	buf := inputBuffers.Get().(*[inputSize]byte)
	defer inputBuffers.Put(buf)
	var frames frameSplitter
	for {
		n, err := r.Read(buf[:])
		more := frames.split(buf[:n], in.write)
		if !more || err != nil {
			return
		}
	}
}

// frameSplitter finds the payloads in a stream of frames that arrives in
// pieces of any size.
type frameSplitter struct {
	header []byte // what has come of the next header
	left   int    // payload still to come
	space  [guestapi.FrameHeader]byte
}

// split hands the payloads in p to deliver and tells whether the input goes on.
func (s *frameSplitter) split(p []byte, deliver func([]byte)) (more bool) {
	if s.header == nil {
		s.header = s.space[:0]
	}
	for len(p) > 0 {
		if s.left > 0 {
			n := min(s.left, len(p))
			deliver(p[:n])
			p, s.left = p[n:], s.left-n
			continue
		}
		n := min(guestapi.FrameHeader-len(s.header), len(p))
		s.header = append(s.header, p[:n]...)
		p = p[n:]
		if len(s.header) < guestapi.FrameHeader {
			return true
		}
		kind, length, ok := parseHeader(s.header)
		s.header = s.space[:0]
		if !ok || kind != guestapi.FrameStdin {
			return false
		}
		s.left = length
	}
	return true
}

func parseHeader(h []byte) (guestapi.FrameKind, int, bool) {
	n := int(h[1])<<24 | int(h[2])<<16 | int(h[3])<<8 | int(h[4])
	return guestapi.FrameKind(h[0]), n, n <= guestapi.MaxFrame
}

func (in *input) write(p []byte) {
	if in.closed {
		return
	}
	in.lastByte = p[len(p)-1]
	in.written += int64(len(p))
	if in.written > inputSize && !in.wide && in.tty == nil {
		in.wide = true
		if raw, err := in.file.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { widen(int(fd)) })
		}
	}
	if _, err := in.file.Write(p); err != nil {
		// The program has closed its input, or ended.
		in.end()
		in.closed = true
	}
}

// end ends the program's input, once.
func (in *input) end() {
	if in.tty != nil {
		if !in.closed {
			in.closed = true
			in.tty.endInput(in.lastByte)
		}
		return
	}
	in.ending.Do(func() { in.file.Close() })
}

// stop is called when the program has ended, while feed may be blocked in a
// write. With a terminal the output closes it.
func (in *input) stop() {
	if in.tty == nil {
		in.ending.Do(func() { in.file.Close() })
	}
}
