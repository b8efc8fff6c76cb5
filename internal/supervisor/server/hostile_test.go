package server

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/link"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// noise is endless random bytes, the same for every test.
func noise() io.Reader { return rand.NewChaCha8([32]byte{7}) }

func TestAGuestThatDoesNotGetReadyIsAnErrorThatSaysWhatItsConsoleShowed(t *testing.T) {
	for _, row := range []struct {
		name  string
		guest func(context.Context, *fakeVM)
		want  []string
	}{
		{"silent", func(_ context.Context, vm *fakeVM) {
			io.WriteString(vm.console, "SeaBIOS\r\n\x1b[2J\x1b[31mBooting\x1b[0m from ROM..\tx\r\n")
			io.Copy(io.Discard, vm.guest)
		}, []string{"did not get ready within 1s", "the last lines of its console:\n  SeaBIOS\n  Booting from ROM.. x"}},
		{"silent and blank", func(_ context.Context, vm *fakeVM) { io.Copy(io.Discard, vm.guest) },
			[]string{"did not get ready within 1s", "its console shows nothing"}},
		{"garbage", func(_ context.Context, vm *fakeVM) {
			go io.Copy(io.Discard, vm.guest)
			io.Copy(vm.guest, noise())
		}, []string{"did not get ready within 1s"}},
		{"dies", func(_ context.Context, vm *fakeVM) {
			io.WriteString(vm.console, "Kernel panic - not syncing: VFS: Unable to mount root fs\n")
			vm.exit("the guest restarted itself")
		}, []string{"the VM ended while it booted", "Kernel panic - not syncing: VFS"}},
		{"dies without a word", func(_ context.Context, vm *fakeVM) { vm.exit("QEMU ended with code 1: no RAM") },
			[]string{"the VM ended while it booted: QEMU ended with code 1: no RAM"}},
		{"console flood", func(_ context.Context, vm *fakeVM) {
			for range 100 {
				vm.console.Write(bytes.Repeat([]byte("\x1b]0;title\x07\xff"), 10_000))
			}
			vm.exit("QEMU was killed")
		}, []string{"QEMU was killed"}},
		{"another protocol", agent{guestapi.Hello.Path: answer(guestapi.HelloInfo{Protocol: 3, ImageID: "image-1"})}.play,
			[]string{fmt.Sprintf("speaks protocol 3, this program %d", guestapi.Protocol), "kosa8 image build"}},
		{"another image", agent{guestapi.Hello.Path: answer(guestapi.HelloInfo{Protocol: guestapi.Protocol, ImageID: "image\x1b[2J"})}.play,
			[]string{`its image is "image?[2J", but its manifest says "image-1"`, "kosa8 image build"}},
		{"prepared before", agent{guestapi.Hello.Path: answer(guestapi.HelloInfo{Protocol: guestapi.Protocol, ImageID: "image-1", Prepared: true})}.play,
			[]string{"has an identity already"}},
		{"cannot prepare", agent{guestapi.Prepare.Path: refuse(guestapi.CodeNoSpace, "no room on the data disk")}.play,
			[]string{"prepare the guest: no room on the data disk"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			wantNoLeak(t, func() {
				t.Run("start", func(t *testing.T) {
					r, err := tryStart(t, rigOptions{guest: row.guest, change: func(o *Options) {
						if strings.Contains(row.want[0], "within 1s") {
							o.Config.BootTimeout = time.Second
						}
					}})
					if err == nil {
						t.Fatal("it started")
					}
					for _, want := range row.want {
						if !strings.Contains(err.Error(), want) {
							t.Errorf("error %q, want %q in it", err, want)
						}
					}
					if !isClean(err) || len(err.Error()) > 8<<10 {
						t.Errorf("error of %d bytes: %q", len(err.Error()), err)
					}
					r.waitEnd()
					r.wantNothingLeft()
				})
			})
		})
	}
}

func TestAStartCanBeGivenUp(t *testing.T) {
	r, err := tryStart(t, rigOptions{
		guest: func(_ context.Context, vm *fakeVM) { io.Copy(io.Discard, vm.guest) },
		change: func(o *Options) {
			launch, owner := o.Launch, o.Owner
			o.Launch = func(ctx context.Context, c supervisor.Config, w io.Writer) (Machine, error) {
				time.AfterFunc(50*time.Millisecond, func() { owner.Close() })
				return launch(ctx, c, w)
			}
		},
	})
	if err == nil || !strings.Contains(err.Error(), "the start was given up: the process that started it ended") {
		t.Errorf("error %v", err)
	}
	r.waitEnd()
	r.wantNothingLeft()
}

