package server

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/link"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// patience is how long a test waits for what should come soon.
const patience = 60 * time.Second

// fakeVM stands in for QEMU: a socketpair whose other end a test plays.
type fakeVM struct {
	host, guest net.Conn
	console     io.Writer

	mu     sync.Mutex
	reason string
	gone   chan struct{}
}

func newFakeVM(t testing.TB) *fakeVM {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "link")
		if ends[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	return &fakeVM{host: ends[0], guest: ends[1], gone: make(chan struct{})}
}

func (f *fakeVM) Link() net.Conn          { return f.host }
func (f *fakeVM) PID() int                { return os.Getpid() }
func (f *fakeVM) Exited() <-chan struct{} { return f.gone }

func (f *fakeVM) Reason() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.reason
}

// exit is the end of QEMU, which takes its sockets along.
func (f *fakeVM) exit(reason string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.reason == "" {
		f.reason = reason
		f.guest.Close()
		close(f.gone)
	}
}

func (f *fakeVM) Stop(context.Context) error {
	f.exit("the VM was stopped")
	f.host.Close()
	return nil
}

// rig is a server with a fake VM, and a client of it.
type rig struct {
	t      testing.TB
	home   store.Home
	dir    string
	vm     *fakeVM
	client *supervisor.Client
	owner  *os.File // closing it is the end of the owner
	stop   context.CancelFunc
	done   chan error
}

type rigOptions struct {
	guest   func(ctx context.Context, vm *fakeVM) // plays the guest until ctx ends
	change  func(*Options)
	maxWait time.Duration
}

// start runs a server to Ready and connects to it.
func start(t testing.TB, o rigOptions) *rig {
	t.Helper()
	r, err := tryStart(t, o)
	if err != nil {
		t.Fatal(err)
	}
	r.client, err = supervisor.Connect(t.Context(), r.dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.client.Close(context.Background()) })
	return r
}

// tryStart runs a server until it says Ready or a Fault, which is the error.
func tryStart(t testing.TB, o rigOptions) (*rig, error) {
	t.Helper()
	// A sentence in a path makes it longer than a socket address.
	home := store.Home(filepath.Join(t.TempDir(), "warren"))
	dir, err := home.CreateVM("one")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	r := &rig{t: t, home: home, dir: dir.Path, vm: newFakeVM(t), stop: stop, done: make(chan error, 1)}
	ownerR, ownerW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.owner = ownerW
	events, eventsW := io.Pipe()
	guestCtx, endGuest := context.WithCancel(context.Background())
	guestDone := make(chan struct{})
	opts := Options{
		Config: supervisor.Config{
			ID: "one", Dir: dir.Path, ImageID: "image-1",
			Identity: supervisor.Identity{Hostname: "one"}, BootTimeout: patience,
		},
		Dir: dir, Owner: ownerR, Events: eventsW, MaxWait: o.maxWait,
		Launch: func(_ context.Context, _ supervisor.Config, console io.Writer) (Machine, error) {
			r.vm.console = console
			go func() { defer close(guestDone); o.guest(guestCtx, r.vm) }()
			return r.vm, nil
		},
	}
	if o.change != nil {
		o.change(&opts)
	}
	go func() {
		err := Run(ctx, opts)
		eventsW.Close()
		r.done <- err
		close(r.done)
	}()
	t.Cleanup(func() {
		stop()
		ownerW.Close()
		r.waitEnd()
		endGuest()
		r.vm.exit("the test is over") // a VM that was never launched
		select {
		case <-guestDone:
		default:
		}
	})
	return r, readEvents(events)
}

func readEvents(events io.Reader) error {
	dec := json.NewDecoder(events)
	for {
		var e control.Event
		if err := dec.Decode(&e); err != nil {
			return fmt.Errorf("no event: %w", err)
		}
		if e.Fault != nil {
			return e.Fault
		}
		if e.Ready {
			go io.Copy(io.Discard, events)
			return nil
		}
	}
}

