package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/term"

	"github.com/warren-vm/warren/internal/guestapi"
)

// patience is how long a test waits for what must happen.
const patience = 30 * time.Second

// fakeProcess is a Process that a test plays.
type fakeProcess struct {
	stdin   io.WriteCloser
	signals chan int
	sizes   chan [2]uint16
	ctx     context.Context
	end     chan guestapi.ExitStatus
}

func newFakeProcess(stdin io.WriteCloser) *fakeProcess {
	return &fakeProcess{
		stdin:   stdin,
		signals: make(chan int, 10),
		sizes:   make(chan [2]uint16, 10),
		end:     make(chan guestapi.ExitStatus, 1),
	}
}

func (p *fakeProcess) Stdin() io.WriteCloser { return p.stdin }
func (p *fakeProcess) Signal(_ context.Context, sig int) error {
	p.signals <- sig
	return nil
}
func (p *fakeProcess) Resize(_ context.Context, rows, cols uint16) error {
	p.sizes <- [2]uint16{rows, cols}
	return nil
}
func (p *fakeProcess) Wait() (guestapi.ExitStatus, error) {
	select {
	case s := <-p.end:
		return s, nil
	case <-p.ctx.Done():
		return guestapi.ExitStatus{}, errors.New("the machine is gone")
	}
}

func (p *fakeProcess) start(ctx context.Context, _, _ io.Writer) (Process, error) {
	p.ctx = ctx
	return p, nil
}

func recv[T any](t *testing.T, from <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(patience):
		t.Fatalf("waited %v for %s", patience, what)
		panic("unreachable")
	}
}

func TestSignalBeforeTheProgramEndsTheCommand(t *testing.T) {
	ctx, signals := CatchInterrupts(context.Background())
	defer signals.Stop()
	syscall.Kill(os.Getpid(), syscall.SIGTERM)
	recv(t, ctx.Done(), "the context to end")
	if got := ExitCode(context.Cause(ctx)); got != 128+15 {
		t.Errorf("exit code %d, want 143", got)
	}
}

func TestFirstInterruptGoesToTheProgramSecondEndsTheCommand(t *testing.T) {
	ctx, signals := CatchInterrupts(context.Background())
	defer signals.Stop()
	p := newFakeProcess(nil)
	f := &Foreground{In: os.Stdin, Out: io.Discard, Err: io.Discard}
	done := make(chan error, 1)
	go func() {
		_, err := f.Run(ctx, signals, p.start)
		done <- err
	}()
	// Signals before Forward would end the command: wait for a harmless one.
	waitForward(t, signals)
	for _, sig := range []syscall.Signal{syscall.SIGUSR1, syscall.SIGHUP, syscall.SIGHUP, syscall.SIGINT} {
		syscall.Kill(os.Getpid(), sig)
		if got := recv(t, p.signals, sig.String()); got != int(sig) {
			t.Fatalf("the program got signal %d, want %d", got, sig)
		}
	}
	syscall.Kill(os.Getpid(), syscall.SIGINT)
	err := recv(t, done, "the end")
	if got := ExitCode(err); got != 130 {
		t.Errorf("exit code %d (%v), want 130", got, err)
	}
}

func waitForward(t *testing.T, i *Interrupts) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
		i.mu.Lock()
		set := i.forward != nil
		i.mu.Unlock()
		if set {
			return
		}
	}
	t.Fatal("signals were never forwarded")
}

func TestOutputThatNobodyReadsEndsQuietlyWith141(t *testing.T) {
	ctx, signals := CatchInterrupts(context.Background())
	defer signals.Stop()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	r.Close()
	p := newFakeProcess(nil)
	f := &Foreground{In: os.Stdin, Out: w, Err: io.Discard}
	_, err = f.Run(ctx, signals, func(ctx context.Context, stdout, stderr io.Writer) (Process, error) {
		stdout.Write([]byte("hello"))
		return p.start(ctx, stdout, stderr)
	})
	var said strings.Builder
	PrintError(&said, "kosa8", err)
	if !errors.Is(err, ErrOutputGone) || ExitCode(err) != 141 || said.Len() > 0 {
		t.Errorf("err %v, code %d, said %q", err, ExitCode(err), said.String())
	}
}

