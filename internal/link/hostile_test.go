package link

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
)

// hostile connects a host to a guest that a test plays by hand. The guest has
// answered the hello.
func hostile(t *testing.T) (*Session, *script) {
	t.Helper()
	a, b := socketpair(t)
	guest := make(chan *script, 1)
	go func() {
		s := &script{t: t, p: b, dec: newDecoder(b, maxGuestFrame)}
		h, err := s.dec.hunt(func(h header) bool { return h.kind == kindHello })
		if err == nil {
			_, err = s.dec.next()
		}
		if err == nil {
			s.gen = h.generation
			_, err = b.Write(appendFrame(nil, kindAnswer, s.gen, nil, nil))
		}
		if err != nil {
			t.Error(err)
		}
		guest <- s
	}()
	s, err := Dial(within(t, 30*time.Second), a)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s, <-guest
}

// drain reads and drops what the host sends.
func (s *script) drain() {
	go io.Copy(io.Discard, s.p.(net.Conn))
}

// flood sends frames until the host has had enough, or all of most bytes.
func (s *script) flood(next func(i int) []byte, most int) {
	var batch []byte
	for i, sent := 0, 0; sent < most; i++ {
		batch = append(batch[:0], s.data(next(i))...)
		if _, err := s.p.Write(batch); err != nil {
			return
		}
		sent += len(batch)
	}
}

// heap is the memory in use after garbage is gone.
func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}

// peakHeap runs f and returns by how much the heap grew meanwhile, garbage
// included.
func peakHeap(f func()) uint64 {
	// Collections come often, so that the peak is of what is held and not of
	// the garbage that a busy machine left lying about.
	defer debug.SetGCPercent(debug.SetGCPercent(20))
	before := heap()
	peak, stop := before, make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			peak = max(peak, m.HeapAlloc+m.StackInuse)
			select {
			case <-stop:
				return
			case <-time.After(2 * time.Millisecond):
			}
		}
	})
	f()
	close(stop)
	wg.Wait()
	return peak - before
}

