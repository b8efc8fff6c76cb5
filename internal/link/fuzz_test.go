package link

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

// bytesIn hands out data in reads of varying size, as a port does.
type bytesIn struct {
	data []byte
	n    int
}

func (b *bytesIn) Read(p []byte) (int, error) {
	if len(b.data) == 0 {
		return 0, io.EOF
	}
	b.n = b.n*7 + 13
	n := copy(p[:min(len(p), 1+b.n%4096&4095)], b.data)
	b.data = b.data[n:]
	return n, nil
}

func seeds(f *testing.F) {
	f.Add([]byte{}, []byte{})
	f.Add([]byte("garbage"), []byte("payload"))
	f.Add(appendFrame(nil, kindData, 7, []byte("old"), nil)[:30], []byte("x"))
	f.Add(appendHello(nil, 3), appendFrame(nil, kindHello, 4, nil, nil))
	f.Add([]byte("WL1WL1HWWL1"), make([]byte, 1000))
	f.Add(appendFrame(nil, kindData, 7, make([]byte, 5000), nil)[:headerSize], []byte{})
}

// FuzzGuestFindsTheHost: whatever came before, cut off anywhere, the guest
// finds the hello and reads what follows it exactly.
func FuzzGuestFindsTheHost(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, stale, payload []byte) {
		payload = payload[:min(len(payload), maxHostFrame-overhead)]
		const gen = 0x1234_5678_9abc_def0
		in := appendHello(bytes.Clone(stale), gen)
		in = appendFrame(in, kindData, gen, payload, nil)
		d := newDecoder(&bytesIn{data: in}, maxHostFrame)
		// An old session reads on until no frame stands next.
		var err error
		for err == nil {
			var fr frame
			if fr, err = d.next(); err == nil && fr.kind == kindHello {
				d.back(fr)
				break
			}
		}
		if err != nil && !errors.Is(err, errDesync) {
			t.Fatalf("the old session ended with %v", err)
		}
		for {
			h, err := d.hunt(func(h header) bool { return h.kind == kindHello })
			if err != nil {
				t.Fatalf("hello not found: %v", err)
			}
			if _, err := d.next(); err != nil {
				t.Fatal(err)
			}
			if h.generation == gen {
				break
			}
		}
		fr, err := d.next()
		if err != nil || fr.kind != kindData || fr.generation != gen || !bytes.Equal(fr.payload, payload) {
			t.Fatalf("after the hello: %+v, %v", fr.header, err)
		}
		if _, err := d.next(); err != io.EOF {
			t.Fatalf("at the end: %v", err)
		}
	})
}

// FuzzHostFindsTheAnswer: the same on the host, where frames of the guest may
// have lost any part.
func FuzzHostFindsTheAnswer(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, stale, after []byte) {
		const gen = 0x1234_5678_9abc_def0
		in := appendFrame(bytes.Clone(stale), kindAnswer, gen, nil, nil)
		in = append(in, after...)
		d := newDecoder(&bytesIn{data: in}, maxGuestFrame)
		if _, err := d.hunt(func(h header) bool { return h.kind == kindAnswer && h.generation == gen }); err != nil {
			t.Fatalf("answer not found: %v", err)
		}
		if _, err := d.next(); err != nil {
			t.Fatal(err)
		}
		for {
			fr, err := d.next()
			if err != nil {
				if err != io.EOF && err != errDesync {
					t.Fatal(err)
				}
				return
			}
			if len(fr.payload) > maxGuestFrame-overhead {
				t.Fatalf("payload of %d bytes", len(fr.payload))
			}
		}
	})
}

// guardUnderTest is a guard that has opened streams 1, 3 and 5, and closed 5.
// A guest's opens even ones, but counts these all the same.
func guardUnderTest(host bool) *guard {
	g := newGuard(host)
	for _, id := range []uint32{1, 3, 5} {
		g.slots <- struct{}{}
		g.sent((*muxHeader)(mux(muxWinUpd, flagSYN, id, 0)))
		f := g.take(id)
		if id == 5 {
			g.forget(f)
			g.sent((*muxHeader)(mux(muxWinUpd, flagFIN, id, 0)))
		}
	}
	return g
}