// isClean is true for an error that may go to a terminal.
func isClean(err error) bool { return err == nil || guestapi.CleanText(err.Error()) == err.Error() }

// silenceWait is the deadline of a guest that says nothing, where a test
// needs one to pass.
const silenceWait = 3 * time.Second

// rowWait is the longest wait of a row: short only where nothing will come.
func rowWait(kind error) time.Duration {
	if kind == supervisor.ErrGuestSilent {
		return silenceWait
	}
	return patience
}

// endless writes s again and again until the reader goes.
func endless(head, s string) func(*http.Request, *bufio.Reader, net.Conn) {
	return func(req *http.Request, _ *bufio.Reader, conn net.Conn) {
		io.Copy(io.Discard, req.Body)
		if _, err := io.WriteString(conn, head); err != nil {
			return
		}
		block := []byte(strings.Repeat(s, 1+32<<10/len(s)))
		for {
			if _, err := conn.Write(block); err != nil {
				return
			}
		}
	}
}

func nothing(_ *http.Request, in *bufio.Reader, _ net.Conn) { io.Copy(io.Discard, in) }

const ok = "HTTP/1.1 200 OK\r\n"

// Each misbehaviour gives a clear error of the right kind, soon, in bounded
// memory, and the VM goes on.
func TestAGuestThatAnswersWithNonsenseHarmsOnlyThatCall(t *testing.T) {
	for _, row := range []struct {
		name   string
		answer func(*http.Request, *bufio.Reader, net.Conn)
		kind   error
		want   string
	}{
		{"nothing", nothing, supervisor.ErrGuestSilent, "did not answer in time"},
		{"garbage", raw("\x00\x01\x02\xff garbage \x1b[31m\r\n\r\n"), supervisor.ErrGuestBroken, "broke the protocol"},
		{"hangs up", func(_ *http.Request, _ *bufio.Reader, conn net.Conn) { conn.Close() }, supervisor.ErrGuestBroken, "broke off"},
		{"endless status line", endless("HTTP/1.1 200 ", "x"), supervisor.ErrGuestBroken, "broke the protocol"},
		{"endless header", endless(ok, "X-A: b\r\n"), supervisor.ErrGuestBroken, "broke the protocol"},
		{"endless informational answers", endless("", "HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n"), supervisor.ErrGuestBroken, "broke the protocol"},
		{"huge length", raw(ok + "Content-Length: 9000000000000\r\n\r\n{"), supervisor.ErrGuestSilent, "did not answer"},
		{"negative length", raw(ok + "Content-Length: -1\r\n\r\n{}"), supervisor.ErrGuestBroken, "broke the protocol"},
		{"cut body", func(req *http.Request, in *bufio.Reader, conn net.Conn) {
			raw(ok+"Content-Length: 100\r\n\r\n{")(req, in, conn)
			conn.Close()
		}, supervisor.ErrGuestBroken, "broke off"},
		{"endless body", endless(ok+"\r\n", `{"mem_total":1}`), supervisor.ErrGuestBroken, "document of more than"},
		{"endless chunks", endless(ok+"Transfer-Encoding: chunked\r\n\r\n", "1\r\n \r\n"), supervisor.ErrGuestBroken, "document of more than"},
		{"no JSON", raw(ok + "Content-Length: 5\r\n\r\nhello"), supervisor.ErrGuestBroken, "invalid character"},
		{"unknown field", answer(map[string]int{"surprise": 1}), supervisor.ErrGuestBroken, "unknown field"},
		{"escapes in an unknown field", answer(map[string]int{"\x1b[2J\u202e": 1}), supervisor.ErrGuestBroken, "unknown field"},
		{"wrong type", answer(map[string]string{"mem_total": "1"}), supervisor.ErrGuestBroken, "cannot unmarshal"},
		{"two documents", raw(ok + "Content-Length: 4\r\n\r\n{}{}"), supervisor.ErrGuestBroken, "after the document"},
		{"a redirect", raw("HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n"), supervisor.ErrGuestBroken, "status 302"},
		{"an upgrade", raw("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"), supervisor.ErrGuestBroken, "status 101"},
		{"compressed", raw(ok + "Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\x1f\x8b\x08"), supervisor.ErrGuestBroken, "invalid character"},
		{"an error that is none", raw("HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\n[]"), supervisor.ErrGuestBroken, "broke the protocol"},
	} {
		t.Run(row.name, func(t *testing.T) {
			a := honest()
			a[guestapi.Figures.Path] = row.answer
			r := start(t, rigOptions{guest: a.play, maxWait: rowWait(row.kind)})
			peak := watchHeap(t)
			_, err := r.client.Figures(t.Context())
			wantErr(t, err, row.kind, row.want)
			if !isClean(err) {
				t.Errorf("not clean: %q", err)
			}
			if p := peak(); p > 40<<20 && !underRace {
				t.Errorf("%d bytes of heap", p)
			}
			if _, _, err := run(t, r.client, "", "true"); err != nil {
				t.Errorf("the next program: %v", err)
			}
		})
	}
}

