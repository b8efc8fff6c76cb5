package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/term"

	"github.com/warren-vm/warren/internal/guestapi"
)

// Process is a program that runs in a guest. Its output goes to the writers
// it was started with.
type Process interface {
	// Stdin takes the program's input; Close is its end. Nil when the
	// program was started without.
	Stdin() io.WriteCloser
	Signal(ctx context.Context, sig int) error
	Resize(ctx context.Context, rows, cols uint16) error
	// Wait returns when the program has ended and all its output was
	// written.
	Wait() (guestapi.ExitStatus, error)
}

// Foreground puts a program of a guest in the place of this command: its
// streams, its terminal and its signals.
type Foreground struct {
	In       *os.File
	Out, Err io.Writer
	// Interactive passes In on to the program.
	Interactive bool
	// TTY says that the program has a terminal: In is put into raw mode when
	// it is a terminal too, and the window's size follows.
	TTY bool
}

// ErrOutputGone says that whoever read the output is gone, as `head` is when
// it has its lines.
//
// It is an Exit that says nothing: a command in a pipe ends quietly.
var ErrOutputGone error = &Exit{Code: ExitPipe}

// Run starts a program with start, which gets the writers for its output, and
// stays until it has ended. Signals go to the program meanwhile.
//
// When output cannot be written the context that start got is cancelled, as
// there is nothing left that the program could be run for; the error then is
// ErrOutputGone or says what failed. start must start a program that ends
// with that context. The terminal is as it was when Run returns.
func (f *Foreground) Run(ctx context.Context, signals *Interrupts,
	start func(ctx context.Context, stdout, stderr io.Writer) (Process, error)) (guestapi.ExitStatus, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stdout := &output{w: f.Out, name: "standard output", fail: cancel}
	stderr := &output{w: f.Err, name: "standard error", fail: cancel}

	restore, err := f.raw()
	if err != nil {
		return guestapi.ExitStatus{}, err
	}
	defer restore()

	process, err := start(ctx, stdout, stderr)
	if err != nil {
		return guestapi.ExitStatus{}, cause(ctx, err)
	}
	signals.Forward(func(sig syscall.Signal) {
		// A signal must not wait for a guest that does not answer: the next
		// one may be the one that ends it.
		go process.Signal(ctx, int(sig))
	})
	defer signals.Forward(nil)
	var inputErr atomic.Pointer[error]
	if f.Interactive {
		// Not waited for: a read from a terminal cannot be called back.
		go func() {
			stdin := process.Stdin()
			// The error is there before the program can see the end.
			if err := f.feed(stdin); err != nil {
				inputErr.Store(&err)
			}
			stdin.Close()
		}()
	}
	if f.TTY {
		defer f.followSize(ctx, process)()
	}

	status, err := process.Wait()
	if err != nil || ctx.Err() != nil {
		return status, cause(ctx, err)
	}
	if err := inputErr.Load(); err != nil {
		return status, *err
	}
	return status, nil
}

// cause is why ctx ended, when it did: what happened first says more than
// what then went wrong because of it.
func cause(ctx context.Context, err error) error {
	if why := context.Cause(ctx); why != nil {
		return why
	}
	return err
}

// feed copies the input to its end. A program that does not want any more is
// no fault; an input that cannot be read is.
func (f *Foreground) feed(stdin io.Writer) error {
	buf := make([]byte, guestapi.MaxFrame)
	for {
		n, err := f.In.Read(buf)
		if n > 0 {
			if _, err := stdin.Write(buf[:n]); err != nil {
				return nil
			}
		}
		switch {
		// EIO: the terminal went away, or we are in its background.
		case errors.Is(err, io.EOF), errors.Is(err, syscall.EIO), errors.Is(err, os.ErrClosed), errors.Is(err, syscall.EBADF):
			return nil
		case err != nil:
			return fmt.Errorf("read standard input: %w", underlying(err))
		}
	}
}

// raw hands every key to the program.
func (f *Foreground) raw() (restore func(), err error) {
	if !f.TTY || !f.Interactive || !IsTerminal(f.In) {
		return func() {}, nil
	}
	fd := int(f.In.Fd())
	old, err := term.MakeRaw(fd)
	if err != nil {
		return nil, fmt.Errorf("set the terminal to raw mode: %w", err)
	}
	return func() { term.Restore(fd, old) }, nil
}

// followSize tells the program the window's size now and whenever it changes.
func (f *Foreground) followSize(ctx context.Context, process Process) (stop func()) {
	// One place is enough: only the newest size matters.
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, syscall.SIGWINCH)
	var wg sync.WaitGroup
	wg.Go(func() {
		var lastRows, lastCols uint16
		for range changed {
			rows, cols, ok := f.Size()
			if !ok || rows == lastRows && cols == lastCols {
				continue
			}
			lastRows, lastCols = rows, cols
			process.Resize(ctx, rows, cols)
		}
	})
	// The window may have changed between the request and now.
	select {
	case changed <- syscall.SIGWINCH:
	default: // it did
	}
	return func() {
		signal.Stop(changed)
		close(changed)
		wg.Wait()
	}
}

// Size is the window's size; ok is false when no stream is a terminal.
func (f *Foreground) Size() (rows, cols uint16, ok bool) {
	for _, stream := range []any{f.Out, f.In, f.Err} {
		if file, isFile := stream.(*os.File); isFile && IsTerminal(file) {
			if w, h, err := term.GetSize(int(file.Fd())); err == nil && w > 0 && h > 0 {
				return uint16(min(h, 65535)), uint16(min(w, 65535)), true
			}
		}
	}
	return 0, 0, false
}

// output passes the program's bytes on as they are.
type output struct {
	w    io.Writer
	name string
	fail context.CancelCauseFunc
}

func (o *output) Write(p []byte) (int, error) {
	n, err := o.w.Write(p)
	switch {
	case err == nil:
		return n, nil
	// EIO: the terminal is gone.
	case errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.EIO):
		o.fail(ErrOutputGone)
		return n, ErrOutputGone
	default:
		err = fmt.Errorf("write %s: %w", o.name, underlying(err))
		o.fail(err)
		return n, err
	}
}

// underlying drops "write /dev/stdout: ", which says what o.name says better.
func underlying(err error) error {
	if path := (*os.PathError)(nil); errors.As(err, &path) {
		return path.Err
	}
	return err
}