func TestOutputToAFullDiskIsAnErrorThatNamesIt(t *testing.T) {
	ctx, signals := CatchInterrupts(context.Background())
	defer signals.Stop()
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	p := newFakeProcess(nil)
	f := &Foreground{In: os.Stdin, Out: full, Err: io.Discard}
	_, err = f.Run(ctx, signals, func(ctx context.Context, stdout, stderr io.Writer) (Process, error) {
		stdout.Write([]byte("hello"))
		return p.start(ctx, stdout, stderr)
	})
	if err == nil || err.Error() != "write standard output: no space left on device" || ExitCode(err) != 1 {
		t.Errorf("err %v, want one about the full disk", err)
	}
}

// closeRecorder is the program's input.
type closeRecorder struct {
	mu     sync.Mutex
	data   []byte
	closed chan struct{}
}

func (c *closeRecorder) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.data = append(c.data, p...)
	return len(p), nil
}

func (c *closeRecorder) Close() error {
	close(c.closed)
	return nil
}

func TestInputThatCannotBeReadIsAnError(t *testing.T) {
	ctx, signals := CatchInterrupts(context.Background())
	defer signals.Stop()
	folder, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	in := &closeRecorder{closed: make(chan struct{})}
	p := newFakeProcess(in)
	f := &Foreground{In: folder, Out: io.Discard, Err: io.Discard, Interactive: true}
	go func() {
		<-in.closed
		p.end <- guestapi.ExitStatus{}
	}()
	_, err = f.Run(ctx, signals, p.start)
	if err == nil || err.Error() != "read standard input: is a directory" {
		t.Errorf("err %v, want one about the input", err)
	}
}

func TestTerminalIsRawMeanwhileFollowsTheWindowAndIsRestored(t *testing.T) {
	ctx, signals := CatchInterrupts(context.Background())
	defer signals.Stop()
	master, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	defer tty.Close()
	pty.Setsize(master, &pty.Winsize{Rows: 30, Cols: 100})
	before, err := term.GetState(int(tty.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	in := &closeRecorder{closed: make(chan struct{})}
	p := newFakeProcess(in)
	f := &Foreground{In: tty, Out: tty, Err: tty, Interactive: true, TTY: true}
	done := make(chan error, 1)
	go func() {
		_, err := f.Run(ctx, signals, p.start)
		done <- err
	}()
	if got := recv(t, p.sizes, "the first size"); got != [2]uint16{30, 100} {
		t.Errorf("first size %v", got)
	}
	pty.Setsize(master, &pty.Winsize{Rows: 40, Cols: 132})
	syscall.Kill(os.Getpid(), syscall.SIGWINCH)
	if got := recv(t, p.sizes, "the new size"); got != [2]uint16{40, 132} {
		t.Errorf("new size %v", got)
	}
	// Ctrl-C is a byte for the program, not a signal for us.
	master.Write([]byte("a\x03"))
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		in.mu.Lock()
		got := string(in.data)
		in.mu.Unlock()
		if got == "a\x03" {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the program read %q", got)
		}
	}
	p.end <- guestapi.ExitStatus{}
	if err := recv(t, done, "the end"); err != nil {
		t.Error(err)
	}
	after, err := term.GetState(int(tty.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if *before != *after {
		t.Error("the terminal is not as it was")
	}
}

func TestSpinnerLeavesNothingBehindOnATerminal(t *testing.T) {
	master, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	defer tty.Close()
	p := NewProgress(tty, false, Silent)
	p.Step("quick")
	p.Done() // before the first moment is over: nothing is drawn
	p.delay = 0
	p.Step("start a VM")
	buf := make([]byte, 4096)
	n, err := master.Read(buf)
	if err != nil || !strings.Contains(string(buf[:n]), "start a VM") || strings.Contains(string(buf[:n]), "quick") {
		t.Errorf("drew %q, %v", buf[:n], err)
	}
	p.Done()
	io.WriteString(tty, "end")
	all := ""
	for !strings.HasSuffix(all, "end") {
		n, err := master.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		all += string(buf[:n])
	}
	if !strings.HasSuffix(all, "\r\x1b[Kend") {
		t.Errorf("ended with %q, want the line cleared", all)
	}
}