// passAll runs data through g in pieces of at most in bytes, out bytes at a
// time.
func passAll(g *guard, data []byte, in, out int) ([]byte, error) {
	var got []byte
	dst := make([]byte, out)
	for len(data) > 0 {
		src := data[:min(in, len(data))]
		for {
			n, took, err := g.pass(dst, src)
			got = append(got, dst[:n]...)
			if err != nil {
				return got, err
			}
			src, data = src[took:], data[took:]
			if n == 0 {
				break
			}
		}
		if len(src) > 0 {
			return got, errors.New("the guard stopped before the end")
		}
	}
	return got, nil
}

// FuzzGuard: however the bytes are read the guard decides the same, keeps its
// bounds, and hands yamux nothing that it refused. What a host may send in
// pieces of any size comes in whole frames from a guest, so that yamux never
// waits inside a body.
func FuzzGuard(f *testing.F) {
	f.Add(mux(muxData, 0, 1, 3))
	f.Add(bytes.Join([][]byte{mux(muxData, flagACK, 1, 3), []byte("abc"), mux(muxWinUpd, flagSYN, 2, 0), mux(muxData, 0, 5, 2), []byte("xy"), mux(muxWinUpd, flagRST, 3, 0)}, nil))
	f.Add(bytes.Join([][]byte{mux(muxWinUpd, flagFIN, 5, 0), mux(muxData, 0, 5, 1), []byte("z"), mux(muxPing, flagSYN, 0, 1)}, nil))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, host := range []bool{true, false} {
			a, b, in := guardUnderTest(host), guardUnderTest(host), 5
			if host {
				in = len(data) + 1
			}
			gotA, errA := passAll(a, data, len(data)+1, 4096)
			gotB, errB := passAll(b, data, in, 3)
			sameDecision(t, a, gotA, gotB, errA, errB)
			if host && errA == nil && a.body > 0 {
				t.Fatalf("yamux would wait for %d bytes that have not come", a.body)
			}
		}
	})
}

func sameDecision(t *testing.T, a *guard, gotA, gotB []byte, errA, errB error) {
	t.Helper()
	// An error may come before bytes that the other cut handed on.
	if (errA == nil) != (errB == nil) || errA != nil && errA.Error() != errB.Error() {
		t.Fatalf("cut differently: %v, %v", errA, errB)
	}
	if errA != nil && !errors.Is(errA, ErrProtocol) {
		t.Fatal(errA)
	}
	if errA == nil && !bytes.Equal(gotA, gotB) {
		t.Fatal("cut differently: other bytes")
	}
	if a.untaken > maxUntaken || a.unread < 0 || a.unread > maxUnread+3*maxWindow || len(a.slots) > 3 {
		t.Fatalf("untaken %d, unread %d, slots %d", a.untaken, a.unread, len(a.slots))
	}
}

// FuzzSessionWithHostileGuest: whatever a guest sends after its answer, in
// good frames, the session neither panics nor fails to close.
func FuzzSessionWithHostileGuest(f *testing.F) {
	f.Add(mux(muxWinUpd, flagACK, 1, 0))
	f.Add(bytes.Join([][]byte{mux(muxData, flagACK, 1, 3), []byte("abc"), mux(muxWinUpd, flagSYN, 2, 0), mux(muxWinUpd, flagFIN, 1, 0), mux(muxWinUpd, flagRST, 2, 0)}, nil))
	f.Add(bytes.Join([][]byte{mux(muxWinUpd, flagRST, 1, 0), mux(muxData, 0, 1, 1), []byte("z"), mux(muxData, flagSYN|flagACK, 2, 0)}, nil))
	f.Fuzz(func(t *testing.T, data []byte) {
		a, b := net.Pipe()
		defer b.Close()
		go io.Copy(io.Discard, b)
		s := newSession(1, newDecoder(a, maxGuestFrame), a, nil)
		c, err := s.Open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			for {
				c, err := s.Accept()
				if err != nil {
					return
				}
				go func() { io.Copy(c, c); c.Close() }()
			}
		}()
		go io.Copy(io.Discard, c)
		var frames []byte
		_ = forFrames(nil, data, maxGuestFrame, func(x, y []byte) error {
			frames = appendFrame(frames, kindData, 1, x, y)
			return nil
		})
		b.SetWriteDeadline(time.Now().Add(10 * time.Second))
		if _, err := b.Write(frames); errors.Is(err, net.ErrClosed) {
			t.Fatal(err)
		}
		c.Close()
		closed := make(chan struct{})
		go func() { s.Close(); close(closed) }()
		select {
		case <-closed:
		case <-time.After(20 * time.Second):
			t.Fatal("Close hangs")
		}
		if s.Err() == nil {
			t.Fatal("ended without a reason")
		}
	})
}
