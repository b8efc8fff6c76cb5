package server

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// hang starts a program that does not end and returns how it went.
func hang(t *testing.T, r *rig) <-chan error {
	t.Helper()
	e, err := r.client.Exec(t.Context(), guestapi.ExecRequest{Argv: []string{"hang"}}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := e.Wait()
		ended <- err
	}()
	return ended
}

func soon[T any](t *testing.T, ch <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-ch:
	case <-time.After(patience):
		t.Fatal("it does not happen")
	}
	return v
}

func TestEveryCallInFlightEndsWithTheVMsReason(t *testing.T) {
	for _, row := range []struct {
		name string
		end  func(r *rig)
		want string
	}{
		{"killed", func(r *rig) { r.vm.exit("QEMU was killed by signal 9") }, "the VM ended: QEMU was killed by signal 9"},
		{"panicked", func(r *rig) {
			io.WriteString(r.vm.console, "[ 1.0] \x1b[1mKernel panic - not syncing: Attempted to kill init!\r\n"+strings.Repeat("[ 1.1] one line of the trace\r\n", 100))
			r.vm.exit("the guest restarted itself")
		}, "the VM ended: the guest's kernel gave up: Kernel panic - not syncing: Attempted to kill init!"},
		{"link closed", func(r *rig) { r.vm.guest.Close() }, "the VM ended: the guest broke the link"},
		{"owner gone", func(r *rig) { r.owner.Close() }, "the VM ended: the process that started it ended"},
		{"supervisor told", func(r *rig) { r.stop() }, "the VM ended: its supervisor was told to stop"},
	} {
		t.Run(row.name, func(t *testing.T) {
			a := honest()
			block := make(chan struct{})
			defer close(block)
			a[guestapi.Remove.Path] = func(*http.Request, *bufio.Reader, net.Conn) { <-block }
			r := start(t, rigOptions{guest: a.play, maxWait: 10 * time.Second})
			program := hang(t, r)
			call := make(chan error, 1)
			go func() {
				call <- r.client.Remove(context.Background(), guestapi.RemoveRequest{Path: "/x"})
			}()
			time.Sleep(50 * time.Millisecond) // most likely both are on their way
			row.end(r)
			for _, ended := range []<-chan error{program, call} {
				wantErr(t, soon(t, ended), supervisor.ErrGone, row.want)
			}
			soon(t, r.client.Gone())
			wantErr(t, r.client.Err(), supervisor.ErrGone, row.want)
			r.waitEnd()
			r.wantNothingLeft()
			// And so do calls that come later.
			wantErr(t, r.client.Remove(t.Context(), guestapi.RemoveRequest{Path: "/x"}), supervisor.ErrGone, row.want)
		})
	}
}

func TestStopAsksTheGuestFirstAndPullsThePlugWhenItDoesNothing(t *testing.T) {
	for _, row := range []struct {
		name  string
		guest func(r **rig) func(*http.Request, *bufio.Reader, net.Conn)
	}{
		{"obedient", func(r **rig) func(*http.Request, *bufio.Reader, net.Conn) {
			return func(req *http.Request, in *bufio.Reader, conn net.Conn) {
				answer(guestapi.Empty{})(req, in, conn)
				go (*r).vm.exit("the guest switched itself off")
			}
		}},
		{"says yes and does nothing", func(**rig) func(*http.Request, *bufio.Reader, net.Conn) { return answer(guestapi.Empty{}) }},
		{"says no", func(**rig) func(*http.Request, *bufio.Reader, net.Conn) {
			return refuse(guestapi.CodeInternal, "I would rather not")
		}},
		{"says nothing", func(**rig) func(*http.Request, *bufio.Reader, net.Conn) {
			return func(_ *http.Request, in *bufio.Reader, _ net.Conn) { io.Copy(io.Discard, in) }
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			var r *rig
			asked := make(chan struct{})
			var once sync.Once
			a := honest()
			a[guestapi.Shutdown.Path] = func(req *http.Request, in *bufio.Reader, conn net.Conn) {
				once.Do(func() { close(asked) })
				row.guest(&r)(req, in, conn)
			}
			r = start(t, rigOptions{guest: a.play, maxWait: silenceWait})
			program := hang(t, r)
			if err := r.client.Stop(t.Context()); err != nil {
				t.Fatal(err)
			}
			soon(t, asked)
			wantErr(t, soon(t, program), supervisor.ErrGone, "it was stopped")
			r.waitEnd()
			r.wantNothingLeft()
			if err := r.client.Stop(t.Context()); err != nil {
				t.Errorf("stopping again: %v", err)
			}
		})
	}
}

