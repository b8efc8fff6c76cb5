package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const greeting = `{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian"}, "capabilities": ["oob"]}}` + "\r\n"

// pair returns both ends of a socket.
func pair(t *testing.T) (ours, theirs *net.UnixConn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = c.(*net.UnixConn)
	}
	t.Cleanup(func() { ends[0].Close(); ends[1].Close() })
	return ends[0], ends[1]
}

type request struct {
	Execute   string
	Arguments json.RawMessage
	ID        uint64
}

// fake answers each command with what answer returns, newline added; an empty
// string is no answer.
func fake(t *testing.T, conn *net.UnixConn, answer func(request) string) {
	t.Helper()
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		io.WriteString(conn, greeting)
		in := bufio.NewScanner(conn)
		for in.Scan() {
			var r request
			if err := json.Unmarshal(in.Bytes(), &r); err != nil {
				t.Errorf("client sent %q", in.Bytes())
				return
			}
			out := fmt.Sprintf(`{"return": {}, "id": %d}`, r.ID)
			if r.Execute != "qmp_capabilities" {
				out = answer(r)
			}
			if out != "" {
				io.WriteString(conn, out+"\r\n")
			}
		}
	}()
	t.Cleanup(func() { conn.Close(); wg.Wait() })
}

func ok(id uint64, ret string) string { return fmt.Sprintf(`{"return": %s, "id": %d}`, ret, id) }

// dial connects to a fake and checks that nothing is left when the test ends.
func dial(t *testing.T, answer func(request) string) (*Client, *net.UnixConn) {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() { noMoreGoroutines(t, before) })
	ours, theirs := pair(t)
	fake(t, theirs, answer)
	c, err := New(t.Context(), ours)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c, theirs
}

func noMoreGoroutines(t *testing.T, before int) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			buf := make([]byte, 64<<10)
			t.Errorf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
			return
		}
	}
}

func TestACommandGetsItsOwnAnswer(t *testing.T) {
	// Given a QEMU that answers pairs of commands the wrong way round.
	var held string
	c, _ := dial(t, func(r request) string {
		mine := ok(r.ID, string(r.Arguments))
		if held == "" {
			held = mine
			return ""
		}
		out := mine + "\n" + held
		held = ""
		return out
	})
	// When many ask at once, each sees its own answer.
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			var got struct{ N int }
			if err := c.Do(t.Context(), "echo", map[string]int{"n": i}, &got); err != nil || got.N != i {
				t.Errorf("asked %d, got %d, %v", i, got.N, err)
			}
		})
	}
	wg.Wait()
	if v := c.Version(); v.String() != "7.2.22" || !v.AtLeast(7, 2) || v.AtLeast(7, 3) || v.AtLeast(8, 0) {
		t.Errorf("version %v", v)
	}
}

func TestARefusalIsAnErrorWithCleanText(t *testing.T) {
	c, _ := dial(t, func(r request) string {
		return fmt.Sprintf(`{"id": %d, "error": {"class": "GenericError", "desc": "no\u001b[31m such\nthing"}}`, r.ID)
	})
	err := c.Do(t.Context(), "device_add", nil, nil)
	var refused *Error
	if !errors.As(err, &refused) || refused.Class != "GenericError" {
		t.Fatalf("got %v", err)
	}
	if want := "device_add: qemu: no?[31m such thing"; err.Error() != want {
		t.Errorf("got %q, want %q", err, want)
	}
	// The connection goes on.
	if c.Err() != nil {
		t.Errorf("connection ended: %v", c.Err())
	}
}

