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

const (
	// byeWait is how long the guest tries to tell a host that the session is
	// over. The host may not be reading any more.
	byeWait = time.Second

	// Between reads of a port that tells at once that no host is connected.
	// OpenGuestPort's does so only once and then waits itself.
	idleLeast = time.Millisecond
	idleMost  = 250 * time.Millisecond
)

// Serve answers hosts on port, one after the other, and calls accept in a new
// goroutine with each new session. The session before it has ended by then.
//
// Serve returns when ctx ends (with its cause) or the port fails (with its
// error); the running session ends first. Hosts that come and go are not a
// failure. The port stays open and belongs to the caller.
func Serve(ctx context.Context, port Port, accept func(*Session)) error {
	stop := context.AfterFunc(ctx, func() { interrupt(port) })
	defer func() {
		stop()
		resume(port)
	}()
	g := &server{port: port, dec: newDecoder(port, maxHostFrame), w: &portWriter{port: port}}
	for {
		generation, err := g.hello(ctx)
		if err == nil {
			err = g.w.write(kindAnswer, generation, nil, nil)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if errors.Is(err, syscall.EPIPE) {
			continue // a socket's host that left already
		}
		if err != nil {
			return fmt.Errorf("link port: %w", err)
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
			if err := g.bye(generation); err != nil && !errors.Is(err, syscall.EPIPE) {
				return fmt.Errorf("link port: %w", err)
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
func (g *server) hello(ctx context.Context) (uint64, error) {
	idle := time.Duration(0)
	for {
		before := g.dec.hi - g.dec.lo
		h, err := g.dec.hunt(func(h header) bool { return h.kind == kindHello })
		if err == nil {
			_, err = g.dec.next()
			return h.generation, err
		}
		if !errors.Is(err, io.EOF) {
			return 0, err
		}
		if g.dec.hi-g.dec.lo != before {
			idle = 0
		}
		select {
		case <-time.After(idle):
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
		idle = min(max(2*idle, idleLeast), idleMost)
	}
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
