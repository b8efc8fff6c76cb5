package link

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
)

// carrier is the connection that yamux runs on: one session's frames on the
// port. yamux calls Read from one goroutine and Write from another.
type carrier struct {
	generation uint64
	dec        *decoder
	guard      *guard
	out        sender
	fail       func(error) // tells the session why it ends
	stop       func()      // interrupts reads and writes on the port
	// desync is what it means that no frame stands where one is due: from a
	// guest, that it cannot be trusted; from a host, that it is a new one.
	desync error

	payload []byte // of the current frame, not yet handed on

	held     muxHeader // of a data frame whose body comes in the next Write
	bodyLeft uint32
}

// sender puts one session's bytes into frames and on the port.
type sender interface {
	send(head, body []byte) error
}

func (c *carrier) Read(p []byte) (int, error) {
	for {
		n, took, err := c.guard.pass(p, c.payload)
		c.payload = c.payload[took:]
		if err != nil {
			c.fail(err)
			return 0, err
		}
		if n > 0 {
			return n, nil
		}
		c.guard.wait()
		f, err := c.dec.next()
		if err == nil {
			err = c.accept(f)
		}
		if err != nil {
			err = c.reason(err)
			c.fail(err)
			return 0, err
		}
	}
}

// accept takes a frame that arrived while the session was running.
func (c *carrier) accept(f frame) error {
	switch {
	case f.kind == kindHello:
		if c.desync == ErrProtocol {
			return broken("a guest that says hello")
		}
		c.dec.back(f) // Serve hunts for it
		return ErrReplaced
	case f.generation != c.generation:
		return broken("frame of generation %d in %d", f.generation, c.generation)
	case f.kind == kindData:
		c.payload = f.payload
		return nil
	case f.kind == kindBye:
		return fmt.Errorf("%w: it closed the session", ErrGone)
	default:
		return broken("frame of kind %q", f.kind)
	}
}

// reason says in the words of this package why the port gave no frame.
func (c *carrier) reason(err error) error {
	switch {
	case errors.Is(err, errDesync):
		return fmt.Errorf("%w: %w", c.desync, err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%w: the port has ended", ErrGone)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, net.ErrClosed), errors.Is(err, os.ErrClosed):
		return ErrClosed // only stop does that, and whoever called it gave the reason before
	case errors.Is(err, ErrProtocol), errors.Is(err, ErrReplaced), errors.Is(err, ErrGone):
		return err
	default:
		return fmt.Errorf("%w: %w", ErrGone, err)
	}
}

// Write gets yamux's headers and bodies in turn. A header that has a body is
// held back so that both cross in one frame: on the guest every write to the
// port leaves the virtual machine.
func (c *carrier) Write(p []byte) (int, error) {
	var err error
	switch {
	case c.bodyLeft > 0:
		c.bodyLeft -= min(c.bodyLeft, uint32(len(p)))
		err = c.out.send(c.held[:], p)
	case len(p) != muxHeaderSize:
		err = fmt.Errorf("yamux wrote %d bytes where its header was due", len(p))
	default:
		copy(c.held[:], p)
		c.guard.sent(&c.held)
		if c.bodyLeft = c.held.body(); c.bodyLeft == 0 {
			err = c.out.send(p, nil)
		}
	}
	if err != nil {
		err = c.reason(err)
		c.fail(err)
		return 0, err
	}
	return len(p), nil
}

// Close is called by yamux, once.
func (c *carrier) Close() error {
	c.guard.close()
	c.stop()
	return nil
}
