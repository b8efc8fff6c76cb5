package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// bootDeadline bounds one start, of Warren's or of plain QEMU.
const bootDeadline = 5 * time.Minute

// bootWord is what the program in the guest prints.
const bootWord = "x\n"

// boot measures a cold start: `kosa8 run` to the first byte of output,
// against plain QEMU to the agent's first line.
func boot() Benchmark {
	return Benchmark{
		Name:  "boot",
		Title: "cold start to first output",
		Floor: "plain QEMU",
		Unit:  Milliseconds,
		N:     20,
		Bars:  []Bar{{Of: "ratio", AtMost: 1.3}},
		open:  func(ctx context.Context, b *bed) (pair, error) { return &bootPair{b, b.byTheBook()}, nil },
	}
}

type bootPair struct {
	bed   *bed
	plain plain
}

func (p *bootPair) subject(ctx context.Context, count int) ([]sample, error) {
	var out []sample
	for range count {
		s, err := p.run(ctx)
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

// run is one `kosa8 run`, as a user types it but for --timings, which writes
// after the program has ended.
func (p *bootPair) run(ctx context.Context) (sample, error) {
	ctx, cancel := deadline(ctx, bootDeadline)
	defer cancel()
	stdout, theirs, err := os.Pipe()
	if err != nil {
		return sample{}, err
	}
	defer stdout.Close()
	o := p.bed.o
	child, err := command{
		argv: []string{o.Kosa8, "run", "--boot", "--timings", "--accel", o.Accel, "--cpus", strconv.Itoa(o.CPUs),
			"--memory", fmt.Sprintf("%dm", o.MemMB), "base", "--", "echo", "x"},
		env:    p.env(),
		stdout: theirs,
		grace:  30 * time.Second, // it has a VM to end
	}.start(ctx)
	theirs.Close()
	if err != nil {
		return sample{}, err
	}
	defer child.stop()
	first := make([]byte, len(bootWord))
	n, err := stdout.Read(first)
	took := time.Since(child.started)
	if err != nil && err != io.EOF {
		return sample{}, fmt.Errorf("output of kosa8 run: %w", err)
	}
	rest, err := io.ReadAll(io.LimitReader(stdout, 1<<10))
	if err != nil {
		return sample{}, fmt.Errorf("output of kosa8 run: %w", err)
	}
	if err := child.wait(); err != nil {
		return sample{}, reason(ctx, fmt.Errorf("kosa8 run: %w", err))
	}
	if got := string(first[:n]) + string(rest); got != bootWord {
		return sample{}, fmt.Errorf("kosa8 run printed %q, not %q", got, bootWord)
	}
	return sample{milliseconds(took), parseTimings(child.stderr.lines())}, nil
}

// env makes the child use what this run uses. It has no flag for the
// supervisor, which it looks for in PATH first.
func (p *bootPair) env() []string {
	env := []string{"WARREN_HOME=" + p.bed.o.Home}
	if vmm := p.bed.o.VMM; vmm != "" {
		env = append(env, "PATH="+filepath.Dir(vmm)+string(os.PathListSeparator)+os.Getenv("PATH"))
	}
	return env
}

func (p *bootPair) floor(ctx context.Context, count int) ([]float64, error) {
	var out []float64
	for range count {
		took, err := p.plain.bootTime(ctx)
		for try := 1; errors.Is(err, errHung) && try < maxHung; try++ {
			took, err = p.plain.bootTime(ctx)
		}
		if err != nil {
			return nil, err
		}
		out = append(out, milliseconds(took))
	}
	return out, nil
}

// A plain QEMU with several emulated processors can hang for ever
// (docs/decisions/0007). Such a boot is made again and not
// counted: that favours the floor.
const (
	hangs   = time.Minute
	maxHung = 5
)

var errHung = fmt.Errorf("plain QEMU did not reach init within %v", hangs)

// bootTime starts the VM, waits for the agent's first line and ends the VM.
func (p plain) bootTime(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, hangs, errHung)
	defer cancel()
	v, err := p.start(ctx)
	if err != nil {
		return 0, err
	}
	defer v.stop()
	took, err := v.awaitInit()
	return took, reason(ctx, err)
}

// close has nothing to do: every sample ended its own processes.
func (p *bootPair) close() error { return nil }