func TestAHostileGuestEndsItsSessionWithAClearError(t *testing.T) {
	full := bytes.Repeat([]byte("z"), maxWindow)
	for _, v := range []struct {
		name string
		// opens is how many streams the host opens before the attack.
		opens  int
		attack func(g *script)
		want   string
	}{
		{"garbage", 0, func(g *script) { g.write(bytes.Repeat([]byte("garbage"), 100)) }, "bytes that are no frame"},
		{"a frame of 4 GiB", 0, func(g *script) {
			g.write(appendFrame(nil, kindData, g.gen, nil, nil)[:12])
			g.write([]byte("\xff\xff\xff\xff\x00\x00\x00\x00"))
		}, "bytes that are no frame"},
		{"a frame larger than allowed", 0, func(g *script) {
			g.write(g.data(make([]byte, maxGuestFrame)))
		}, "bytes that are no frame"},
		{"a frame without its tail", 0, func(g *script) {
			b := g.data([]byte("x"))
			b[len(b)-1]++
			g.write(b)
		}, "bytes that are no frame"},
		{"a frame of another generation", 0, func(g *script) {
			g.write(appendFrame(nil, kindData, g.gen-1, nil, nil))
		}, "frame of generation"},
		{"a second answer", 0, func(g *script) { g.write(appendFrame(nil, kindAnswer, g.gen, nil, nil)) }, "kind 'A'"},
		{"a frame of unknown kind", 0, func(g *script) { g.write(appendFrame(nil, 'x', g.gen, nil, nil)) }, "kind 'x'"},
		{"a hello", 0, func(g *script) { g.write(appendFrame(nil, kindHello, g.gen, nil, nil)) }, "says hello"},
		{"multiplexer of another version", 0, func(g *script) {
			g.write(g.data([]byte{1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}))
		}, "multiplexer version 1"},
		{"unknown multiplexer type", 0, func(g *script) { g.write(g.data(mux(9, 0, 1, 0))) }, "frame of type 9"},
		{"unknown multiplexer flags", 0, func(g *script) { g.write(g.data(mux(muxData, 1<<9, 1, 0))) }, "flags 0x200"},
		{"a body that is announced and does not come", 1, func(g *script) { g.write(g.data(mux(muxData, flagFIN, 1, 100))) }, "of which 0 came with their header"},
		{"stream 0", 0, func(g *script) { g.write(g.data(mux(muxData, 0, 0, 0))) }, "number 0"},
		{"ping flood", 0, func(g *script) {
			g.flood(func(i int) []byte { return mux(muxPing, flagSYN, 0, uint32(i)) }, 64<<20)
		}, "a ping"},
		{"answers to pings nobody sent", 0, func(g *script) {
			g.flood(func(i int) []byte { return mux(muxPing, flagACK, 0, uint32(i)) }, 64<<20)
		}, "a ping"},
		{"go away", 0, func(g *script) { g.write(g.data(mux(muxGoAway, 0, 0, 2))) }, "gave the session up with code 2"},
		{"SYN flood", 0, func(g *script) {
			g.flood(func(i int) []byte { return mux(muxWinUpd, flagSYN, uint32(2*i+2), 0) }, 64<<20)
		}, "more than 64 streams that nobody took"},
		{"SYN and RST flood", 0, func(g *script) {
			g.flood(func(i int) []byte { return mux(muxWinUpd, flagSYN|flagRST, uint32(2*i+2), 0) }, 64<<20)
		}, "more than 64 streams that nobody took"},
		{"the same stream opened twice", 0, func(g *script) {
			g.write(g.data(mux(muxWinUpd, flagSYN, 2, 0), mux(muxWinUpd, flagSYN, 2, 0)))
		}, "opened stream 2 twice"},
		{"a stream with the host's number", 0, func(g *script) { g.write(g.data(mux(muxWinUpd, flagSYN, 7, 0))) }, "a number of this side"},
		{"data on a stream nobody opened", 0, func(g *script) { g.write(g.data(mux(muxData, 0, 7, 1), []byte("x"))) }, "which nobody opened"},
		{"data of 4 GiB", 1, func(g *script) { g.write(g.data(mux(muxData, 0, 1, 1<<32-1))) }, "more than a window"},
		{"more data than the window", 1, func(g *script) {
			g.flood(func(int) []byte { return append(mux(muxData, 0, 1, 20_000), full[:20_000]...) }, 64<<20)
		}, "than its window"},
		{"window widened to overflow", 1, func(g *script) { g.write(g.data(mux(muxWinUpd, flagACK, 1, maxWindow-muxWindow+1))) }, "widened the window"},
		{"a stream acknowledged twice", 1, func(g *script) {
			g.write(g.data(mux(muxWinUpd, flagACK, 1, 0), mux(muxWinUpd, flagACK, 1, 0)))
		}, "acknowledged stream 1"},
		{"a stream ended twice", 1, func(g *script) {
			g.write(g.data(mux(muxWinUpd, flagFIN, 1, 0), mux(muxWinUpd, flagFIN, 1, 0)))
		}, "ended stream 1 twice"},
	} {
		t.Run(v.name, func(t *testing.T) {
			noLeaks(t)
			s, g := hostile(t)
			var streams []net.Conn
			for range v.opens {
				c, err := s.Open(context.Background())
				if err != nil {
					t.Fatal(err)
				}
				streams = append(streams, c)
			}
			eventually(t, "the streams are open", func() bool {
				s.guard.mu.Lock()
				defer s.guard.mu.Unlock()
				return len(s.guard.flows) == v.opens
			})
			g.drain()
			grew := peakHeap(func() {
				v.attack(g)
				select {
				case <-s.Done():
				case <-time.After(30 * time.Second):
					t.Fatal("the session goes on")
				}
			})
			if err := s.Err(); !errors.Is(err, ErrProtocol) || !strings.Contains(err.Error(), v.want) {
				t.Errorf("session ended with %q, want %q", err, v.want)
			}
			for _, c := range streams {
				if _, err := io.ReadAll(c); err != nil && !errors.Is(err, ErrProtocol) {
					t.Errorf("stream ended with %v, want %v", err, ErrProtocol)
				}
				c.Close()
			}
			if grew > 8<<20 {
				t.Errorf("the heap grew by %d KiB", grew>>10)
			}
		})
	}
}

func TestDialEndsWithItsContextWhenTheGuestNeverAnswers(t *testing.T) {
	for _, v := range []struct {
		name  string
		guest func(ctx context.Context, p net.Conn)
	}{
		{"silent, does not read", func(context.Context, net.Conn) {}},
		{"silent", func(_ context.Context, p net.Conn) { io.Copy(io.Discard, p) }},
		{"endless garbage", func(ctx context.Context, p net.Conn) {
			go io.Copy(io.Discard, p)
			junk := bytes.Repeat(append([]byte("WL1"), make([]byte, 50)...), 1000)
			for ctx.Err() == nil {
				if _, err := p.Write(junk); err != nil {
					return
				}
			}
		}},
		{"answers of other generations", func(ctx context.Context, p net.Conn) {
			go io.Copy(io.Discard, p)
			for i := uint64(0); ctx.Err() == nil; i++ {
				if _, err := p.Write(appendFrame(nil, kindAnswer, i, nil, nil)); err != nil {
					return
				}
			}
		}},
		{"echo", func(_ context.Context, p net.Conn) { io.Copy(p, p) }},
	} {
		t.Run(v.name, func(t *testing.T) {
			noLeaks(t)
			host, guest := net.Pipe()
			t.Cleanup(func() { host.Close(); guest.Close() })
			ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
			defer cancel()
			go v.guest(ctx, guest)
			grew := peakHeap(func() {
				_, err := Dial(ctx, host)
				if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "no answer from the guest") {
					t.Errorf("Dial: %v", err)
				}
			})
			if grew > 4<<20 {
				t.Errorf("the heap grew by %d KiB", grew>>10)
			}
		})
	}
}

