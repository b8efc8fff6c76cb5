package server

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

func run(t testing.TB, c *supervisor.Client, in string, argv ...string) (string, guestapi.ExitStatus, error) {
	t.Helper()
	var out bytes.Buffer
	var stdin io.Reader
	if in != "" {
		stdin = strings.NewReader(in)
	}
	status, err := c.Run(t.Context(), guestapi.ExecRequest{Argv: argv}, stdin, &out, &out)
	return out.String(), status, err
}

func TestProgramsRunAndTheirEndIsTold(t *testing.T) {
	r := start(t, rigOptions{guest: honest().play})
	for _, row := range []struct {
		in   string
		argv []string
		want string
		code int
	}{
		{argv: []string{"true"}},
		{argv: []string{"echo", "a", "b"}, want: "a b\n"},
		{argv: []string{"fail"}, want: "no\n", code: 3},
		{in: "over and back", argv: []string{"cat"}, want: "over and back"},
	} {
		out, status, err := run(t, r.client, row.in, row.argv...)
		if err != nil || out != row.want || status.Code != row.code {
			t.Errorf("%v: %q, %+v, %v", row.argv, out, status, err)
		}
	}
	var refused *guestapi.Error
	if _, _, err := run(t, r.client, "", "nope"); !errors.As(err, &refused) || refused.Code != guestapi.CodeNotFound {
		t.Errorf("a program that is not there: %v", err)
	}
}

func TestSignalsReachARunningProgram(t *testing.T) {
	r := start(t, rigOptions{guest: honest().play})
	started := make(chan struct{})
	e, err := r.client.Exec(t.Context(), guestapi.ExecRequest{Argv: []string{"hang"}}, writerFunc(func([]byte) { close(started) }), nil)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		<-started
		if err := e.Signal(context.Background(), 15); err != nil {
			t.Error(err)
		}
	}()
	if status, err := e.Wait(); err != nil || status.Signal != 15 {
		t.Errorf("%+v, %v", status, err)
	}
	if err := e.Signal(t.Context(), 99); err != nil {
		t.Log("a signal after the end:", err) // the fake agent keeps its list
	}
}

type writerFunc func([]byte)

func (f writerFunc) Write(p []byte) (int, error) { f(p); return len(p), nil }

func TestStatusShowsThePhasesAndTheGuest(t *testing.T) {
	r := start(t, rigOptions{guest: honest().play})
	st, err := r.client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, p := range st.Phases {
		names = append(names, p.Name)
	}
	if got := strings.Join(names, " "); got != "spawn qemu boot link prepare" {
		t.Errorf("phases %q", got)
	}
	if st.State != control.Running || st.QEMUPID != os.Getpid() || st.Guest.Kernel != "6.1" || st.Prepare["mount"] != 12 {
		t.Errorf("%+v", st)
	}
}

func TestListComesThroughWhole(t *testing.T) {
	r := start(t, rigOptions{guest: honest().play})
	info, err := r.client.List(t.Context(), guestapi.ListRequest{Path: "/"})
	if err != nil || len(info.Entries) != 2 || info.Entries[1].Name != "b" || !info.Truncated {
		t.Errorf("%+v, %v", info, err)
	}
}

func TestSixtyFourProgramsAtOnceKeepTheirOutputApart(t *testing.T) {
	r := start(t, rigOptions{guest: honest().play})
	wantNoLeak(t, func() {
		var wg sync.WaitGroup
		for i := range 64 {
			wg.Go(func() {
				in := strings.Repeat(fmt.Sprintf("line of %d\n", i), 10_000)
				out, status, err := run(t, r.client, in, "cat")
				if err != nil || out != in || status.Code != 0 {
					t.Errorf("program %d: %d bytes of %d, %+v, %v", i, len(out), len(in), status, err)
				}
			})
		}
		wg.Wait()
	})
}

func TestThousandsOfProgramsInARowLeakNothing(t *testing.T) {
	n := 300
	if os.Getenv("WARREN_SOAK") != "" {
		n = 2000
	}
	r := start(t, rigOptions{guest: honest().play})
	var heap int64
	wantNoLeak(t, func() {
		for i := range n {
			out, _, err := run(t, r.client, "", "echo", fmt.Sprint(i))
			if err != nil || out != fmt.Sprintln(i) {
				t.Fatalf("program %d: %q, %v", i, out, err)
			}
			if i == n/3 {
				runtime.GC()
				heap = heapBytes()
			}
		}
	})
	runtime.GC()
	if now := heapBytes(); now > heap+4<<20 && !underRace {
		t.Errorf("the heap grew from %d to %d bytes", heap, now)
	}
}

// 1 GiB in a soak, a sixteenth of it otherwise: the path is the same.
func TestBytesThroughStdinAndStdoutAreTheSameInBoundedMemory(t *testing.T) {
	size := int64(64 << 20)
	if os.Getenv("WARREN_SOAK") != "" {
		size = 1 << 30
	}
	r := start(t, rigOptions{guest: honest().play})
	sent, got := sha256.New(), sha256.New()
	source := io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{1}), size), sent)
	peak := watchHeap(t)
	began := time.Now()
	status, err := r.client.Run(t.Context(), guestapi.ExecRequest{Argv: []string{"cat"}}, source, got, nil)
	if err != nil || status.Code != 0 {
		t.Fatalf("%+v, %v", status, err)
	}
	t.Logf("%.0f MiB/s", float64(size>>20)/time.Since(began).Seconds())
	if !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
		t.Error("what came back is not what was sent")
	}
	if p := peak(); p > 40<<20 && !underRace { // client, server and fake guest together
		t.Errorf("up to %d bytes of heap in use", p)
	}
}