// waitEnd waits until Run has returned.
func (r *rig) waitEnd() {
	r.t.Helper()
	select {
	case <-r.done:
	case <-time.After(patience):
		buf := make([]byte, 1<<20)
		r.t.Fatalf("the server does not end\n%s", buf[:runtime.Stack(buf, true)])
	}
}

// wantNothingLeft checks that the VM's folder is gone.
func (r *rig) wantNothingLeft() {
	r.t.Helper()
	wantNothingIn(r.t, r.home)
}

func wantNothingIn(t testing.TB, home store.Home) {
	t.Helper()
	entries, err := os.ReadDir(home.VMsDir())
	if err != nil {
		t.Error(err)
	}
	for _, e := range entries {
		if e.Name() != ".lock" {
			t.Errorf("%s is left", e.Name())
		}
	}
}

// agent plays a guest's side of the link, one handler for each path. Hello
// and Prepare are answered as they should be unless a handler says otherwise.
type agent map[string]func(req *http.Request, body *bufio.Reader, conn net.Conn)

// play serves the link until ctx ends.
func (a agent) play(ctx context.Context, vm *fakeVM) {
	link.Serve(ctx, vm.guest, a.serveAll)
}

func (a agent) serveAll(s *link.Session) {
	for {
		conn, err := s.Accept()
		if err != nil {
			return
		}
		go a.serve(conn)
	}
}

func (a agent) serve(conn net.Conn) {
	defer conn.Close()
	in := bufio.NewReaderSize(conn, 64<<10)
	for {
		req, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		handle := a[req.URL.Path]
		switch {
		case handle != nil:
			handle(req, in, conn)
			if req.URL.Path == guestapi.ExecPath {
				return
			}
		case req.URL.Path == guestapi.Hello.Path:
			answer(guestapi.HelloInfo{Protocol: guestapi.Protocol, ImageID: "image-1", Kernel: "6.1"})(req, in, conn)
		case req.URL.Path == guestapi.Prepare.Path:
			answer(guestapi.PrepareInfo{PhasesUS: map[string]int64{"mount": 12}})(req, in, conn)
		default:
			refuse(guestapi.CodeNotFound, "no such call")(req, in, conn)
		}
		io.Copy(io.Discard, req.Body)
	}
}

func answer(v any) func(*http.Request, *bufio.Reader, net.Conn) {
	data, _ := json.Marshal(v)
	return raw("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: " + fmt.Sprint(len(data)) + "\r\n\r\n" + string(data))
}

func refuse(code guestapi.Code, message string) func(*http.Request, *bufio.Reader, net.Conn) {
	data, _ := json.Marshal(guestapi.Error{Code: code, Message: message})
	return raw(fmt.Sprintf("HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s", code.HTTPStatus(), len(data), data))
}

// raw answers with bytes as they are.
func raw(s string) func(*http.Request, *bufio.Reader, net.Conn) {
	return func(req *http.Request, _ *bufio.Reader, conn net.Conn) {
		io.Copy(io.Discard, req.Body)
		io.WriteString(conn, s)
	}
}

const switching = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: warren-exec\r\n\r\n"

// frame is one exec frame as bytes.
func frame(kind guestapi.FrameKind, payload string) string {
	b := make([]byte, guestapi.FrameHeader, guestapi.FrameHeader+len(payload))
	guestapi.PutFrameHeader(b, kind, len(payload))
	return string(append(b, payload...))
}