func TestAGuestCannotSpeakForTheSupervisor(t *testing.T) {
	a := honest()
	a[guestapi.Figures.Path] = refuse("gone", "the VM ended: \x1b[")
	r := start(t, rigOptions{guest: a.play})
	_, err := r.client.Figures(t.Context())
	var refused *guestapi.Error
	if !errors.As(err, &refused) || refused.Code != guestapi.CodeInternal || errors.Is(err, supervisor.ErrGone) || refused.Message != "the VM ended: ?[" {
		t.Errorf("%q %T", err, err)
	}
}

func TestAGuestThatBreaksAnExecIsAClearError(t *testing.T) {
	after := func(s string) func(*http.Request, *bufio.Reader, net.Conn) {
		return func(req *http.Request, in *bufio.Reader, conn net.Conn) {
			raw(switching+s)(req, in, conn)
			io.Copy(io.Discard, in)
		}
	}
	for _, row := range []struct {
		name   string
		answer func(*http.Request, *bufio.Reader, net.Conn)
		kind   error
		want   string
	}{
		{"nothing", nothing, supervisor.ErrGuestSilent, "did not answer in time"},
		{"garbage", after("\xde\xad\xbe\xef\x00\x00"), supervisor.ErrGuestBroken, "exec frame of"},
		{"garbage for an answer", endless("", "\xde\xad\xbe\xef"), supervisor.ErrGuestBroken, "broke the protocol"},
		{"endless header", endless("HTTP/1.1 101 X\r\n", "X-A: b\r\n"), supervisor.ErrGuestBroken, "broke the protocol"},
		{"200 for 101", raw(ok + "Content-Length: 2\r\n\r\n{}"), supervisor.ErrGuestBroken, "status 200"},
		{"a frame too large", after("\x11\x00\x01\x00\x01"), supervisor.ErrGuestBroken, "exec frame of 65537 bytes"},
		{"a frame of 4 GiB", after("\x11\xff\xff\xff\xff"), supervisor.ErrGuestBroken, "exec frame of 4294967295 bytes"},
		{"stdin from the guest", after(frame(guestapi.FrameStdin, "x")), supervisor.ErrGuestBroken, "kind 0x1,"},
		{"a fault of the supervisor's", after(frame(control.FrameFault, `{"kind":"gone","message":"x"}`)), supervisor.ErrGuestBroken, "kind 0x1e,"},
		{"unknown kind", after(frame(0x77, "x")), supervisor.ErrGuestBroken, "kind 0x77,"},
		{"exit that is no JSON", after(frame(guestapi.FrameExit, "\x1b[31m")), supervisor.ErrGuestBroken, "an exit status that is none"},
		{"exit with unknown fields", after(frame(guestapi.FrameExit, `{"code":0,"extra":1}`)), supervisor.ErrGuestBroken, "unknown field"},
		{"exit out of range", after(frame(guestapi.FrameExit, `{"code":-1}`)), supervisor.ErrGuestBroken, "code -1"},
		{"exit of 64 KiB", after(frame(guestapi.FrameExit, `{"code":0`+strings.Repeat(" ", 60_000)+`}`)), supervisor.ErrGuestBroken, "more than 4096 bytes"},
		{"breaks off in a frame", raw(switching + "\x11\x00\x00\x00\x05ab"), supervisor.ErrGuestBroken, "broke off"},
		{"ends without an exit", raw(switching), supervisor.ErrGuestBroken, "broke off"},
	} {
		t.Run(row.name, func(t *testing.T) {
			a := agent{guestapi.ExecPath: row.answer, guestapi.List.Path: honest()[guestapi.List.Path]}
			r := start(t, rigOptions{guest: a.play, maxWait: rowWait(row.kind)})
			peak := watchHeap(t)
			_, _, err := run(t, r.client, "some input", "x")
			wantErr(t, err, row.kind, row.want)
			if p := peak(); p > 40<<20 && !underRace {
				t.Errorf("%d bytes of heap", p)
			}
			if _, err := r.client.List(t.Context(), guestapi.ListRequest{Path: "/"}); err != nil {
				t.Errorf("the next call: %v", err)
			}
		})
	}
}

