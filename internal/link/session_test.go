package link

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
)

// joined is a stream of a new session, both ends.
func joined(t *testing.T) (host, guest *Session, h, g net.Conn) {
	t.Helper()
	host, guest = pair(t)
	h, err := host.Open(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	g, err = guest.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return host, guest, h, g
}

func TestStreamsCarryExactBytesInBothDirections(t *testing.T) {
	noLeaks(t)
	host, guest := pair(t)
	for _, s := range []struct{ from, to *Session }{{host, guest}, {guest, host}} {
		const n = 64
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				if err := call(s.from, uint64(i), 200_000); err != nil {
					t.Errorf("call: %v", err)
				}
			})
			c, err := s.to.Accept()
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				if err := answer(c); err != nil {
					t.Errorf("answer: %v", err)
				}
			})
		}
		wg.Wait()
	}
}

func TestAFinishedStreamLeavesNothing(t *testing.T) {
	noLeaks(t)
	host, guest := pair(t)
	go func() {
		for {
			c, err := guest.Accept()
			if err != nil {
				return
			}
			go answer(c)
		}
	}()
	for i := range 3 * guestapi.MaxStreams {
		if err := call(host, uint64(i), 10); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range []*Session{host, guest} {
		eventually(t, "all streams are forgotten", func() bool {
			s.guard.mu.Lock()
			defer s.guard.mu.Unlock()
			return len(s.guard.flows)+len(s.guard.fresh)+len(s.guard.slots)+s.guard.theirs+s.guard.unread+s.mux.NumStreams() == 0
		})
	}
}

func TestAnOrderlyEndIsEOFAndACutIsAnError(t *testing.T) {
	noLeaks(t)
	host, guest, h, g := joined(t)
	h2, err := host.Open(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	g2, err := guest.Accept()
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(g, "all of it")
	g.Close()
	io.WriteString(g2, "some of i")
	if b := make([]byte, 9); true {
		if _, err := io.ReadFull(h2, b); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the end has arrived", func() bool { return host.guard.ended(h.(*stream).flow) })
	guest.Close()
	if b, err := io.ReadAll(h); string(b) != "all of it" || err != nil {
		t.Errorf("ended stream: %q, %v", b, err)
	}
	if b, err := io.ReadAll(h2); len(b) != 0 || !errors.Is(err, ErrGone) {
		t.Errorf("cut stream: %q, %v; want %v", b, err, ErrGone)
	}
	if _, err := h2.Write([]byte("x")); !errors.Is(err, ErrGone) {
		t.Errorf("write to a cut stream: %v, want %v", err, ErrGone)
	}
	<-host.Done()
	if err := host.Err(); !errors.Is(err, ErrGone) || !strings.Contains(err.Error(), "it closed the session") {
		t.Errorf("the guest's Close came as %v", err)
	}
	if _, err := host.Open(context.Background()); !errors.Is(err, ErrGone) {
		t.Errorf("Open: %v, want %v", err, ErrGone)
	}
	if _, err := guest.Accept(); !errors.Is(err, ErrClosed) {
		t.Errorf("Accept: %v, want %v", err, ErrClosed)
	}
}

func TestAGuestServesAgainAfterClosingASession(t *testing.T) {
	noLeaks(t)
	c := newCable(true)
	sessions := make(chan *Session, 1)
	serve(t, &c.guest, func(s *Session) { sessions <- s })
	for range 3 {
		host, err := Dial(within(t, 30*time.Second), c.connect(never, nil))
		if err != nil {
			t.Fatal(err)
		}
		(<-sessions).Close()
		<-host.Done()
		if err := host.Err(); !errors.Is(err, ErrGone) {
			t.Errorf("host session: %v", err)
		}
	}
}

func TestCloseEndsEverythingThatWaits(t *testing.T) {
	noLeaks(t)
	host, _, h, _ := joined(t)
	errs := make(chan error, 4)
	go func() { _, err := h.Read(make([]byte, 1)); errs <- err }()
	go func() { _, err := h.Write(make([]byte, moreThanAWindow)); errs <- err }()
	go func() { _, err := host.Accept(); errs <- err }()
	time.Sleep(10 * time.Millisecond) // so that they wait; right in any case
	host.Close()
	for range 3 {
		if err := <-errs; !errors.Is(err, ErrClosed) {
			t.Errorf("ended with %v, want %v", err, ErrClosed)
		}
	}
	if err := host.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

// moreThanAWindow is more than one Write can be rid of when nobody reads.
const moreThanAWindow = maxWindow + 1

func TestClosingAStreamEndsItsReadAndWrite(t *testing.T) {
	noLeaks(t)
	_, _, h, _ := joined(t)
	errs := make(chan error, 2)
	go func() { _, err := h.Read(make([]byte, 1)); errs <- err }()
	go func() { _, err := h.Write(make([]byte, moreThanAWindow)); errs <- err }()
	time.Sleep(10 * time.Millisecond)
	h.Close()
	for range 2 {
		if err := <-errs; !errors.Is(err, net.ErrClosed) {
			t.Errorf("ended with %v, want %v", err, net.ErrClosed)
		}
	}
	if _, err := h.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Read after Close: %v", err)
	}
	if err := h.SetDeadline(time.Time{}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("SetDeadline after Close: %v", err)
	}
}

func TestDeadlinesEndReadsAndWritesAndCanBeLifted(t *testing.T) {
	noLeaks(t)
	_, _, h, g := joined(t)
	h.SetDeadline(time.Now().Add(20 * time.Millisecond))
	_, err := h.Read(make([]byte, 1))
	var timeout net.Error
	if !errors.Is(err, os.ErrDeadlineExceeded) || !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("Read: %v", err)
	}
	n, err := h.Write(make([]byte, moreThanAWindow))
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Write: %v", err)
	}
	h.SetDeadline(time.Time{})
	go io.WriteString(g, "x")
	if _, err := io.ReadFull(h, make([]byte, 1)); err != nil {
		t.Errorf("Read after the deadline was lifted: %v", err)
	}
	go h.Write([]byte("y"))
	b := make([]byte, n+1)
	if _, err := io.ReadFull(g, b); err != nil || b[n] != 'y' {
		t.Errorf("the write that timed out told %d bytes, then came %q, %v", n, b[n], err)
	}
}

// TestHTTPWorksOverASession runs what the agent and the supervisor run.
func TestHTTPWorksOverASession(t *testing.T) {
	noLeaks(t)
	host, guest := pair(t)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hang" {
			<-r.Context().Done()
			return
		}
		io.Copy(w, r.Body)
	})}
	served := make(chan error, 1)
	go func() { served <- server.Serve(guest) }()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return host.Open(ctx) }}
	client := &http.Client{Transport: transport}
	body := bytes.Repeat([]byte("body"), 500_000)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			resp, err := client.Post("http://guest/echo", "text/plain", bytes.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			if b, err := io.ReadAll(resp.Body); err != nil || !bytes.Equal(b, body) {
				t.Errorf("%d bytes, %v", len(b), err)
			}
		})
	}
	wg.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, "GET", "http://guest/hang", nil)
	if _, err := client.Do(req); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a call that hangs: %v", err)
	}
	transport.CloseIdleConnections()
	host.Close()
	if err := <-served; !errors.Is(err, ErrGone) {
		t.Errorf("the guest's server ended with %v, want %v", err, ErrGone)
	}
}

