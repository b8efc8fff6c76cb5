package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"
)

// byeWait is how long the guest tries to tell a host that the session is over.
// The host may not be reading any more.
const byeWait = time.Second

// Serve answers hosts on port, one after the other, and calls accept in a new
// goroutine with each new session. The session before it has ended by then.
//
// Serve returns when ctx ends (with its cause) or the port does (with an error
// that wraps ErrGone); the running session ends first. Hosts that come and go
// are neither: a session ends when the next host says hello, not when its own
// falls silent. The port stays open and belongs to the caller.
func Serve(ctx context.Context, port Port, accept func(*Session)) error {
	stop := context.AfterFunc(ctx, func() { interrupt(port) })
	defer func() {
		stop()
		resume(port)
	}()
	g := &server{port: port, dec: newDecoder(port, maxHostFrame), w: &portWriter{port: port}}
	for {
		generation, err := g.hello()
		if err == nil {
			err = g.w.write(kindAnswer, generation, nil, nil)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			return portError(err)
		}
		s := newSession(generation, g.dec, port, g.w)
		go accept(s)
		select {
		case <-s.Done():
		case <-ctx.Done():
			s.Close()
			return context.Cause(ctx)
		}
		resume(port)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if errors.Is(s.Err(), ErrClosed) || errors.Is(s.Err(), ErrProtocol) {
			if err := g.bye(generation); err != nil {
				return portError(err)
			}
			if ctx.Err() != nil { // bye may have undone the interrupt
				return context.Cause(ctx)
			}
		}
	}
}

// server is what outlives the sessions in the guest.
type server struct {
	port Port
	dec  *decoder
	w    *portWriter
}

// hello waits for a host and returns its generation.
//
// Any generation will do, newer or not: the port keeps the order of bytes, so
// the last hello on it is from the host that is there now, whatever its clock
// says.
func (g *server) hello() (uint64, error) {
	h, err := g.dec.hunt(func(h header) bool { return h.kind == kindHello })
	if err == nil {
		_, err = g.dec.next()
	}
	return h.generation, err
}

// portError is for a port that is of no use any more. A socket, which only
// tests use, says so in three ways.
func portError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.EPIPE) {
		return fmt.Errorf("%w: the port has ended", ErrGone)
	}
	return fmt.Errorf("%w: %w", ErrGone, err)
}

// bye tells the host that the session has ended on this side.
func (g *server) bye(generation uint64) error {
	_ = g.port.SetWriteDeadline(time.Now().Add(byeWait))
	err := g.w.write(kindBye, generation, nil, nil)
	_ = g.port.SetWriteDeadline(time.Time{})
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil // the rest goes out before the next answer
	}
	return err
}
