package guest

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
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guest/proc"
	"github.com/warren-vm/warren/internal/guestapi"
)

// reaper collects every child of the test binary, as it does in PID 1.
var reaper *proc.Reaper

func TestMain(m *testing.M) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	// What the test binary was given itself must not look like a leak.
	if err := unix.CloseRange(3, 1<<31, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		panic(err)
	}
	reaper = proc.NewReaper()
	os.Exit(m.Run())
}

// fakeSystem is a machine that only remembers what it was told.
type fakeSystem struct {
	prepareErr error
	prepares   atomic.Int32
	clock      atomic.Int64
	shutdowns  atomic.Int32
	oomAsked   atomic.Int32
	oom        atomic.Bool

	mu     sync.Mutex
	told   []string         // the deeds of a snapshot, in order
	failOn map[string]error // what such a deed gives; a nil error panics
}

// do notes a deed and fails if it shall.
func (s *fakeSystem) do(deed string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.told = append(s.told, deed)
	err, fails := s.failOn[deed]
	if fails && err == nil {
		panic("a fault in " + deed)
	}
	return err
}

func (s *fakeSystem) fail(deed string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failOn = map[string]error{deed: err}
}

func (s *fakeSystem) succeed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failOn = nil
}

// deeds is what was done since it was last asked.
func (s *fakeSystem) deeds() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	told := strings.Join(s.told, " ")
	s.told = nil
	return told
}

func (s *fakeSystem) Freeze() (guestapi.FreezeInfo, error) {
	return guestapi.FreezeInfo{Frozen: true, SettledUS: 7}, s.do("freeze")
}

func (s *fakeSystem) Thaw() error { return s.do("thaw") }

func (s *fakeSystem) Renew(id guestapi.Identity) (guestapi.RenewInfo, error) {
	return guestapi.RenewInfo{
		PhasesUS: map[string]int64{"all": 1},
		Hooks:    []guestapi.HookResult{{Name: "10-keys", Code: 3}},
	}, s.do("renew:" + id.Hostname)
}

func (s *fakeSystem) Prepare(guestapi.Identity) (guestapi.PrepareInfo, error) {
	s.prepares.Add(1)
	return guestapi.PrepareInfo{PhasesUS: map[string]int64{"all": 1}}, s.prepareErr
}

func (s *fakeSystem) SetClock(t time.Time) error { s.clock.Store(t.UnixNano()); return s.do("clock") }
func (s *fakeSystem) Shutdown()                  { s.shutdowns.Add(1) }
func (s *fakeSystem) OOMKilled(int) bool         { s.oomAsked.Add(1); return s.oom.Load() }

// host is the other side of an agent.
type host struct {
	t      *testing.T
	agent  *Agent
	system *fakeSystem
	addr   string
	client *http.Client
}

var runNumber atomic.Int64

// idle starts an agent that was not prepared.
func idle(t *testing.T) *host {
	t.Helper()
	h := &host{t: t, system: &fakeSystem{}, addr: t.TempDir() + "/agent.sock"}
	var err error
	h.agent, err = New(Options{
		ImageID: "image-1", System: h.system, Reaper: reaper, Accounts: proc.NewAccounts("/etc"),
		Log: func(line string) { t.Log("agent: " + line) },
	})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", h.addr)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { h.agent.Serve(l); close(done) }()
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", h.addr)
	}
	h.client = &http.Client{Transport: &http.Transport{DialContext: dial}}
	t.Cleanup(func() {
		h.client.CloseIdleConnections()
		l.Close()
		<-done
		// The log must not be written to after the test.
		eventually(t, "every run has ended", func() bool { return h.agent.runs.count() == 0 })
	})
	return h
}

// ready starts an agent that was prepared.
func ready(t *testing.T) *host {
	t.Helper()
	h := idle(t)
	h.agent.state.Store(statePrepared)
	return h
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never: " + what)
		}
	}
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// do makes one call.
func do[Req, Resp any](h *host, call guestapi.Call[Req, Resp], req Req) (resp Resp, err error) {
	body, err := json.Marshal(req)
	if err != nil {
		return resp, err
	}
	r, err := h.client.Post("http://guest"+call.Path, "application/json", bytes.NewReader(body))
	if err != nil {
		return resp, err
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		return resp, readError(r)
	}
	return guestapi.Decode[Resp](r.Body, call.MaxResponse)
}

