package bench

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"testing"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/link"
)

// fakeGuest answers on a link as an agent does and returns a client of it.
func fakeGuest(t *testing.T, frames func(w io.Writer)) *guestClient {
	t.Helper()
	ours, file, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := net.FileConn(file)
	file.Close()
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+guestapi.Prepare.Path, func(w http.ResponseWriter, r *http.Request) {
		req, err := guestapi.Decode[guestapi.PrepareRequest](r.Body, guestapi.Prepare.MaxRequest)
		if err != nil || len(req.MachineID) != 32 || len(req.Entropy) < 32 || req.Generation == 0 {
			http.Error(w, "bad \x1b[31midentity", http.StatusBadRequest)
			return
		}
		_ = json.NewEncoder(w).Encode(guestapi.PrepareInfo{})
	})
	mux.HandleFunc("POST "+guestapi.ExecPath, func(w http.ResponseWriter, r *http.Request) {
		if _, err := guestapi.Decode[guestapi.ExecRequest](r.Body, guestapi.MaxExecRequest); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+r.Header.Get("Upgrade")+"\r\n\r\n")
		frames(conn)
	})
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = link.Serve(ctx, theirs, func(s *link.Session) { _ = http.Serve(s, mux) })
	}()
	g, err := dialGuest(t.Context(), ours)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		g.close()
		cancel()
		<-served
		theirs.Close()
	})
	return g
}

func frame(w io.Writer, kind guestapi.FrameKind, payload string) {
	b := make([]byte, guestapi.FrameHeader, guestapi.FrameHeader+len(payload))
	guestapi.PutFrameHeader(b, kind, len(payload))
	_, _ = w.Write(append(b, payload...))
}

func TestTheFloorsGuestIsPreparedAndItsProgramAwaited(t *testing.T) {
	g := fakeGuest(t, func(w io.Writer) {
		frame(w, guestapi.FrameStderr, "a remark\n")
		frame(w, guestapi.FrameStdout, "op")
		frame(w, guestapi.FrameStdout, "en\n")
	})
	if err := g.prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	program, err := g.startProgram(t.Context(), "open\n", "sh")
	if err != nil {
		t.Fatal(err)
	}
	program.Close()
}

func TestAProgramThatIsNeverReadySaysWhy(t *testing.T) {
	for _, tt := range []struct {
		name   string
		frames func(io.Writer)
		want   string
	}{
		{"it ends", func(w io.Writer) {
			frame(w, guestapi.FrameStderr, "no \x1b[31mport\n")
			frame(w, guestapi.FrameExit, `{"code":1}`)
		}, "sh ended ({\"code\":1}) before it was ready: no ?[31mport"},
		{"its stream breaks off", func(io.Writer) {}, "sh says no more: EOF"},
		{"it floods", func(w io.Writer) {
			for range 3 {
				frame(w, guestapi.FrameStdout, string(make([]byte, guestapi.MaxFrame/2)))
			}
		}, "sh writes more than it should"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := fakeGuest(t, tt.frames).startProgram(t.Context(), "open\n", "sh")
			if err == nil || err.Error() != tt.want {
				t.Errorf("got %v, want %s", err, tt.want)
			}
		})
	}
}