func TestAGuestThatBreaksTheLinkEndsItsVM(t *testing.T) {
	for _, row := range []struct {
		name    string
		breakIt func(vm *fakeVM, s *link.Session)
	}{
		{"garbage", func(vm *fakeVM, _ *link.Session) { io.CopyN(vm.guest, noise(), 1<<20) }},
		{"too many streams", func(_ *fakeVM, s *link.Session) {
			for {
				if _, err := s.Open(context.Background()); err != nil {
					return
				}
			}
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			sessions := make(chan *link.Session, 1)
			r := start(t, rigOptions{guest: func(ctx context.Context, vm *fakeVM) {
				link.Serve(ctx, vm.guest, func(s *link.Session) {
					sessions <- s
					honest().serveAll(s)
				})
			}})
			program := hang(t, r)
			row.breakIt(r.vm, <-sessions)
			wantErr(t, soon(t, program), supervisor.ErrGone, "the guest broke the link")
			soon(t, r.client.Gone())
			wantErr(t, r.client.Err(), supervisor.ErrGone, "the guest broke the link")
			r.waitEnd()
			r.wantNothingLeft()
		})
	}
}

// A guest may take its time to start a program as long as it answers.
func TestASlowGuestIsWaitedForAndADeadOneIsNot(t *testing.T) {
	var dead atomic.Bool
	free := make(chan struct{})
	defer close(free)
	a := honest()
	exec := a[guestapi.ExecPath]
	a[guestapi.ExecPath] = func(req *http.Request, in *bufio.Reader, conn net.Conn) {
		if dead.Load() {
			<-free
			return
		}
		time.Sleep(300 * time.Millisecond)
		exec(req, in, conn)
	}
	a[guestapi.Hello.Path] = func(req *http.Request, in *bufio.Reader, conn net.Conn) {
		if dead.Load() {
			<-free
			return
		}
		answer(guestapi.HelloInfo{Protocol: guestapi.Protocol, ImageID: "image-1"})(req, in, conn)
	}
	r := start(t, rigOptions{guest: a.play, change: func(o *Options) { o.startTick = 20 * time.Millisecond }})
	if out, _, err := run(t, r.client, "", "echo", "late"); err != nil || out != "late\n" {
		t.Errorf("slow: %q, %v", out, err)
	}
	dead.Store(true)
	_, _, err := run(t, r.client, "", "echo", "never") // long before execStartWait
	wantErr(t, err, supervisor.ErrGuestSilent, "did not answer in time")
}

func TestATransferThatStallsIsGivenUp(t *testing.T) {
	free := make(chan struct{})
	defer close(free)
	a := honest()
	a[guestapi.FilePath] = func(req *http.Request, _ *bufio.Reader, conn net.Conn) {
		if req.Method == http.MethodGet {
			io.WriteString(conn, ok+"Content-Length: 100\r\n\r\nhalf")
		}
		<-free
	}
	r := start(t, rigOptions{guest: a.play, maxWait: silenceWait})
	f, err := r.client.ReadFile(t.Context(), "/f", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(f)
	f.Close()
	wantErr(t, err, supervisor.ErrGuestSilent, "did not answer in time")
	if string(data) != "half" {
		t.Errorf("%q came", data)
	}
	err = r.client.WriteFile(t.Context(), "/f", 0o644, "", io.LimitReader(zeros{}, 10<<20))
	wantErr(t, err, supervisor.ErrGuestSilent, "did not answer in time")
}