// readError reads a refusal, whose status has to be its code's.
func readError(r *http.Response) error {
	e, err := guestapi.Decode[guestapi.Error](r.Body, 64<<10)
	if err != nil {
		return fmt.Errorf("status %d without an error: %w", r.StatusCode, err)
	}
	if e.Code.HTTPStatus() != r.StatusCode {
		return fmt.Errorf("status %d with code %s", r.StatusCode, e.Code)
	}
	return &e
}

func code(err error) guestapi.Code {
	var e *guestapi.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// talk is the host's side of a run.
type talk struct {
	t    *testing.T
	id   string
	conn net.Conn
	r    io.Reader
}

// exec starts a run. The error is the agent's refusal.
func (h *host) exec(req guestapi.ExecRequest) (*talk, error) {
	h.t.Helper()
	if req.ID == "" {
		req.ID = "run-" + strconv.FormatInt(runNumber.Add(1), 10)
	}
	if req.Dir == "" {
		req.Dir = "/"
	}
	conn, err := net.Dial("unix", h.addr)
	ok(h.t, err)
	return converse(h.t, conn, req)
}

// converse starts a run on conn, which it takes over.
func converse(t *testing.T, conn net.Conn, req guestapi.ExecRequest) (*talk, error) {
	t.Helper()
	body, err := json.Marshal(req)
	ok(t, err)
	t.Cleanup(func() { conn.Close() })
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: guest\r\nConnection: Upgrade\r\nUpgrade: %s\r\nContent-Length: %d\r\n\r\n%s",
		guestapi.ExecPath, guestapi.ExecUpgrade, len(body), body)
	br := bufio.NewReader(conn)
	resp, err := http.ReadResponse(br, nil)
	ok(t, err)
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer conn.Close()
		return nil, readError(resp)
	}
	return &talk{t: t, id: req.ID, conn: conn, r: br}, nil
}

// start is exec for a run that must start.
func (h *host) start(req guestapi.ExecRequest) *talk {
	h.t.Helper()
	k, err := h.exec(req)
	ok(h.t, err)
	return k
}

// sh starts a shell script.
func (h *host) sh(script string) *talk {
	h.t.Helper()
	return h.start(guestapi.ExecRequest{Argv: []string{"/bin/sh", "-c", script}})
}

func (k *talk) send(kind guestapi.FrameKind, data []byte) error {
	buf := make([]byte, guestapi.FrameHeader+len(data))
	guestapi.PutFrameHeader(buf, kind, len(data))
	copy(buf[guestapi.FrameHeader:], data)
	_, err := k.conn.Write(buf)
	return err
}

// next reads one frame.
func (k *talk) next() (guestapi.FrameKind, []byte) {
	k.t.Helper()
	ok(k.t, k.conn.SetReadDeadline(time.Now().Add(60*time.Second)))
	kind, data, err := guestapi.ReadFrame(k.r, make([]byte, guestapi.MaxFrame))
	ok(k.t, err)
	return kind, data
}

// until reads output until it holds text, and returns all of it.
func (k *talk) until(text string) string {
	k.t.Helper()
	var all strings.Builder
	for !strings.Contains(all.String(), text) {
		kind, data := k.next()
		if kind == guestapi.FrameExit {
			k.t.Fatalf("ended (%s) before %q, after %q", data, text, all.String())
		}
		all.Write(data)
	}
	return all.String()
}

// result is all that a run gave.
type result struct {
	guestapi.ExitStatus
	out, err []byte
}

// finish reads to the end of the run.
func (k *talk) finish() result {
	k.t.Helper()
	defer k.conn.Close()
	var r result
	for {
		switch kind, data := k.next(); kind {
		case guestapi.FrameStdout:
			r.out = append(r.out, data...)
		case guestapi.FrameStderr:
			r.err = append(r.err, data...)
		case guestapi.FrameExit:
			status, err := guestapi.Decode[guestapi.ExitStatus](bytes.NewReader(data), 4096)
			ok(k.t, err)
			r.ExitStatus = status
			if n, err := k.r.Read(make([]byte, 1)); n != 0 || err == nil {
				k.t.Errorf("something follows the Exit frame: %d, %v", n, err)
			}
			return r
		default:
			k.t.Fatalf("frame of kind %#x", kind)
		}
	}
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

func atoi(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(strings.TrimSpace(s))
	ok(t, err)
	return n
}