func TestAPortMayBeDialledAgainAfterAGuestThatWasNotReady(t *testing.T) {
	noLeaks(t)
	host, guest := net.Pipe()
	t.Cleanup(func() { host.Close(); guest.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if _, err := Dial(ctx, host); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Dial without a guest: %v", err)
	}
	serve(t, guest, func(s *Session) {
		for {
			c, err := s.Accept()
			if err != nil {
				return
			}
			go answer(c)
		}
	})
	s, err := Dial(within(t, 30*time.Second), host)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := call(s, 1, 50_000); err != nil {
		t.Error(err)
	}
}

func TestDialTellsThatThePortHasEnded(t *testing.T) {
	noLeaks(t)
	a, b := socketpair(t)
	b.Close()
	if _, err := Dial(within(t, 30*time.Second), a); !errors.Is(err, ErrGone) {
		t.Errorf("Dial: %v, want %v", err, ErrGone)
	}
}

// TestAGuestThatNeverReadsBlocksNoCall: the calls of http.Transport close
// their stream when their time is up, and that must not wait for the guest.
func TestAGuestThatNeverReadsBlocksNoCall(t *testing.T) {
	noLeaks(t)
	s, _ := hostile(t)
	large := make([]byte, 10<<20)
	grew := peakHeap(func() {
		var wg sync.WaitGroup
		for range guestapi.MaxStreams {
			c, err := s.Open(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				defer c.Close()
				c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
				_, err := c.Write(large)
				if !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("Write: %v", err)
				}
			})
		}
		wg.Wait()
	})
	// 256 writers with one chunk each beyond a full outbox, the copies that
	// yamux makes, and the buffers' growth.
	if grew > 64<<20 {
		t.Errorf("the heap grew by %d KiB", grew>>10)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := s.Open(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Open with all streams unfinished: %v", err)
	}
	s.Close()
	if err := s.Err(); !errors.Is(err, ErrClosed) {
		t.Errorf("session ended with %v", err)
	}
}

// TestUnreadBytesAreBounded: many streams, filled by the guest, read by
// nobody; then the host closes them all, and the link goes on.
func TestUnreadBytesAreBounded(t *testing.T) {
	noLeaks(t)
	s, g := hostile(t)
	g.drain()
	const n = 200
	var streams []net.Conn
	for range n {
		c, err := s.Open(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, c)
	}
	sent := make(chan struct{})
	grew := peakHeap(func() {
		go func() {
			defer close(sent)
			for at := range maxWindow / (16 << 10) {
				for i := range n {
					flags := uint16(0)
					if at == 0 {
						flags = flagACK
					}
					g.write(g.data(mux(muxData, flags, uint32(2*i+1), 16<<10), make([]byte, 16<<10)))
				}
			}
		}()
		eventually(t, "the link stands still", func() bool {
			s.guard.mu.Lock()
			defer s.guard.mu.Unlock()
			return s.guard.unread >= maxUnread
		})
		select {
		case <-sent:
			t.Error("the guest got rid of everything")
		case <-time.After(50 * time.Millisecond):
		}
	})
	if grew > 4*maxUnread {
		t.Errorf("the heap grew by %d KiB", grew>>10)
	}
	for _, c := range streams {
		c.Close()
	}
	<-sent // what comes for closed streams is dropped
	eventually(t, "nothing is unread", func() bool {
		s.guard.mu.Lock()
		defer s.guard.mu.Unlock()
		return s.guard.unread == 0
	})
	if err := s.Err(); err != nil {
		t.Error(err)
	}
}

// TestAGuestThatOnlySendsCannotFillTheOutbox: each window update is an answer
// that the guest never reads.
func TestAGuestThatOnlySendsCannotFillTheOutbox(t *testing.T) {
	noLeaks(t)
	o := newOutbox(1)
	var err error
	sent := 0
	for h := mux(muxWinUpd, 0, 1, muxWindow/2); err == nil; sent += len(h) {
		err = o.send(h, nil)
	}
	if !errors.Is(err, ErrProtocol) || cap(o.queue) > 2*outboxMost {
		t.Errorf("an outbox of %d KiB after %d KiB of answers: %v", cap(o.queue)>>10, sent>>10, err)
	}
}
