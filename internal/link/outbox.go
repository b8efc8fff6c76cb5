package link

import (
	"fmt"
	"io"
	"sync"
)

const (
	// outboxFull is where writers to streams begin to wait. Answers that widen
	// a window, which the guest waits for, are behind what is in the outbox.
	outboxFull = 256 << 10
	// outboxMost is where the session ends. Writers that were let in before
	// the outbox was full bring at most one chunk each; what is beyond can
	// only be answers to a guest that sends and sends but never reads.
	outboxMost = 16 << 20
	// outboxPiece is how much goes to the port at once, so that a full outbox
	// has room soon.
	outboxPiece = 128 << 10
)

// outbox is the host's sender. It never blocks yamux: a guest that does not
// read could otherwise hold up every call that merely wants to close its
// stream, beyond any deadline. Streams wait before they write (see admit),
// where a deadline or a Close can reach them.
type outbox struct {
	generation uint64

	mu      sync.Mutex
	work    sync.Cond // there is something to write, or err is set
	queue   []byte
	spare   []byte
	writing int           // bytes taken from queue that the port has not got
	drained chan struct{} // closed when the outbox is no longer full; nil: not full
	err     error
}

func newOutbox(generation uint64) *outbox {
	o := &outbox{generation: generation}
	o.work.L = &o.mu
	return o
}

func (o *outbox) send(head, body []byte) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err != nil {
		return o.err
	}
	_ = forFrames(head, body, maxHostFrame, func(a, b []byte) error {
		o.queue = appendFrame(o.queue, kindData, o.generation, a, b)
		return nil
	})
	n := len(o.queue) + o.writing
	if n > outboxMost {
		o.err = broken("it leaves %d bytes unread", n)
		return o.err
	}
	if n > outboxFull && o.drained == nil {
		o.drained = make(chan struct{})
	}
	o.work.Signal()
	return nil
}

// full returns nil when there is room, else a channel that is closed when
// there is some again.
func (o *outbox) full() <-chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.drained == nil || o.err != nil {
		return nil // with an error the write itself tells
	}
	return o.drained
}

// run writes to the port until close or an error of the port.
func (o *outbox) run(port io.Writer) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	for {
		for len(o.queue) == 0 && o.err == nil {
			o.work.Wait()
		}
		if o.err != nil {
			return o.err
		}
		batch := o.queue
		o.queue, o.spare = o.spare[:0], batch[:0]
		o.writing = len(batch)
		for len(batch) > 0 && o.err == nil {
			piece := batch[:min(len(batch), outboxPiece)]
			o.mu.Unlock()
			n, err := port.Write(piece)
			o.mu.Lock()
			batch = batch[n:]
			o.writing = len(batch)
			if err != nil {
				o.end(fmt.Errorf("%w: %w", ErrGone, err))
			}
			o.wake()
		}
		if cap(o.spare) > 2*outboxFull {
			o.spare = nil // a burst's; queue's goes the same way next time
		}
	}
}

// wake lets writers in when there is room. o.mu is held.
func (o *outbox) wake() {
	if o.drained != nil && (o.err != nil || len(o.queue)+o.writing <= outboxFull) {
		close(o.drained)
		o.drained = nil
	}
}

// end sets the first error. o.mu is held.
func (o *outbox) end(err error) {
	if o.err == nil {
		o.err = err
	}
	o.wake()
	o.work.Broadcast()
}

// close makes run return; what is queued is dropped.
func (o *outbox) close() {
	o.mu.Lock()
	o.end(ErrClosed)
	o.mu.Unlock()
}

// forFrames cuts head followed by body into payloads for frames of at most
// max bytes. head is at most a yamux header.
func forFrames(head, body []byte, max int, each func(a, b []byte) error) error {
	for {
		n := min(len(body), max-overhead-len(head))
		if err := each(head, body[:n]); err != nil {
			return err
		}
		head, body = nil, body[n:]
		if len(body) == 0 {
			return nil
		}
	}
}
