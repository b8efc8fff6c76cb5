package link

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/hashicorp/yamux"
)

// ErrReset: the other side dropped this one stream, unread bytes included.
var ErrReset = errors.New("the other side reset the stream")

// How much a Write hands to yamux at once: what fills one frame. For the host
// it is also what each writer may add to an outbox that has just filled up.
const (
	hostChunk  = maxHostFrame - overhead - muxHeaderSize
	guestChunk = maxGuestFrame - overhead - muxHeaderSize
)

// stream is a yamux stream that behaves like a net.Conn where yamux's does
// not: Close interrupts a Read, deadlines give os.ErrDeadlineExceeded and
// reach a Write that waits for the port, and a session's end is an error,
// not io.EOF.
type stream struct {
	session *Session
	raw     *yamux.Stream
	flow    *flow

	closing chan struct{} // closed by Close

	mu            sync.Mutex
	closed        bool
	writeDeadline time.Time
	changed       chan struct{} // closed and replaced when writeDeadline changes
}

// newStream returns nil when the session has ended before raw was opened.
func newStream(s *Session, raw *yamux.Stream) *stream {
	f := s.guard.take(raw.StreamID())
	if f == nil {
		return nil
	}
	return &stream{
		session: s,
		raw:     raw,
		flow:    f,
		closing: make(chan struct{}),
		changed: make(chan struct{}),
	}
}

func (c *stream) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	n, err := c.raw.Read(p)
	if n > 0 {
		c.session.guard.read(c.flow, n)
		return n, nil // an error comes again with the next Read
	}
	if err == io.EOF && c.session.guard.ended(c.flow) && !c.isClosed() {
		return 0, io.EOF
	}
	return 0, c.explain("read", err)
}

func (c *stream) Write(p []byte) (int, error) {
	chunk := guestChunk
	if c.session.out != nil {
		chunk = hostChunk
	}
	done := 0
	for done < len(p) {
		if err := c.admit(); err != nil {
			return done, c.explain("write", err)
		}
		n, err := c.raw.Write(p[done:min(len(p), done+chunk)])
		done += n
		if err != nil {
			return done, c.explain("write", err)
		}
	}
	return done, nil
}

// admit waits until the outbox has room.
func (c *stream) admit() error {
	if c.session.out == nil {
		return nil
	}
	for {
		full := c.session.out.full()
		if full == nil {
			return nil
		}
		c.mu.Lock()
		deadline, changed := c.writeDeadline, c.changed
		c.mu.Unlock()
		var timeout <-chan time.Time
		if !deadline.IsZero() {
			t := time.NewTimer(time.Until(deadline))
			defer t.Stop() // rarely more than one: changed is rare
			timeout = t.C
		}
		select {
		case <-full:
		case <-changed:
		case <-c.closing:
			return net.ErrClosed
		case <-timeout:
			return os.ErrDeadlineExceeded
		}
	}
}

// explain turns an error of yamux's into one of this package's.
func (c *stream) explain(op string, err error) error {
	if c.isClosed() {
		return &net.OpError{Op: op, Net: addr{}.Network(), Err: net.ErrClosed}
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, yamux.ErrTimeout):
		return &net.OpError{Op: op, Net: addr{}.Network(), Err: os.ErrDeadlineExceeded}
	case errors.Is(err, yamux.ErrConnectionReset):
		return &net.OpError{Op: op, Net: addr{}.Network(), Err: ErrReset}
	}
	return fmt.Errorf("link stream cut off: %w", c.session.over())
}

func (c *stream) isClosed() bool {
	select {
	case <-c.closing:
		return true
	default:
		return false
	}
}

// Close ends the stream in both directions. What was written before still
// arrives, what has not been read is dropped.
func (c *stream) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	close(c.closing)
	// yamux goes on reading after its Close; the deadline stops that.
	_ = c.raw.SetReadDeadline(past)
	c.mu.Unlock()
	c.session.guard.forget(c.flow)
	_ = c.raw.Close() // fails only when the session has ended
	return nil
}

func (c *stream) LocalAddr() net.Addr  { return addr{} }
func (c *stream) RemoteAddr() net.Addr { return addr{} }

func (c *stream) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *stream) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	return c.raw.SetReadDeadline(t)
}

func (c *stream) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	c.writeDeadline = t
	close(c.changed)
	c.changed = make(chan struct{})
	return c.raw.SetWriteDeadline(t)
}
