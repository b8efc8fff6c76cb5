package server

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// sink is a client that takes what it gets.
type sink struct {
	net.Conn
	bytes.Buffer
}

func (s *sink) Write(p []byte) (int, error)      { return s.Buffer.Write(p) }
func (s *sink) Read(p []byte) (int, error)       { return 0, io.EOF }
func (s *sink) Close() error                     { return nil }
func (s *sink) SetDeadline(time.Time) error      { return nil }
func (s *sink) SetWriteDeadline(time.Time) error { return nil }

// Whatever a guest sends of an exec, a client sees whole frames of the kinds
// it knows, and nothing that was not sent.
func FuzzExecRelay(f *testing.F) {
	f.Add([]byte(frame(guestapi.FrameStdout, "out") + frame(guestapi.FrameStderr, "") + frame(guestapi.FrameExit, `{"code":1}`)))
	f.Add([]byte(frame(guestapi.FrameExit, `{"code":1,"signal":99}`)))
	f.Add([]byte(frame(control.FrameFault, `{"kind":"gone"}`)))
	f.Add([]byte("\x11\x00\x01\x00\x01"))
	f.Fuzz(func(t *testing.T, data []byte) {
		out := &sink{}
		c := &conversation{client: out, guestIn: bufio.NewReaderSize(bytes.NewReader(data), streamBuffer)}
		err := c.relayOutput()
		buf, exit := make([]byte, guestapi.MaxFrame), false
		for {
			kind, payload, frameErr := guestapi.ReadFrame(&out.Buffer, buf)
			if frameErr == io.EOF {
				break
			}
			if frameErr != nil || exit {
				t.Fatalf("after the relay: %v, after an exit: %v", frameErr, exit)
			}
			switch kind {
			case guestapi.FrameStdout, guestapi.FrameStderr:
				if !bytes.Contains(data, payload) {
					t.Fatalf("%q was never sent", payload)
				}
			case guestapi.FrameExit:
				if _, err := guestapi.Decode[guestapi.ExitStatus](bytes.NewReader(payload), 4096); err != nil {
					t.Fatal(err)
				}
				exit = true
			default:
				t.Fatalf("frame of kind %#x", byte(kind))
			}
		}
		if exit != (err == nil) {
			t.Fatalf("exit %v, error %v", exit, err)
		}
	})
}

// Whatever a guest answers to an exec request, it is a conversation or a
// fault in clean words.
func FuzzExecAnswer(f *testing.F) {
	f.Add([]byte(switching + "rest"))
	f.Add([]byte("HTTP/1.1 404 No\r\nContent-Length: 38\r\n\r\n{\"code\":\"not_found\",\"message\":\"\x1b[31m\"}"))
	f.Add([]byte("HTTP/0.0 101 x\n\n"))
	f.Add([]byte("HTTP/1.1 101 x\r\nUpgrade: h2c\r\n\r\n"))
	f.Add([]byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		life, kill := context.WithCancelCause(context.Background())
		kill(io.ErrClosedPipe) // so that nobody waits for a reason
		vm := &fakeVM{gone: make(chan struct{})}
		s := &server{life: life, machine: vm}
		g := &guest{s: s, link: deadLink{}}
		_, fault := g.upgrade(context.Background(), readConn{&sink{}, bytes.NewReader(data)}, []byte("request"))
		if fault == nil && !(bytes.HasPrefix(data, []byte("HTTP/1.1 ")) && bytes.Contains(data, []byte(guestapi.ExecUpgrade))) {
			t.Fatal("that was no conversation")
		}
		if fault != nil && (fault.Message == "" || guestapi.CleanText(fault.Message) != fault.Message) {
			t.Fatalf("fault %q", fault.Message)
		}
	})
}

type readConn struct {
	*sink
	r io.Reader
}

func (c readConn) Read(p []byte) (int, error) { return c.r.Read(p) }

type deadLink struct{}

func (deadLink) Open(context.Context) (net.Conn, error) { return nil, io.EOF }
func (deadLink) Done() <-chan struct{}                  { return nil }
func (deadLink) Err() error                             { return nil }
func (deadLink) Close() error                           { return nil }

// The console's last lines are always fit for a terminal.
func FuzzConsoleLines(f *testing.F) {
	f.Add("\x1b[31mred\x1b[0m\r\nplain\x1b]0;title\x07\n", "\x1b[")
	f.Fuzz(func(t *testing.T, a, b string) {
		c := newTail()
		c.Write([]byte(a))
		c.Write([]byte(b))
		lines := c.Lines()
		if len(lines) > tailLines {
			t.Fatalf("%d lines", len(lines))
		}
		for _, line := range lines {
			if len(line) > tailWidth+len("…") || guestapi.CleanText(line) != line || bytes.ContainsAny([]byte(line), "\n\r\x1b") {
				t.Fatalf("line %q", line)
			}
		}
		c.Panic()
	})
}