// countingPort counts the guest's writes.
type countingPort struct {
	Port
	mu     sync.Mutex
	writes int
}

func (c *countingPort) Write(b []byte) (int, error) {
	c.mu.Lock()
	c.writes++
	c.mu.Unlock()
	return c.Port.Write(b)
}

func TestHeaderAndBodyLeaveTheGuestInOneWrite(t *testing.T) {
	noLeaks(t)
	a, b := socketpair(t)
	p := &countingPort{Port: b}
	sessions := make(chan *Session, 1)
	serve(t, p, func(s *Session) { sessions <- s })
	host, err := Dial(within(t, 30*time.Second), a)
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	h, err := host.Open(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	g, err := (<-sessions).Accept()
	if err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	before := p.writes
	p.mu.Unlock()
	const n = 20
	for range n {
		if _, err := g.Write(make([]byte, 20_000)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(h, make([]byte, 20_000)); err != nil {
			t.Fatal(err)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if got := p.writes - before; got != n {
		t.Errorf("%d port writes for %d writes to a stream", got, n)
	}
}

func TestServeEndsWithItsContextWhereverItWaits(t *testing.T) {
	for _, v := range []struct {
		name string
		host func(t *testing.T, c *cable, sessions chan *Session)
	}{
		{"for a host", func(*testing.T, *cable, chan *Session) {}},
		{"for a host to read the answer", func(_ *testing.T, c *cable, _ chan *Session) {
			c.capToHost = 5
			c.connect(never, nil).Write(appendHello(nil, 9))
		}},
		{"in a session", func(t *testing.T, c *cable, sessions chan *Session) {
			scriptHost(t, c.connect(never, nil))
			<-sessions
		}},
		{"in a session with a host that does not read", func(t *testing.T, c *cable, sessions chan *Session) {
			c.capToHost = 500
			scriptHost(t, c.connect(never, nil))
			s := <-sessions
			for range 50 {
				go func() {
					ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
					defer cancel()
					s.Open(ctx)
				}()
			}
			time.Sleep(50 * time.Millisecond)
		}},
	} {
		t.Run(v.name, func(t *testing.T) {
			noLeaks(t)
			c := newCable(false)
			sessions := make(chan *Session, 1)
			ctx, cancel := context.WithCancelCause(context.Background())
			done := make(chan error, 1)
			go func() { done <- Serve(ctx, &c.guest, func(s *Session) { sessions <- s }) }()
			v.host(t, c, sessions)
			why := errors.New("the machine goes down")
			cancel(why)
			select {
			case err := <-done:
				if err != why {
					t.Errorf("Serve: %v, want %v", err, why)
				}
			case <-time.After(30 * time.Second):
				t.Fatal("Serve goes on")
			}
		})
	}
}

func TestGenerationsAreNeverUsedTwice(t *testing.T) {
	seen := make(map[uint64]bool)
	last := uint64(0)
	for range 10_000 {
		g := newGeneration()
		if seen[g] || g <= last {
			t.Fatalf("generation %d after %d", g, last)
		}
		seen[g], last = true, g
	}
}
