package bench

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

func TestBytesAreTimedAndComparedByDigest(t *testing.T) {
	p := newPayload(3*mib + 5)
	echo := func(change func([]byte)) (float64, error) {
		ours, theirs := net.Pipe()
		defer ours.Close()
		back, in := io.Pipe()
		go func() {
			buf := make([]byte, 4096)
			for {
				n, err := theirs.Read(buf)
				if err != nil {
					return
				}
				change(buf[:n])
				if _, err := in.Write(buf[:n]); err != nil {
					return
				}
			}
		}()
		s := newSink(p)
		return throughput(t.Context(), s, ours, nil, func() error {
			_, err := io.CopyN(s, back, p.size)
			return err
		})
	}
	if rate, err := echo(func([]byte) {}); err != nil || rate <= 0 {
		t.Errorf("unchanged: %v, %v", rate, err)
	}
	if _, err := echo(func(b []byte) { b[0] ^= 1 }); err == nil || !strings.Contains(err.Error(), "came back changed") {
		t.Errorf("changed: %v", err)
	}
}

func TestPayloadsOfOneSizeAreEqualAndNoTwoMiBAre(t *testing.T) {
	var a, b bytes.Buffer
	if _, err := newPayload(2 * mib).WriteTo(&a); err != nil {
		t.Fatal(err)
	}
	if _, err := newPayload(2 * mib).WriteTo(&b); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(a.Bytes(), b.Bytes()) {
		t.Error("two payloads of one size differ")
	}
	if bytes.Equal(a.Bytes()[:mib], a.Bytes()[mib:]) {
		t.Error("both halves are the same")
	}
}

func TestBytesThatNeverComeBackEndWithTheContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := throughput(ctx, newSink(newPayload(1)), io.Discard, nil, func() error { <-t.Context().Done(); return nil })
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestTooFewAndTooManyBytesAreErrors(t *testing.T) {
	for text, want := range map[string]string{
		"four":          "4 of 7 bytes came back",
		"four and more": "receive: more than the 7 bytes sent came back",
	} {
		s := newSink(newPayload(7))
		_, err := throughput(t.Context(), s, io.Discard, nil, func() error { _, err := io.WriteString(s, text); return err })
		if err == nil || err.Error() != want {
			t.Errorf("%s: got %v", text, err)
		}
	}
}
