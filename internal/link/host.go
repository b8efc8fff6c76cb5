package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"
)

var lastGeneration atomic.Uint64

// newGeneration returns a number that no session had before: the time, so
// that it also differs from those of other processes, and never the same
// twice in this one.
func newGeneration() uint64 {
	for {
		last := lastGeneration.Load()
		next := max(uint64(time.Now().UnixNano()), last+1)
		if lastGeneration.CompareAndSwap(last, next) {
			return next
		}
	}
}

// Dial starts a session with the guest behind port. It needs no particular
// state of the guest: one that still boots answers when it is ready, one that
// was restored in the middle of another session ends that one first.
//
// Dial waits for the answer until ctx ends; a guest may never answer, so ctx
// should have a deadline. Bytes of earlier sessions are dropped, however many
// the guest sends.
//
// After success the session owns the port and closes it. After an error the
// port belongs to the caller as before and may be dialled again, unless the
// error wraps ErrGone, which means that the port has ended.
func Dial(ctx context.Context, port Port) (*Session, error) {
	generation := newGeneration()
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		interrupt(port)
		close(interrupted)
	})
	// The guest may be unable to read the hello before it has written what
	// it is stuck with, so both directions go at once.
	wrote := make(chan error, 1)
	go func() {
		_, err := port.Write(appendHello(nil, generation))
		wrote <- err
	}()
	dec := newDecoder(port, maxGuestFrame)
	_, err := dec.hunt(func(h header) bool {
		return h.kind == kindAnswer && h.generation == generation
	})
	if err == nil {
		_, err = dec.next() // takes the answer
	} else {
		interrupt(port) // the writer
	}
	err = first(err, <-wrote)
	if !stop() {
		<-interrupted
		err = first(context.Cause(ctx), err)
	}
	resume(port)
	if err != nil {
		return nil, dialError(err, ctx)
	}
	return newSession(generation, dec, port, nil), nil
}

// first prefers the error that explains the other.
func first(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

func dialError(err error, ctx context.Context) error {
	if ctx.Err() != nil {
		return fmt.Errorf("no answer from the guest over the link: %w", context.Cause(ctx))
	}
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("no answer from the guest over the link: %w: the port has ended", ErrGone)
	}
	return fmt.Errorf("no answer from the guest over the link: %w: %w", ErrGone, err)
}
