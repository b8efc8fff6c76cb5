package link

import (
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"
)

// cable is a virtio-serial port between a guest that lives on and hosts that
// come and go: bounded buffers, reads of at most 4 KiB and writes of at most
// 32 KiB in the guest, and bytes that stay in both directions when a host is
// dropped.
type cable struct {
	mu   sync.Mutex
	cond *sync.Cond

	toGuest, toHost       []byte
	capToGuest, capToHost int

	host *hostEnd
	// tells: the guest's driver notices that no host is connected, and writes
	// wait. A restored guest does not, its new host is there at once.
	tells bool
	guest guestEnd
}

func newCable(tells bool) *cable {
	c := &cable{capToGuest: 64 << 10, capToHost: 48 << 10, tells: tells}
	c.cond = sync.NewCond(&c.mu)
	c.guest.c = c
	return c
}

// deadline is a read or write deadline under cable.mu.
type deadline struct{ at time.Time }

func (d *deadline) set(c *cable, t time.Time) error {
	c.mu.Lock()
	d.at = t
	c.mu.Unlock()
	c.cond.Broadcast()
	if !t.IsZero() {
		time.AfterFunc(time.Until(t)+time.Millisecond, c.cond.Broadcast)
	}
	return nil
}

func (d *deadline) over() bool { return !d.at.IsZero() && !time.Now().Before(d.at) }

// guestEnd is what the guest has open.
type guestEnd struct {
	c      *cable
	rd, wd deadline
}

func (g *guestEnd) away() bool { return g.c.tells && g.c.host == nil }

func (g *guestEnd) Read(b []byte) (int, error) {
	c := g.c
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case g.rd.over():
			return 0, os.ErrDeadlineExceeded
		case len(c.toGuest) > 0:
			n := copy(b[:min(len(b), 4096)], c.toGuest)
			c.toGuest = c.toGuest[n:]
			c.cond.Broadcast()
			return n, nil
		}
		c.cond.Wait()
	}
}

func (g *guestEnd) Write(b []byte) (int, error) {
	c := g.c
	c.mu.Lock()
	defer c.mu.Unlock()
	done := 0
	for done < len(b) {
		room := c.capToHost - len(c.toHost)
		switch {
		case g.wd.over():
			return done, os.ErrDeadlineExceeded
		case !g.away() && room > 0:
			n := min(len(b)-done, 32<<10, room)
			c.toHost = append(c.toHost, b[done:done+n]...)
			done += n
			c.cond.Broadcast()
			continue
		}
		c.cond.Wait()
	}
	return done, nil
}

func (g *guestEnd) Close() error                       { return nil }
func (g *guestEnd) SetReadDeadline(t time.Time) error  { return g.rd.set(g.c, t) }
func (g *guestEnd) SetWriteDeadline(t time.Time) error { return g.wd.set(g.c, t) }

// hostEnd is one host's connection. It breaks after a number of bytes.
type hostEnd struct {
	c      *cable
	gone   bool
	left   int
	tear   *rand.Rand // nil: nothing is lost when it breaks
	rd, wd deadline
}

const never = 1 << 60

func (c *cable) connect(breaksAfter int, tear *rand.Rand) *hostEnd {
	h := &hostEnd{c: c, left: breaksAfter, tear: tear}
	c.mu.Lock()
	if c.host != nil {
		c.host.breaks()
	}
	c.host = h
	c.mu.Unlock()
	c.cond.Broadcast()
	return h
}

// breakAfter lets the connection break when n more bytes have passed.
func (h *hostEnd) breakAfter(n int) {
	h.c.mu.Lock()
	h.left = n
	h.pass(0)
	h.c.mu.Unlock()
}

// pass counts bytes; c.mu is held.
func (h *hostEnd) pass(n int) {
	if h.left -= n; h.left <= 0 {
		h.breaks()
	}
}

// breaks is the death of QEMU or its restore from an older state: bytes on
// the way stay, or some are lost. c.mu is held.
func (h *hostEnd) breaks() {
	if h.gone {
		return
	}
	h.gone = true
	c := h.c
	if c.host == h {
		c.host = nil
	}
	if h.tear != nil {
		c.toGuest = c.toGuest[:h.tear.IntN(len(c.toGuest)+1)]
		if h.tear.IntN(2) == 0 {
			c.toHost = c.toHost[h.tear.IntN(len(c.toHost)+1):]
		}
		if h.tear.IntN(2) == 0 {
			c.toHost = c.toHost[:h.tear.IntN(len(c.toHost)+1)]
		}
	}
	c.cond.Broadcast()
}

func (h *hostEnd) Read(b []byte) (int, error) {
	c := h.c
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case h.gone:
			return 0, io.EOF
		case h.rd.over():
			return 0, os.ErrDeadlineExceeded
		case len(c.toHost) > 0:
			n := copy(b[:min(len(b), h.left)], c.toHost)
			c.toHost = c.toHost[n:]
			h.pass(n)
			c.cond.Broadcast()
			return n, nil
		}
		c.cond.Wait()
	}
}

func (h *hostEnd) Write(b []byte) (int, error) {
	c := h.c
	c.mu.Lock()
	defer c.mu.Unlock()
	done := 0
	for done < len(b) {
		room := c.capToGuest - len(c.toGuest)
		switch {
		case h.gone:
			return done, syscall.EPIPE
		case h.wd.over():
			return done, os.ErrDeadlineExceeded
		case room > 0:
			n := min(len(b)-done, room, h.left)
			c.toGuest = append(c.toGuest, b[done:done+n]...)
			done += n
			h.pass(n)
			c.cond.Broadcast()
			continue
		}
		c.cond.Wait()
	}
	return done, nil
}

func (h *hostEnd) Close() error {
	h.c.mu.Lock()
	h.breaks()
	h.c.mu.Unlock()
	return nil
}

func (h *hostEnd) SetReadDeadline(t time.Time) error  { return h.rd.set(h.c, t) }
func (h *hostEnd) SetWriteDeadline(t time.Time) error { return h.wd.set(h.c, t) }

// eventually polls until ok, which gets a generous time.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("after 30 s still not: %s", what)
		}
	}
}
