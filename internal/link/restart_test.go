package link

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"
)

// restarts is how often the host is replaced: WARREN_RESTARTS, or 1,000 with
// WARREN_SOAK set, or a sample.
func restarts(t *testing.T) int {
	if s := os.Getenv("WARREN_RESTARTS"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			t.Fatalf("WARREN_RESTARTS=%q: not a positive number", s)
		}
		return n
	}
	if os.Getenv("WARREN_SOAK") != "" {
		return 1000
	}
	return 40
}

// endless is a call that only a restart ends.
const endless = 1 << 50

// restartGuest answers calls and makes two endless ones of its own in each
// session. All that goes wrong but restarts is in faults.
type restartGuest struct {
	mu     sync.Mutex
	open   map[uint64]int // streams by generation
	faults []error
	ended  int
}

func (g *restartGuest) accept(s *Session) {
	for i := range 2 {
		g.track(s, func() error { return call(s, s.Generation()+uint64(i), endless) })
	}
	for {
		c, err := s.Accept()
		if err != nil {
			g.check(err)
			return
		}
		g.track(s, func() error { return answer(c) })
	}
}

func (g *restartGuest) track(s *Session, f func() error) {
	g.mu.Lock()
	g.open[s.Generation()]++
	g.mu.Unlock()
	go func() {
		err := f()
		g.check(err)
		g.mu.Lock()
		g.open[s.Generation()]--
		g.mu.Unlock()
	}()
}

// check takes an error with which a stream or session ended. A call that was
// answered to its end is fine as well.
func (g *restartGuest) check(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err == nil {
		return
	}
	g.ended++
	if errors.Is(err, errWrongBytes) || !errors.Is(err, ErrReplaced) {
		g.faults = append(g.faults, err)
	}
}

// openBefore counts what is left of sessions older than generation.
func (g *restartGuest) openBefore(generation uint64) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := 0
	for gen, k := range g.open {
		if gen < generation {
			n += k
		}
	}
	return n
}

func TestEveryNewHostGetsAWorkingSession(t *testing.T) {
	noLeaks(t)
	for _, v := range []struct {
		name        string
		tells, tear bool
	}{
		{"driver sees nothing, no byte is lost", false, false},
		{"driver sees nothing, bytes are lost", false, true},
		{"driver sees the disconnect, no byte is lost", true, false},
		{"driver sees the disconnect, bytes are lost", true, true},
	} {
		t.Run(v.name, func(t *testing.T) {
			t.Parallel()
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			rng := rand.New(rand.NewPCG(seed, 0))
			var tear *rand.Rand
			if v.tear {
				tear = rand.New(rand.NewPCG(seed, 1))
			}
			c := newCable(v.tells)
			g := &restartGuest{open: map[uint64]int{}}
			serve(t, &c.guest, g.accept)
			broken := 0
			for i := range (restarts(t) + 3) / 4 {
				if err := restartRound(t, c, g, rng, tear, &broken); err != nil {
					t.Fatalf("restart %d: %v", i, err)
				}
			}
			// The guest learns of the last host's end from the next one.
			last, err := Dial(within(t, time.Minute), c.connect(never, nil))
			if err != nil {
				t.Fatal(err)
			}
			eventually(t, "the guest has ended all older streams", func() bool { return g.openBefore(last.Generation()) == 0 })
			g.mu.Lock()
			defer g.mu.Unlock()
			for _, err := range g.faults {
				t.Errorf("in the guest: %v", err)
			}
			t.Cleanup(func() { last.Close() })
			t.Logf("%d hosts broke while dialling; %d streams and sessions of the guest were cut off", broken, g.ended)
		})
	}
}

// restartRound connects one host, perhaps one before it that breaks while it
// dials, checks its session and breaks it under load.
func restartRound(t *testing.T, c *cable, g *restartGuest, rng, tear *rand.Rand, dialBreaks *int) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if rng.IntN(3) == 0 {
		end := c.connect(1+rng.IntN(40<<10), tear)
		switch s, err := Dial(ctx, end); {
		case err == nil:
			s.Close()
		case !errors.Is(err, ErrGone):
			return fmt.Errorf("broken while dialling: %w", err)
		default:
			*dialBreaks++
		}
	}
	end := c.connect(never, tear)
	s, err := Dial(ctx, end)
	if err != nil {
		return err
	}
	defer s.Close()
	eventually(t, "the guest has ended older streams", func() bool { return g.openBefore(s.Generation()) == 0 })

	results := make(chan error, 16)
	var wg sync.WaitGroup
	wg.Go(func() { // the guest's calls
		for {
			c, err := s.Accept()
			if err != nil {
				results <- err
				return
			}
			wg.Go(func() { results <- answer(c) })
		}
	})
	exact := make(chan error, 3)
	for range cap(exact) {
		seed, n := rng.Uint64(), rng.Int64N(100_000)
		go func() { exact <- call(s, seed, n) }()
	}
	for range cap(exact) {
		if err := <-exact; err != nil {
			return fmt.Errorf("a call on a new session: %w", err)
		}
	}
	for range 4 {
		seed := rng.Uint64()
		wg.Go(func() { results <- call(s, seed, endless) })
	}
	end.breakAfter(rng.IntN(600 << 10))
	select {
	case <-s.Done():
	case <-ctx.Done():
		return errors.New("the session outlived its port")
	}
	wg.Wait()
	close(results)
	for err := range results {
		if !errors.Is(err, ErrGone) || errors.Is(err, errWrongBytes) {
			return fmt.Errorf("a stream ended with: %w", err)
		}
	}
	return nil
}