// honest is an agent with a few programs: true, cat, echo, hang (which ends
// only by Signal) and fail.
func honest() agent {
	var mu sync.Mutex
	hanging := map[string]chan int{}
	return agent{
		guestapi.ExecPath: func(req *http.Request, in *bufio.Reader, conn net.Conn) {
			run, err := guestapi.Decode[guestapi.ExecRequest](req.Body, guestapi.MaxExecRequest)
			if err != nil {
				return
			}
			out := &bytes.Buffer{}
			out.WriteString(switching)
			exit := frame(guestapi.FrameExit, `{"code":0}`)
			switch run.Argv[0] {
			case "true":
			case "echo":
				out.WriteString(frame(guestapi.FrameStdout, strings.Join(run.Argv[1:], " ")+"\n"))
			case "fail":
				out.WriteString(frame(guestapi.FrameStderr, "no\n"))
				exit = frame(guestapi.FrameExit, `{"code":3}`)
			case "cat":
				conn.Write(out.Bytes())
				out.Reset()
				cat(in, conn)
			case "hang":
				ch := make(chan int, 1)
				mu.Lock()
				hanging[run.ID] = ch
				mu.Unlock()
				out.WriteString(frame(guestapi.FrameStdout, "hanging\n"))
				conn.Write(out.Bytes())
				out.Reset()
				if exit = waitSignal(in, ch); exit == "" {
					return
				}
			default:
				refuse(guestapi.CodeNotFound, run.Argv[0]+": no such program")(req, in, conn)
				return
			}
			out.WriteString(exit)
			conn.Write(out.Bytes())
		},
		guestapi.Signal.Path: func(req *http.Request, in *bufio.Reader, conn net.Conn) {
			s, err := guestapi.Decode[guestapi.SignalRequest](req.Body, guestapi.Signal.MaxRequest)
			mu.Lock()
			ch := hanging[s.ID]
			mu.Unlock()
			if err != nil || ch == nil {
				refuse(guestapi.CodeNotFound, "no such exec")(req, in, conn)
				return
			}
			ch <- s.Signal
			answer(guestapi.Empty{})(req, in, conn)
		},
		guestapi.List.Path: answer(guestapi.ListInfo{Entries: []guestapi.FileInfo{{Name: "a", Type: "file"}, {Name: "b", Type: "dir"}}, Truncated: true}),
	}
}

// waitSignal is the exit frame that a signal leads to, or "" when the
// conversation ends first.
func waitSignal(in io.Reader, signal <-chan int) string {
	gone := make(chan struct{})
	go func() { io.Copy(io.Discard, in); close(gone) }()
	select {
	case sig := <-signal:
		return frame(guestapi.FrameExit, fmt.Sprintf(`{"code":0,"signal":%d}`, sig))
	case <-gone:
		return ""
	}
}

// cat returns stdin frames as stdout frames until the end of stdin.
func cat(in io.Reader, conn net.Conn) {
	buf := make([]byte, guestapi.FrameHeader+guestapi.MaxFrame)
	for {
		kind, p, err := guestapi.ReadFrame(in, buf[guestapi.FrameHeader:])
		if err != nil || kind == guestapi.FrameStdinEnd {
			return
		}
		guestapi.PutFrameHeader(buf, guestapi.FrameStdout, len(p))
		if _, err := conn.Write(buf[:guestapi.FrameHeader+len(p)]); err != nil {
			return
		}
	}
}

// wantErr checks an error's kind and text.
func wantErr(t testing.TB, err error, kind error, text string) {
	t.Helper()
	if !errors.Is(err, kind) || !strings.Contains(err.Error(), text) {
		t.Errorf("error %q (%T), want %v with %q", fmt.Sprint(err), err, kind, text)
	}
}

// wantNoLeak runs f and checks that goroutines and descriptors are back to
// where they were.
func wantNoLeak(t testing.TB, f func()) {
	t.Helper()
	goroutines, fds := runtime.NumGoroutine(), openFDs()
	f()
	deadline := time.Now().Add(patience)
	for runtime.NumGoroutine() > goroutines || openFDs() > fds {
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			t.Fatalf("goroutines %d, were %d; descriptors %d, were %d\n%s",
				runtime.NumGoroutine(), goroutines, openFDs(), fds, buf[:runtime.Stack(buf, true)])
		}
		time.Sleep(10 * time.Millisecond)
	}
}
