package link

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"
)

// noLeaks fails the test if goroutines are left when it and the clean-ups
// registered after this call have ended.
func noLeaks(t *testing.T) {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		if t.Failed() {
			return
		}
		for range 5000 {
			if runtime.NumGoroutine() <= before {
				return
			}
			time.Sleep(2 * time.Millisecond)
		}
		buf := make([]byte, 1<<20)
		t.Errorf("%d goroutines before, %d after:\n%s", before, runtime.NumGoroutine(), buf[:runtime.Stack(buf, true)])
	})
}

// socketpair is what lies between the supervisor and QEMU.
func socketpair(t testing.TB) (a, b net.Conn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	conn := func(fd int) net.Conn {
		f := os.NewFile(uintptr(fd), "socketpair")
		defer f.Close()
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	return conn(fds[0]), conn(fds[1])
}

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// serve runs Serve on port until the test ends.
func serve(t testing.TB, port Port, accept func(*Session)) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, port, accept) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if !errors.Is(err, context.Canceled) && !errors.Is(err, ErrGone) {
				t.Errorf("Serve: %v", err)
			}
		case <-time.After(30 * time.Second):
			t.Error("Serve did not return when its context ended")
		}
	})
}

// pair is a connected session, host end first.
func pair(t testing.TB) (host, guest *Session) {
	t.Helper()
	a, b := socketpair(t)
	sessions := make(chan *Session, 1)
	serve(t, b, func(s *Session) { sessions <- s })
	host, err := Dial(within(t, 30*time.Second), a)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { host.Close() })
	return host, <-sessions
}

// noise is a reproducible endless stream.
func noise(seed uint64) io.Reader {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	return rand.NewChaCha8(key)
}

// errWrongBytes is what no restart may ever cause.
var errWrongBytes = errors.New("wrong bytes")

// expect reads n bytes of noise from r, checking each, and returns their
// digest.
func expect(r io.Reader, seed uint64, n int64) ([]byte, error) {
	want, sum := noise(seed), sha256.New()
	buf, check := make([]byte, 16<<10), make([]byte, 16<<10)
	for at := int64(0); at < n; {
		m, err := r.Read(buf[:min(int64(len(buf)), n-at)])
		io.ReadFull(want, check[:m])
		if !bytes.Equal(buf[:m], check[:m]) {
			return nil, fmt.Errorf("%w near byte %d", errWrongBytes, at)
		}
		sum.Write(buf[:m])
		at += int64(m)
		if err != nil {
			return nil, err
		}
	}
	return sum.Sum(nil), nil
}

// talk is one side of an exchange: n bytes of noise in each direction at
// once, then both digests.
func talk(c net.Conn, mine, theirs uint64, n int64) error {
	var wg sync.WaitGroup
	var sendErr error
	sum := sha256.New()
	wg.Go(func() {
		_, sendErr = io.CopyBuffer(c, io.TeeReader(io.LimitReader(noise(mine), n), sum), make([]byte, 20_000))
	})
	got, err := expect(c, theirs, n)
	wg.Wait()
	if err = errors.Join(err, sendErr); err != nil {
		return err
	}
	if _, err := c.Write(got); err != nil {
		return err
	}
	answer := make([]byte, sha256.Size)
	if _, err := io.ReadFull(c, answer); err != nil {
		return err
	}
	if !bytes.Equal(answer, sum.Sum(nil)) {
		return fmt.Errorf("%w: digests differ", errWrongBytes)
	}
	return nil
}

// call opens a stream and asks the other side to talk on it.
func call(s *Session, seed uint64, n int64) error {
	c, err := s.Open(context.Background())
	if err != nil {
		return err
	}
	defer c.Close()
	h := binary.BigEndian.AppendUint64(nil, seed)
	h = binary.BigEndian.AppendUint64(h, uint64(n))
	if _, err := c.Write(h); err != nil {
		return err
	}
	return talk(c, seed, seed+1, n)
}

// answer is the other side of call.
func answer(c net.Conn) error {
	defer c.Close()
	h := make([]byte, 16)
	if _, err := io.ReadFull(c, h); err != nil {
		return err
	}
	seed, n := binary.BigEndian.Uint64(h), int64(binary.BigEndian.Uint64(h[8:]))
	return talk(c, seed+1, seed, n)
}