// watchHeap samples what is in use until it is called.
func watchHeap(t *testing.T) (peak func() int64) {
	stop, done := make(chan struct{}), make(chan int64)
	go func() {
		var most int64
		for {
			select {
			case <-stop:
				done <- most
				return
			case <-time.After(20 * time.Millisecond):
				most = max(most, heapBytes())
			}
		}
	}()
	return func() int64 { close(stop); return <-done }
}

func TestManyCallsAtOnceAllGetTheirAnswer(t *testing.T) {
	r := start(t, rigOptions{guest: honest().play})
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			for range 10 {
				if _, err := supervisor.Do(t.Context(), r.client, guestapi.Hello, guestapi.Empty{}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func TestTooManyProgramsAreRefusedAndTheRestGoesOn(t *testing.T) {
	r := start(t, rigOptions{guest: honest().play})
	var open []*supervisor.Exec
	for {
		e, err := r.client.Exec(t.Context(), guestapi.ExecRequest{Argv: []string{"cat"}, Stdin: true}, nil, nil)
		if err != nil {
			wantErr(t, err, supervisor.ErrBusy, "wait for one to end")
			break
		}
		if open = append(open, e); len(open) > maxOpen {
			t.Fatalf("%d programs at once", len(open))
		}
	}
	if len(open) != maxOpen {
		t.Errorf("%d programs at once, want %d", len(open), maxOpen)
	}
	if _, err := r.client.List(t.Context(), guestapi.ListRequest{Path: "/"}); err != nil {
		t.Errorf("a call beside them: %v", err)
	}
	for _, e := range open {
		e.Close()
	}
	deadline := time.Now().Add(patience)
	for {
		_, _, err := run(t, r.client, "", "true")
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// files is an agent with one file, which can be read and replaced.
func files(content string) (agent, func() string) {
	var mu sync.Mutex
	a := honest()
	a[guestapi.FilePath] = func(req *http.Request, in *bufio.Reader, conn net.Conn) {
		mu.Lock()
		defer mu.Unlock()
		if req.Method == http.MethodPut {
			data, err := io.ReadAll(req.Body)
			if err != nil {
				return
			}
			content = string(data)
			answer(guestapi.Empty{})(req, in, conn)
			return
		}
		fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: %s\r\n\r\n%x\r\n%s\r\n0\r\n", guestapi.ErrorTrailer, len(content), content)
		if strings.HasPrefix(content, "broken") {
			fmt.Fprintf(conn, "%s: {\"code\":\"internal\",\"message\":\"disk\\u001b[31m\"}\r\n", guestapi.ErrorTrailer)
		}
		io.WriteString(conn, "\r\n")
	}
	return a, func() string { mu.Lock(); defer mu.Unlock(); return content }
}

func TestFilesGoBothWays(t *testing.T) {
	a, content := files("old")
	r := start(t, rigOptions{guest: a.play})
	read := func() (string, error) {
		f, err := r.client.ReadFile(t.Context(), "/f", 0, -1)
		if err != nil {
			return "", err
		}
		defer f.Close()
		data, err := io.ReadAll(f)
		return string(data), err
	}
	if got, err := read(); err != nil || got != "old" {
		t.Errorf("%q, %v", got, err)
	}
	big := strings.Repeat("0123456789abcdef", 1<<18)
	if err := r.client.WriteFile(t.Context(), "/f", 0o644, "", strings.NewReader(big)); err != nil || content() != big {
		t.Errorf("wrote %d bytes of %d: %v", len(content()), len(big), err)
	}
	if got, err := read(); err != nil || got != big {
		t.Errorf("read %d bytes of %d: %v", len(got), len(big), err)
	}
	broken := io.MultiReader(strings.NewReader("half"), errReader{})
	if err := r.client.WriteFile(t.Context(), "/f", 0o644, "", broken); err == nil || !strings.Contains(err.Error(), "read what is to be sent: no more") {
		t.Errorf("a source that fails: %v", err)
	}
	if content() != big {
		t.Error("half a file was written")
	}
	// The error comes after the content, and clean.
	if err := r.client.WriteFile(t.Context(), "/f", 0o644, "", strings.NewReader("broken")); err != nil {
		t.Fatal(err)
	}
	if got, err := read(); got != "broken" || err == nil || err.Error() != "disk?[31m" {
		t.Errorf("%q, %v", got, err)
	}
	if err := r.client.WriteFile(t.Context(), "", 0o644, "", strings.NewReader("")); !errors.Is(err, supervisor.ErrBadRequest) {
		t.Errorf("no path: %v", err)
	}
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errors.New("no more") }

func BenchmarkExecTrue(b *testing.B) {
	r := start(b, rigOptions{guest: honest().play}).client
	for b.Loop() {
		if _, err := r.Run(b.Context(), guestapi.ExecRequest{Argv: []string{"true"}}, nil, nil, nil); err != nil {
			b.Fatal(err)
		}
	}
}