func TestACommandThatIsNotAnsweredEndsWithItsContext(t *testing.T) {
	var late string
	c, _ := dial(t, func(r request) string {
		if r.Execute == "slow" {
			late = ok(r.ID, `{}`)
			return ""
		}
		return late + "\n" + ok(r.ID, `{"v": 1}`)
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := c.Do(ctx, "slow", nil, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
	// The late answer confuses nobody.
	var got struct{ V int }
	if err := c.Do(t.Context(), "next", nil, &got); err != nil || got.V != 1 {
		t.Fatalf("got %v, %v", got, err)
	}
}

func TestEveryoneIsToldWhenQEMUEnds(t *testing.T) {
	asked := make(chan struct{}, 2)
	c, theirs := dial(t, func(request) string { asked <- struct{}{}; return "" })
	sub := c.Subscribe("SHUTDOWN")
	errs := make(chan error, 2)
	for range 2 {
		go func() { errs <- c.Do(t.Context(), "wait", nil, nil) }()
	}
	<-asked
	<-asked
	theirs.Close()
	for range 2 {
		if err := <-errs; !errors.Is(err, ErrClosed) {
			t.Errorf("got %v", err)
		}
	}
	if _, open := <-sub.Events(); open {
		t.Error("the subscription is still open")
	}
	<-c.Done()
	if !errors.Is(c.Err(), ErrGone) {
		t.Errorf("ended by %v", c.Err())
	}
	if err := c.Do(t.Context(), "more", nil, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("after the end: %v", err)
	}
	if _, open := <-c.Subscribe("X").Events(); open {
		t.Error("a subscription after the end is open")
	}
}

func TestAnEventFloodCostsNothingButEvents(t *testing.T) {
	c, theirs := dial(t, func(r request) string { return ok(r.ID, "{}") })
	flooded := c.Subscribe("NOISE")
	quiet := c.Subscribe("SHUTDOWN")
	const n = 5000
	for range n {
		io.WriteString(theirs, `{"event": "NOISE", "data": {"x": 1}, "timestamp": {"seconds": 1, "microseconds": 2}}`+"\n")
	}
	io.WriteString(theirs, `{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-reset"}, "timestamp": {"seconds": 5, "microseconds": 0}}`+"\n")
	e := <-quiet.Events()
	if e.Name != "SHUTDOWN" || e.Time.Unix() != 5 || !strings.Contains(string(e.Data), "guest-reset") {
		t.Errorf("got %+v", e)
	}
	if got := flooded.Lost(); got != n-eventQueue {
		t.Errorf("%d lost, want %d", got, n-eventQueue)
	}
	if err := c.Do(t.Context(), "still-there", nil, nil); err != nil {
		t.Error(err)
	}
	flooded.Close()
	flooded.Close()
	for range flooded.Events() {
	}
}

func TestHostileBytesEndTheConnection(t *testing.T) {
	for _, c := range []struct{ name, bytes, want string }{
		{"not JSON", "hello\x1b[2J\n", "not a QMP message"},
		{"endless line", strings.Repeat("x", MaxLine+64<<10), "a line of more than"},
		{"deep nesting", strings.Repeat("[", 100_000) + "\n", "not a QMP message"},
		{"nothing known", "{}\n", "a message that is 0 of"},
		{"two kinds", `{"return": {}, "event": "X", "id": 1}` + "\n", "a message that is 2 of"},
		{"no id", `{"return": {}}` + "\n", "an answer without an id"},
		{"negative id", `{"return": {}, "id": -1}` + "\n", "not a QMP message"},
		{"second greeting", greeting, "a second greeting"},
		{"cannot read us", `{"error": {"class": "GenericError", "desc": "JSON parse error"}}` + "\n", "QEMU cannot read it"},
	} {
		t.Run(c.name, func(t *testing.T) {
			client, theirs := dial(t, func(request) string { return "" })
			io.WriteString(theirs, c.bytes)
			select {
			case <-client.Done():
			case <-time.After(20 * time.Second):
				t.Fatal("still open")
			}
			err := client.Err()
			if !errors.Is(err, ErrClosed) || !strings.Contains(err.Error(), c.want) || strings.ContainsRune(err.Error(), 0x1b) {
				t.Errorf("got %q, want it to say %q", err, c.want)
			}
		})
	}
}

func TestNoGreetingIsAnErrorInTime(t *testing.T) {
	for _, c := range []struct{ name, bytes, want string }{
		{"silence", "", "context deadline exceeded"},
		{"end", "\x00EOF", "QEMU closed it"},
		{"something else", "HTTP/1.1 200 OK\n", "not a QMP message"},
		{"an event first", `{"event": "X"}` + "\n", "not a QMP greeting"},
		{"no version", `{"QMP": {}}` + "\n", "greeting without a version"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := runtime.NumGoroutine()
			ours, theirs := pair(t)
			if c.bytes == "\x00EOF" {
				theirs.Close()
			} else {
				io.WriteString(theirs, c.bytes)
			}
			ctx := t.Context()
			if c.name == "silence" {
				var cancel func()
				ctx, cancel = context.WithTimeout(ctx, 20*time.Millisecond)
				defer cancel()
			}
			if _, err := New(ctx, ours); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want it to say %q", err, c.want)
			}
			noMoreGoroutines(t, before)
		})
	}
}

func TestDescriptorsArriveWithTheirCommand(t *testing.T) {
	before := runtime.NumGoroutine()
	t.Cleanup(func() { noMoreGoroutines(t, before) })
	ours, theirs := pair(t)
	got := make(chan string, 1)
	go func() {
		io.WriteString(theirs, greeting)
		buf, oob := make([]byte, 4096), make([]byte, 256)
		theirs.ReadMsgUnix(buf, oob)
		io.WriteString(theirs, ok(1, "{}")+"\n")
		n, oobn, _, _, err := theirs.ReadMsgUnix(buf, oob)
		if err != nil {
			got <- err.Error()
			return
		}
		msgs, _ := syscall.ParseSocketControlMessage(oob[:oobn])
		if len(msgs) != 1 {
			got <- fmt.Sprintf("%d control messages", len(msgs))
			return
		}
		fds, _ := syscall.ParseUnixRights(&msgs[0])
		f := os.NewFile(uintptr(fds[0]), "passed")
		text, _ := io.ReadAll(f)
		f.Close()
		got <- string(text) + string(buf[:n])
		io.WriteString(theirs, ok(2, "{}")+"\n")
	}()
	c, err := New(t.Context(), ours)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	io.WriteString(w, "state;")
	w.Close()
	path, err := c.AddFD(t.Context(), 7, r)
	if err != nil || path != "/dev/fdset/7" {
		t.Fatalf("%q, %v", path, err)
	}
	if text := <-got; !strings.HasPrefix(text, `state;{"execute":"add-fd","arguments":{"fdset-id":7},"id":2}`) {
		t.Errorf("QEMU saw %q", text)
	}
}

// FuzzDecode holds: no line makes the decoder panic, and what it lets through
// is exactly one kind of message with clean texts.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{
		strings.TrimSpace(greeting),
		`{"return": {}, "id": 1}`,
		`{"error": {"class": "GenericError", "desc": "x"}, "id": 2}`,
		`{"event": "SHUTDOWN", "data": {"guest": true}, "timestamp": {"seconds": 1, "microseconds": 2}}`,
		`{"return": null, "id": 3}`, `[]`, `null`, `{"QMP": null}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		m, err := decode(line)
		if err != nil {
			return
		}
		kinds := 0
		for _, is := range []bool{m.greeting != nil, m.event != nil, m.ret != nil, m.err != nil} {
			if is {
				kinds++
			}
		}
		if kinds != 1 {
			t.Fatalf("%d kinds in %q", kinds, line)
		}
		if m.err != nil && strings.ContainsAny(m.err.Desc+m.err.Class, "\x1b\x00\n\r\x07") {
			t.Fatalf("unclean text in %q", m.err.Desc)
		}
	})
}
