package server

import (
	"context"

	"github.com/warren-vm/warren/internal/supervisor/control"
)

// Bounds of what is open at once. Together with the calls' connections they
// stay under guestapi.MaxStreams.
const (
	maxOpen  = 208 // execs and transfers
	maxCalls = 32
	maxConns = 512 // of clients
	// smallDocument is what may be held in any number; only one larger
	// document is in memory at a time.
	smallDocument = 256 << 10
)

// limiter counts what is open.
type limiter chan struct{}

// try takes a place at once or says that there is none.
func (l limiter) try() *control.Fault {
	select {
	case l <- struct{}{}:
		return nil
	default:
		return control.Faultf(control.Busy, "this VM has %d programs and transfers open already; wait for one to end", cap(l))
	}
}

// take waits for a place until ctx ends.
func (l limiter) take(ctx context.Context) *control.Fault {
	select {
	case l <- struct{}{}:
		return nil
	case <-ctx.Done():
		return control.Faultf(control.Busy, "this VM answers %d calls already; try again", cap(l))
	}
}

func (l limiter) free() { <-l }
