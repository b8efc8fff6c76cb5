package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/warren-vm/warren/internal/guestapi"
)

// Why a session ended. Session.Err and the errors of its streams wrap one of
// these.
var (
	// ErrClosed: Close was called on this side.
	ErrClosed = errors.New("the link session was closed")
	// ErrReplaced: a new host connected to the guest, which ends the session
	// with the host before it. Only the guest sees it.
	ErrReplaced = errors.New("a new host took over the link")
	// ErrGone: the port ended or the other side closed the session.
	ErrGone = errors.New("the other side of the link is gone")
	// ErrProtocol: the other side sent what no correct one sends.
	ErrProtocol = errors.New("the other side broke the link protocol")
)

// closeWait is how long a stream that the host has closed may stay unfinished
// in the guest before it is reset. Until then the guest can read what was
// written before the Close.
const closeWait = 30 * time.Second

// Session is one conversation between a host and a guest: any number of
// streams in both directions, at most guestapi.MaxStreams of each side's
// making at once.
//
// A session is open or ended. It ends by Close, with its port, with the other
// side, or when the other side breaks the protocol; Err says which. Nothing
// leads back: the host dials again, on a new port. When a session ends, all
// its streams end with an error, except that bytes which had arrived can
// still be read, and an orderly end that had arrived is still io.EOF.
//
// A Session is a net.Listener for the streams that the other side opens. All
// methods may be called from any goroutine.
type Session struct {
	generation uint64
	mux        *yamux.Session
	guard      *guard
	out        *outbox // host only

	done chan struct{}

	mu     sync.Mutex
	reason error
}

// newSession starts a session on dec and port. out is nil in the guest, where
// w writes; stop must make reads and writes on the port return.
func newSession(generation uint64, dec *decoder, port Port, w *portWriter) *Session {
	host := w == nil
	s := &Session{generation: generation, guard: newGuard(host), done: make(chan struct{})}
	c := &carrier{generation: generation, dec: dec, guard: s.guard, fail: s.fail}
	config := &yamux.Config{
		// As many as the other side may open, so that yamux never has to
		// refuse one, which would block its reader.
		AcceptBacklog: guestapi.MaxStreams,
		// A write ends with the session, not by the clock: a paused or busy
		// guest is not a broken one, and yamux loses count of a stream's
		// window when a write times out.
		ConnectionWriteTimeout: 1000 * time.Hour,
		KeepAliveInterval:      time.Hour, // must be set, is not used
		MaxStreamWindowSize:    maxWindow,
		LogOutput:              io.Discard,
	}
	var writer sync.WaitGroup
	if host {
		s.out = newOutbox(generation)
		c.out, c.desync = s.out, ErrProtocol
		c.stop = func() { s.out.close(); port.Close() }
		config.StreamCloseTimeout = closeWait
		writer.Go(func() {
			if err := s.out.run(port); !errors.Is(err, ErrClosed) {
				s.fail(err)
				port.Close() // yamux's reader sees that and ends the session
			}
		})
		s.mux, _ = yamux.Client(c, config) // fails only for a wrong config
	} else {
		c.out, c.desync = sessionWriter{w, generation}, ErrReplaced
		c.stop = func() { interrupt(port) }
		s.mux, _ = yamux.Server(c, config)
	}
	go func() {
		<-s.mux.CloseChan()
		s.mux.Close() // returns when yamux's goroutines have
		writer.Wait()
		// Everyone who ends a session says why before, except yamux.
		s.fail(broken("the multiplexer refused what it sent"))
		close(s.done)
	}()
	return s
}

// fail notes why the session ends; the first reason stays.
func (s *Session) fail(err error) {
	s.mu.Lock()
	if s.reason == nil {
		s.reason = err
	}
	s.mu.Unlock()
}

// Generation is the number the host gave the session. Every one is different.
func (s *Session) Generation() uint64 { return s.generation }

// Done is closed when the session has ended and its goroutines are gone.
func (s *Session) Done() <-chan struct{} { return s.done }

// Err is nil until Done is closed, then the reason of the end.
func (s *Session) Err() error {
	select {
	case <-s.done:
		return s.cause()
	default:
		return nil
	}
}

func (s *Session) cause() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reason
}

// Close ends the session and, on the host, closes the port. It returns when
// all is over, does not wait for the other side, and may be called again.
// Bytes that were written but not sent are lost. It always returns nil.
func (s *Session) Close() error {
	s.fail(ErrClosed)
	s.mux.Close()
	<-s.done
	return nil
}

// Open starts a stream to the other side. It waits, until ctx ends, while
// guestapi.MaxStreams streams of this side are unfinished; a stream is
// finished when both sides closed it, or one reset it. The other side's
// Accept need not have happened when Open returns.
func (s *Session) Open(ctx context.Context) (net.Conn, error) {
	select {
	case s.guard.slots <- struct{}{}:
	default:
		select {
		case s.guard.slots <- struct{}{}:
		case <-s.mux.CloseChan():
		case <-ctx.Done():
			return nil, fmt.Errorf("open a link stream: all %d are in use: %w", guestapi.MaxStreams, context.Cause(ctx))
		}
	}
	if s.out != nil {
		return s.open() // the outbox never blocks
	}
	var conn net.Conn
	var err error
	opened := make(chan struct{})
	go func() {
		defer close(opened)
		conn, err = s.open()
	}()
	select {
	case <-opened:
		return conn, err
	case <-ctx.Done():
		go func() {
			if <-opened; err == nil {
				conn.Close()
			}
		}()
		return nil, fmt.Errorf("open a link stream: the host does not read: %w", context.Cause(ctx))
	}
}

func (s *Session) open() (net.Conn, error) {
	raw, err := s.mux.OpenStream()
	if err != nil {
		return nil, fmt.Errorf("open a link stream: %w", s.over())
	}
	if c := newStream(s, raw); c != nil {
		return c, nil
	}
	return nil, fmt.Errorf("open a link stream: %w", s.over())
}

// over is for a caller whom yamux refused, which it does only when the
// session has ended or is about to. It returns the reason.
func (s *Session) over() error {
	s.mux.Close()
	<-s.done
	return s.cause()
}

// Accept waits for a stream that the other side opens. After the end of the
// session it returns the reason.
func (s *Session) Accept() (net.Conn, error) {
	raw, err := s.mux.AcceptStream()
	if err != nil {
		return nil, fmt.Errorf("accept a link stream: %w", s.over())
	}
	if c := newStream(s, raw); c != nil {
		return c, nil
	}
	return nil, fmt.Errorf("accept a link stream: %w", s.over())
}

// Addr has no meaning beyond its name.
func (s *Session) Addr() net.Addr { return addr{} }

type addr struct{}

func (addr) Network() string { return "warren-link" }
func (addr) String() string  { return "warren-link" }