// script is a host or guest that a test plays by hand, byte by byte.
type script struct {
	t   *testing.T
	p   Port
	dec *decoder
	gen uint64
}

// scriptHost opens a session by hand.
func scriptHost(t *testing.T, p Port) *script {
	s := &script{t, p, newDecoder(p, maxGuestFrame), newGeneration()}
	s.write(appendHello(nil, s.gen))
	if _, err := s.dec.hunt(func(h header) bool { return h.kind == kindAnswer && h.generation == s.gen }); err != nil {
		t.Fatal(err)
	}
	if _, err := s.dec.next(); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *script) write(b []byte) {
	s.t.Helper()
	if _, err := s.p.Write(b); err != nil {
		s.t.Fatal(err)
	}
}

func (s *script) data(b ...[]byte) []byte {
	return appendFrame(nil, kindData, s.gen, bytes.Join(b, nil), nil)
}

func TestAFrameCutOffByARestoreNeverReachesItsStream(t *testing.T) {
	for _, v := range []struct {
		name string
		cut  func(whole int) int // bytes that the guest gets of the frame
	}{
		{"in the header", func(int) int { return headerSize - 3 }},
		{"after the header", func(int) int { return headerSize }},
		{"in the middle", func(n int) int { return n / 2 }},
		{"before the tail", func(n int) int { return n - tailSize }},
		{"in the tail", func(n int) int { return n - 1 }},
	} {
		t.Run(v.name, func(t *testing.T) {
			noLeaks(t)
			c := newCable(false)
			type got struct {
				data []byte
				err  error
			}
			begun, streams := make(chan error, 1), make(chan got, 1)
			sessions := make(chan *Session, 2)
			serve(t, &c.guest, func(s *Session) {
				sessions <- s
				for {
					conn, err := s.Accept()
					if err != nil {
						return
					}
					go func() {
						defer conn.Close()
						b := make([]byte, 5)
						_, err := io.ReadFull(conn, b)
						begun <- err
						rest, err := io.ReadAll(conn)
						streams <- got{append(b, rest...), err}
					}()
				}
			})

			// A stream gets "whole", and the first part of a second frame.
			old := scriptHost(t, c.connect(never, nil))
			old.write(old.data(mux(muxWinUpd, flagSYN, 1, 0), mux(muxData, 0, 1, 5), []byte("whole")))
			if err := <-begun; err != nil {
				t.Fatal(err)
			}
			body := bytes.Repeat([]byte("x"), maxHostFrame-overhead-muxHeaderSize)
			half := old.data(mux(muxData, 0, 1, uint32(len(body))), body)
			if len(half) != maxHostFrame {
				t.Fatalf("frame of %d bytes", len(half))
			}
			old.write(half[:v.cut(len(half))])

			s, err := Dial(within(t, 30*time.Second), c.connect(never, nil))
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			g := <-streams
			if string(g.data) != "whole" || !errors.Is(g.err, ErrReplaced) {
				t.Errorf("the old stream got %d bytes and then %v, want \"whole\" and %v", len(g.data), g.err, ErrReplaced)
			}
			if err := (<-sessions).Err(); !errors.Is(err, ErrReplaced) {
				t.Errorf("the old session ended with %v, want %v", err, ErrReplaced)
			}
		})
	}
}

func TestAGuestsHalfWrittenFrameIsFinishedBeforeTheAnswer(t *testing.T) {
	noLeaks(t)
	c := newCable(false)
	c.capToHost = 1000     // far less than a frame
	const size = 300 << 10 // more than a window, so the old write cannot end well
	sessions := make(chan *Session, 2)
	writes := make(chan error, 1)
	serve(t, &c.guest, func(s *Session) {
		sessions <- s
		conn, err := s.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		_, err = conn.Write(bytes.Repeat([]byte("y"), size))
		writes <- err
	})
	old := scriptHost(t, c.connect(never, nil))
	old.write(old.data(mux(muxWinUpd, flagSYN, 1, 0)))
	eventually(t, "the guest is stuck in a frame", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.toHost) == c.capToHost
	})

	s, err := Dial(within(t, 30*time.Second), c.connect(never, nil))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := <-writes; !errors.Is(err, ErrReplaced) {
		t.Errorf("the old write ended with %v, want %v", err, ErrReplaced)
	}
	conn, err := s.Open(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(io.LimitReader(conn, size)); err != nil || len(b) != size || bytes.Trim(b, "y") != nil {
		t.Errorf("the new session got %d bytes, %v", len(b), err)
	}
	if err := <-writes; err != nil {
		t.Errorf("the new write: %v", err)
	}
}

func TestAGuestStaysWithAHostWhoseClockWentBack(t *testing.T) {
	noLeaks(t)
	c := newCable(false)
	sessions := make(chan *Session, 2)
	serve(t, &c.guest, func(s *Session) { sessions <- s })
	for _, gen := range []uint64{1 << 62, 5} {
		host := &script{t, c.connect(never, nil), nil, gen}
		host.write(appendHello(nil, gen))
		if s := <-sessions; s.Generation() != gen {
			t.Errorf("generation %d, want %d", s.Generation(), gen)
		}
	}
}
