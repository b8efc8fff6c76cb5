package supervisor

import (
	"bufio"
	"bytes"
	"context"
	"net"
	"strings"
	"testing"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// frame is one exec frame as bytes.
func frame(kind guestapi.FrameKind, payload string) string {
	b := make([]byte, guestapi.FrameHeader)
	guestapi.PutFrameHeader(b, kind, len(payload))
	return string(b) + payload
}

type count int

func (c *count) Write(p []byte) (int, error) { *c += count(len(p)); return len(p), nil }

// What a supervisor sends of an exec is read to an end, whatever it is.
func FuzzExecOutput(f *testing.F) {
	f.Add([]byte(frame(guestapi.FrameStdout, "out") + frame(guestapi.FrameStderr, "err") + frame(guestapi.FrameExit, `{"code":1}`)))
	f.Add([]byte(frame(control.FrameFault, `{"kind":"gone","message":"x"}`)))
	f.Add([]byte("\x11\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, data []byte) {
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // so that a broken stream is not looked into
		conn, other := net.Pipe()
		other.Close()
		var n count
		e := &Exec{c: &Client{}, ctx: ctx, conn: conn, in: bufio.NewReader(bytes.NewReader(data)), stdout: &n, stderr: &n, unhook: func() bool { return true }}
		status, err := e.Wait()
		if err == nil && !strings.Contains(string(data), "\x1f") {
			t.Fatalf("%+v from data without an exit frame", status)
		}
		if int(n) > len(data) {
			t.Fatalf("%d bytes of output from %d", n, len(data))
		}
	})
}

// A status, a fault and an event are read strictly or refused.
func FuzzAnswers(f *testing.F) {
	f.Add(`{"id":"a","state":"running","phases":[{"name":"boot","us":1}]}`)
	f.Add(`{"kind":"refused","code":"not_found","message":"m"}`)
	f.Add(`{"phase":{"name":"boot","us":1}}` + "\n" + `{"ready":true}`)
	f.Fuzz(func(t *testing.T, s string) {
		guestapi.Decode[Status](strings.NewReader(s), control.MaxFault)
		if err := fromFault(control.ReadFault(strings.NewReader(s))); err == nil || err.Error() == "" {
			t.Fatalf("a fault without words from %q", s)
		}
		if err := follow(strings.NewReader(s), func(Phase) {}); err == nil && !strings.Contains(s, "ready") {
			t.Fatalf("ready from %q", s)
		}
	})
}
