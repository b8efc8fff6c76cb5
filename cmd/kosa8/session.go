package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store"
)

// timeoutGrace is what the guest has on top of --timeout to stop the program
// (SIGTERM, two seconds, SIGKILL) and to say so. After that it is hostile or
// dead, and the machine is stopped from outside.
const timeoutGrace = 7 * time.Second

// closeDeadline bounds the wait for a machine to be gone.
const closeDeadline = 20 * time.Second

// run starts a machine, runs the program in it, and leaves nothing but the
// snapshot it was asked for.
func run(ctx context.Context, s streams, o runOptions) (err error) {
	home, err := homeOf(o.machine.Home)
	if err != nil {
		return err
	}
	aside := beginSweep(home)
	defer aside.finish()
	ctx, signals := cli.CatchInterrupts(ctx)
	defer signals.Stop()
	progress := cli.NewProgress(s.err, o.quiet, cli.Silent)
	defer progress.Done()

	o.machine.Home = home.Dir()
	o.machine.Step = func(step string) { progress.Step("%s", step) }
	m, err := start(ctx, o)
	progress.Done()
	if err != nil {
		return unsaved(o, because(ctx, err))
	}
	aside.collect()
	defer func() {
		// A VM that died says so once.
		if unclosed := closeMachine(m); unclosed != nil && (err == nil || !strings.Contains(err.Error(), unclosed.Error())) {
			err = cli.Also(err, unclosed)
		}
	}()
	first := &firstByte{began: time.Now()}
	status, err := runIn(ctx, s, o, m, signals, first)
	if o.timings {
		var phases []cli.Phase
		for _, p := range m.Phases() {
			phases = append(phases, cli.Phase(p))
		}
		// A remark: that it cannot be written changes nothing.
		cli.WriteChart(s.err, append(phases, cli.Phase{Name: "exec", Took: first.took()}))
	}
	if err != nil {
		return unsaved(o, explain(ctx, m, o, err))
	}
	err = ended(o, status)
	if !o.save {
		return err
	}
	return cli.Also(err, save(ctx, s, o, m)) // the code stays the program's
}

// unsaved is err of a run that came to no snapshot, if one was asked for.
func unsaved(o runOptions, err error) error {
	if !o.save {
		return err
	}
	return cli.Also(err, errors.New("no snapshot was saved"))
}

// start gives the machine that the options ask for.
func start(ctx context.Context, o runOptions) (*machine.Machine, error) {
	switch {
	case o.boot:
		return machine.Boot(ctx, o.machine)
	case o.from != "":
		m, err := machine.Restore(ctx, o.from, o.machine)
		if errors.Is(err, machine.ErrSize) {
			return nil, &cli.Exit{Code: cli.ExitUsage, Err: cli.Advise(err, "leave out --cpus, --memory and --accel with --from")}
		}
		return m, named(ctx, o.from, err)
	}
	return machine.Create(ctx, o.machine)
}

// save keeps the machine as it is as a snapshot and says how to use it.
func save(ctx context.Context, s streams, o runOptions, m *machine.Machine) error {
	began := time.Now()
	saved, err := m.Save(ctx, o.label)
	if err != nil {
		if why := context.Cause(ctx); why != nil {
			return unsaved(o, why)
		}
		return fmt.Errorf("no snapshot was saved: %w", err)
	}
	if o.quiet {
		_, err = fmt.Fprintln(s.err, saved.ID)
		return err
	}
	_, err = fmt.Fprintf(s.err, "saved snapshot %s%s in %dms\n  run in a copy of it: kosa8 run --from %s %s -- PROGRAM\n",
		saved.ID, labelled(o.label), time.Since(began).Milliseconds(), saved.ID, baseImage)
	return err
}

// runIn runs the program in m with our streams as its own.
func runIn(ctx context.Context, s streams, o runOptions, m *machine.Machine, signals *cli.Interrupts, first *firstByte) (guestapi.ExitStatus, error) {
	if o.timeout > 0 {
		timeout := &cli.Exit{Code: cli.ExitTimeout, Err: fmt.Errorf("the guest did not stop the program after %v; the VM was ended", o.timeout)}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, o.timeout+timeoutGrace, timeout)
		defer cancel()
	}
	f := &cli.Foreground{In: s.in, Out: s.out, Err: s.err, Interactive: o.interactive, TTY: o.exec.TTY}
	if rows, cols, ok := f.Size(); ok && o.exec.TTY {
		o.exec.Rows, o.exec.Cols = rows, cols
	}
	return f.Run(ctx, signals, func(ctx context.Context, stdout, stderr io.Writer) (cli.Process, error) {
		return m.Exec(ctx, o.exec, first.watch(stdout), first.watch(stderr))
	})
}

// ended turns the program's end into ours.
func ended(o runOptions, status guestapi.ExitStatus) error {
	code := status.ExitCode()
	var remark error
	switch {
	case o.quiet:
	case status.TimedOut:
		remark = fmt.Errorf("%q was stopped after %v (--timeout)", o.exec.Argv[0], o.timeout)
	case status.OOMKilled && o.machine.MemMB == 0:
		remark = fmt.Errorf("the guest ran out of memory and ended %q; it has what the snapshot has, make one with more", o.exec.Argv[0])
	case status.OOMKilled:
		remark = fmt.Errorf("the guest ran out of memory and ended %q; give it more than %s with --memory",
			o.exec.Argv[0], cli.FormatMB(int64(o.machine.MemMB)))
	}
	if code == 0 {
		return remark
	}
	return &cli.Exit{Code: code, Err: remark}
}

// because prefers why ctx ended to what then went wrong.
func because(ctx context.Context, err error) error {
	if why := context.Cause(ctx); why != nil {
		return why
	}
	return err
}

func closeMachine(m *machine.Machine) error {
	// Its own context: whatever ended the command, the machine must go.
	ctx, cancel := context.WithTimeout(context.Background(), closeDeadline)
	defer cancel()
	return m.Close(ctx)
}

func homeOf(dir string) (store.Home, error) {
	if dir != "" {
		return store.Home(dir), nil
	}
	return store.DefaultHome()
}

// firstByte remembers when output first came.
type firstByte struct {
	began time.Time

	mu   sync.Mutex
	came time.Time
}

func (f *firstByte) watch(w io.Writer) io.Writer {
	return writerFunc(func(p []byte) (int, error) {
		f.mu.Lock()
		if f.came.IsZero() {
			f.came = time.Now()
		}
		f.mu.Unlock()
		return w.Write(p)
	})
}

// took is the time until the first output, or until now when there was none.
func (f *firstByte) took() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.came.IsZero() {
		return time.Since(f.began)
	}
	return f.came.Sub(f.began)
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
