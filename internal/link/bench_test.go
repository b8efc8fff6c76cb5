package link

import (
	"context"
	"io"
	"net"
	"net/http"
	"testing"
)

const benchChunk = 64 << 10

// benchCopy measures n chunks from w to r.
func benchCopy(b *testing.B, w io.Writer, r io.Reader) {
	b.Helper()
	b.SetBytes(benchChunk)
	b.ReportAllocs()
	done := make(chan error, 1)
	n := int64(b.N) * benchChunk
	go func() {
		_, err := io.CopyN(io.Discard, r, n)
		done <- err
	}()
	chunk := make([]byte, benchChunk)
	for range b.N { // b.Loop does not tell the reader how much will come
		if _, err := w.Write(chunk); err != nil {
			b.Fatal(err)
		}
	}
	if err := <-done; err != nil {
		b.Fatal(err)
	}
}

// streams is one stream, both ends.
func streams(b *testing.B) (host, guest net.Conn) {
	b.Helper()
	h, g := pair(b)
	host, err := h.Open(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	guest, err = g.Accept()
	if err != nil {
		b.Fatal(err)
	}
	return host, guest
}

// BenchmarkPlainCopy is the floor: the socket without a link on it.
func BenchmarkPlainCopy(b *testing.B) {
	x, y := socketpair(b)
	benchCopy(b, x, y)
}

func BenchmarkHostToGuest(b *testing.B) {
	host, guest := streams(b)
	benchCopy(b, host, guest)
}

func BenchmarkGuestToHost(b *testing.B) {
	host, guest := streams(b)
	benchCopy(b, guest, host)
}

// benchHTTP measures a call with a small body both ways.
func benchHTTP(b *testing.B, listen net.Listener, dial func(context.Context) (net.Conn, error), reuse bool) {
	b.Helper()
	b.ReportAllocs()
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(w, r.Body)
	})}
	go server.Serve(listen)
	b.Cleanup(func() { server.Close() })
	transport := &http.Transport{
		DisableKeepAlives: !reuse,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
	}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	for b.Loop() {
		resp, err := client.Post("http://guest/", "application/json", http.NoBody)
		if err != nil {
			b.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
}

// BenchmarkHTTPPlain is the floor: the same call over a unix socket.
func BenchmarkHTTPPlain(b *testing.B) {
	path := b.TempDir() + "/s"
	l, err := net.Listen("unix", path)
	if err != nil {
		b.Fatal(err)
	}
	benchHTTP(b, l, func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}, true)
}

func BenchmarkHTTPOverLink(b *testing.B) {
	h, g := pair(b)
	benchHTTP(b, g, h.Open, true)
}

// BenchmarkHTTPNewStreamEach opens a stream for each call.
func BenchmarkHTTPNewStreamEach(b *testing.B) {
	h, g := pair(b)
	benchHTTP(b, g, h.Open, false)
}

// BenchmarkPingPong is the latency of one byte there and back.
func BenchmarkPingPong(b *testing.B) {
	host, guest := streams(b)
	go io.Copy(guest, guest)
	buf := make([]byte, 1)
	for b.Loop() {
		if _, err := host.Write(buf); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(host, buf); err != nil {
			b.Fatal(err)
		}
	}
}
