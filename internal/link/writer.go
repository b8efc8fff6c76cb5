package link

import (
	"io"
	"sync"
)

// portWriter is the guest's one writer. It outlives the sessions: when one is
// interrupted in the middle of a frame, the rest of that frame goes out before
// anything of the next session. The host would find its place again without
// that, but a guest must not rely on the host's patience.
type portWriter struct {
	port io.Writer

	mu   sync.Mutex
	buf  []byte
	rest []byte // of buf, not yet written
}

// write puts one frame on the port, in one write if nothing is left over. It
// blocks while no host reads.
func (w *portWriter) write(k kind, generation uint64, a, b []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.flush(); err != nil {
		return err
	}
	w.buf = appendFrame(w.buf[:0], k, generation, a, b)
	w.rest = w.buf
	return w.flush()
}

func (w *portWriter) flush() error {
	for len(w.rest) > 0 {
		n, err := w.port.Write(w.rest)
		w.rest = w.rest[n:]
		if err != nil {
			return err
		}
	}
	return nil
}

// sessionWriter is the guest's sender. It writes in yamux's goroutine: on a
// guest without hardware virtualization a switch of goroutines costs more
// than the copy it would save.
type sessionWriter struct {
	*portWriter
	generation uint64
}

func (s sessionWriter) send(head, body []byte) error {
	return forFrames(head, body, maxGuestFrame, func(a, b []byte) error {
		return s.write(kindData, s.generation, a, b)
	})
}