func TestKillDoesNotAskTheGuest(t *testing.T) {
	a := honest()
	a[guestapi.Shutdown.Path] = func(*http.Request, *bufio.Reader, net.Conn) { t.Error("the guest was asked") }
	r := start(t, rigOptions{guest: a.play})
	if err := r.client.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.waitEnd()
	r.wantNothingLeft()
}

func TestKillOvertakesAStopThatTakesItsTime(t *testing.T) {
	a := honest()
	asked := make(chan struct{})
	a[guestapi.Shutdown.Path] = func(_ *http.Request, in *bufio.Reader, _ net.Conn) {
		close(asked)
		io.Copy(io.Discard, in)
	}
	r := start(t, rigOptions{guest: a.play, maxWait: 10 * time.Minute})
	stopped := make(chan error, 1)
	go func() { stopped <- r.client.Stop(context.Background()) }()
	soon(t, asked)
	if err := r.client.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := soon(t, stopped); err != nil {
		t.Error(err)
	}
}

// The fake agent hangs until its conversation ends, and tells.
func TestAClientThatHangsUpEndsItsStreamAlone(t *testing.T) {
	ended := make(chan struct{})
	a := honest()
	a[guestapi.ExecPath] = func(_ *http.Request, in *bufio.Reader, conn net.Conn) {
		io.WriteString(conn, switching)
		io.Copy(io.Discard, in)
		close(ended)
	}
	r := start(t, rigOptions{guest: a.play})
	ctx, cancel := context.WithCancelCause(t.Context())
	e, err := r.client.Exec(ctx, guestapi.ExecRequest{Argv: []string{"x"}, Stdin: true}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	why := errors.New("enough")
	time.AfterFunc(10*time.Millisecond, func() { cancel(why) })
	if _, err := e.Wait(); err != why {
		t.Errorf("error %v", err)
	}
	soon(t, ended)
	if err := r.client.Err(); err != nil {
		t.Errorf("and took the VM along: %v", err)
	}
}

// Nothing reads what the client sends: the supervisor's write is stuck when
// the client goes.
func TestAClientThatHangsUpIsNoticedBehindAFullStdin(t *testing.T) {
	a := honest()
	free := make(chan struct{})
	defer close(free)
	a[guestapi.ExecPath] = func(_ *http.Request, _ *bufio.Reader, conn net.Conn) {
		io.WriteString(conn, switching)
		<-free
	}
	r := start(t, rigOptions{guest: a.play})
	e, err := r.client.Exec(t.Context(), guestapi.ExecRequest{Argv: []string{"x"}, Stdin: true}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	stuck := make(chan error, 1)
	go func() {
		_, err := io.Copy(e.Stdin(), zeros{})
		stuck <- err
	}()
	time.Sleep(300 * time.Millisecond)
	if st, err := r.client.Status(t.Context()); err != nil || st.Streams != 1 {
		t.Fatalf("%+v, %v", st, err)
	}
	e.Close()
	soon(t, stuck)
	deadline := time.Now().Add(patience)
	for {
		st, err := r.client.Status(t.Context())
		if err == nil && st.Streams == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the stream stays: %+v, %v", st, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// What has crossed the link when the VM ends is delivered, also to a client
// that is slow to read.
func TestOutputThatCameBeforeTheEndIsDelivered(t *testing.T) {
	sent := make(chan struct{})
	a := honest()
	a[guestapi.ExecPath] = func(_ *http.Request, in *bufio.Reader, conn net.Conn) {
		io.WriteString(conn, switching+strings.Repeat(frame(guestapi.FrameStdout, strings.Repeat("x", 1000)), 200))
		close(sent)
		io.Copy(io.Discard, in)
	}
	r := start(t, rigOptions{guest: a.play})
	go func() {
		<-sent
		// The link keeps the order: with this answer the output has arrived.
		if _, err := r.client.List(context.Background(), guestapi.ListRequest{Path: "/"}); err != nil {
			t.Error(err)
		}
		r.vm.exit("QEMU was killed")
	}()
	n := 0
	_, err := r.client.Run(t.Context(), guestapi.ExecRequest{Argv: []string{"x"}}, nil, writerFunc(func(p []byte) {
		<-r.vm.gone
		n += len(p)
	}), nil)
	wantErr(t, err, supervisor.ErrGone, "QEMU was killed")
	if n != 200_000 {
		t.Errorf("%d bytes of 200000", n)
	}
}

func TestAVMThatMayOutliveItsStarterIsFoundByItsReason(t *testing.T) {
	outlive := func(o *Options) { o.Owner.Close(); o.Owner = nil; o.Config.Outlive = true }
	r := start(t, rigOptions{guest: honest().play, change: outlive})
	r.owner.Close()
	if out, _, err := run(t, r.client, "", "echo", "still here"); err != nil || out != "still here\n" {
		t.Fatalf("%q, %v", out, err)
	}
	again, err := supervisor.Connect(t.Context(), r.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close(t.Context())
	r.vm.exit("QEMU was killed by signal 9")
	soon(t, again.Gone())
	r.waitEnd()
	if _, err := supervisor.Connect(t.Context(), r.dir); err == nil || !strings.Contains(err.Error(), "the VM ended: QEMU was killed by signal 9") {
		t.Errorf("connect after the end: %v", err)
	}
	if swept, err := r.home.Sweep(t.Context()); err != nil || len(swept.Removed) != 1 {
		t.Errorf("%+v, %v", swept, err)
	}
	r.wantNothingLeft()
}

func TestSweepsPassALivingVMBy(t *testing.T) {
	r := start(t, rigOptions{guest: honest().play})
	if swept, err := r.home.Sweep(t.Context()); err != nil || len(swept.Removed) != 0 {
		t.Errorf("%+v, %v", swept, err)
	}
	rec, err := store.ReadRecord(r.dir)
	if err != nil || rec.Supervisor.PID != os.Getpid() || rec.QEMU.PID != os.Getpid() {
		t.Errorf("%+v, %v", rec, err)
	}
}

func TestTheSocketIsPrivateAndItsPathMayBeLong(t *testing.T) {
	deep := filepath.Join(t.TempDir(), strings.Repeat("a-long-name/", 12))
	home := store.Home(deep)
	dir, err := home.CreateVM("one")
	if err != nil {
		t.Fatal(err)
	}
	l, err := control.Listen(dir.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	info, err := os.Stat(dir.Control())
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	go func() {
		if c, err := l.Accept(); err == nil {
			fmt.Fprint(c, "hello")
			c.Close()
		}
	}()
	c, err := control.Dial(t.Context(), dir.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if data, err := io.ReadAll(c); err != nil || string(data) != "hello" {
		t.Errorf("%q, %v", data, err)
	}
	if err := dir.Remove(); err != nil {
		t.Error(err)
	}
}

func TestAWholeLifeLeaksNothing(t *testing.T) {
	wantNoLeak(t, func() {
		t.Run("life", func(t *testing.T) {
			r := start(t, rigOptions{guest: honest().play})
			for range 3 {
				if _, _, err := run(t, r.client, "x", "cat"); err != nil {
					t.Fatal(err)
				}
			}
			r.owner.Close()
			r.waitEnd()
			r.wantNothingLeft()
		})
	})
}
