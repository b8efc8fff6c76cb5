package bench

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"time"
)

const mib = 1 << 20

// payload is a stream of bytes that do not compress and differ everywhere:
// one MiB of pseudo-random bytes over and over, each MiB stamped with its
// number, so that a part that is lost, doubled or moved changes the digest.
// It is made in advance: neither side of a measurement pays for it.
type payload struct {
	size  int64
	sum   [sha256.Size]byte
	block []byte
}

func newPayload(size int64) *payload {
	p := &payload{size: size, block: make([]byte, mib)}
	rng := rand.NewChaCha8([32]byte{'w', 'a', 'r', 'r', 'e', 'n'})
	_, _ = rng.Read(p.block)
	h := sha256.New()
	_, _ = p.WriteTo(h)
	p.sum = [sha256.Size]byte(h.Sum(nil))
	return p
}

// WriteTo writes the whole stream to w. A payload has one writer at a time.
func (p *payload) WriteTo(w io.Writer) (int64, error) {
	var done int64
	for stamp := uint64(0); done < p.size; stamp++ {
		binary.BigEndian.PutUint64(p.block, stamp)
		part := bytes.NewReader(p.block[:min(mib, p.size-done)])
		// In pieces as a program would write them, not a MiB at once.
		n, err := io.CopyBuffer(onlyWriter{w}, onlyReader{part}, make([]byte, 64<<10))
		done += n
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// onlyWriter and onlyReader hide the shortcuts io.Copy takes.
type onlyWriter struct{ io.Writer }
type onlyReader struct{ io.Reader }

// sink takes what comes back of a payload. One goroutine writes to it.
type sink struct {
	want *payload
	got  int64
	hash hash.Hash
	at   time.Time // when the last byte of it came
}

func newSink(want *payload) *sink { return &sink{want: want, hash: sha256.New()} }

// Write hashes while the rest is under way, as any receiver would.
func (s *sink) Write(b []byte) (int, error) {
	if s.got+int64(len(b)) > s.want.size {
		return 0, fmt.Errorf("more than the %d bytes sent came back", s.want.size)
	}
	s.hash.Write(b)
	s.got += int64(len(b))
	if s.got == s.want.size {
		s.at = time.Now()
	}
	return len(b), nil
}

// check compares the digests when all has come.
func (s *sink) check() error {
	if sum := s.hash.Sum(nil); !bytes.Equal(sum, s.want.sum[:]) {
		return fmt.Errorf("%d bytes came back changed: sha256 %x, sent %x", s.got, sum, s.want.sum)
	}
	return nil
}

// throughput sends s's payload into w, whose far end leads back to s, and
// returns MiB/s of payload, from the first byte in to the last byte back.
//
// finish, which may be nil, is called when everything is written. receive
// returns when nothing more will come to s. When an error is returned, also
// that of ctx, either may still be under way: it is for the caller to end w
// and what leads to s.
func throughput(ctx context.Context, s *sink, w io.Writer, finish, receive func() error) (float64, error) {
	sent, received := make(chan error, 1), make(chan error, 1)
	start := time.Now()
	go func() {
		_, err := s.want.WriteTo(w)
		if err == nil && finish != nil {
			err = finish()
		}
		sent <- err
	}()
	go func() { received <- receive() }()
	for range 2 {
		select {
		case err := <-sent:
			sent = nil
			if err != nil {
				return 0, fmt.Errorf("send: %w", err)
			}
		case err := <-received:
			received = nil
			if err != nil {
				return 0, fmt.Errorf("receive: %w", err)
			}
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
	if s.got != s.want.size {
		return 0, fmt.Errorf("%d of %d bytes came back", s.got, s.want.size)
	}
	if err := s.check(); err != nil {
		return 0, err
	}
	return float64(s.want.size) / mib / s.at.Sub(start).Seconds(), nil
}
