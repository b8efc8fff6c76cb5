package bench

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/warren-vm/warren/internal/machine"
)

// DefaultStdioMiB is how much the benchmark stdio sends per sample.
const DefaultStdioMiB = 1024

// Options say what is measured. The zero Options measures everything on the
// machine a user gets by default.
type Options struct {
	// Names of the benchmarks, in any order; none is all of them.
	Names []string
	// N is how many samples each takes, up to MaxN; 0 leaves it to each.
	N int
	// StdioMiB is how much the benchmark stdio sends per sample, in MiB; 0 is
	// DefaultStdioMiB. Less is quicker and less exact.
	StdioMiB int
	// Home, CPUs, MemMB, Accel and VMM are those of machine.Options, with its
	// defaults. The floors get the same.
	Home        string
	CPUs, MemMB int
	Accel       string
	VMM         string
	// Kosa8 is the path of the command kosa8, which boot starts; empty is the
	// running program.
	Kosa8 string
	// Progress, if set, is told how many of the n samples of a benchmark are
	// done: 0 when it starts. It is called from one goroutine.
	Progress func(name string, done, n int)
}

func (o Options) withDefaults() (Options, error) {
	if o.CPUs == 0 {
		o.CPUs = machine.DefaultCPUs
	}
	if o.MemMB == 0 {
		o.MemMB = machine.DefaultMemMB
	}
	if o.StdioMiB == 0 {
		o.StdioMiB = DefaultStdioMiB
	}
	if o.Progress == nil {
		o.Progress = func(string, int, int) {}
	}
	if o.Kosa8 == "" {
		exe, err := os.Executable()
		if err != nil {
			return o, fmt.Errorf("path of the running program: %w", err)
		}
		o.Kosa8 = exe
	}
	return o, nil
}

// Check reports everything that is wrong with the options, joined by
// errors.Join, without starting anything. An unknown name is an UnknownError.
func (o Options) Check() error {
	var faults []error
	if _, err := choose(o.Names); err != nil {
		faults = append(faults, err)
	}
	if o.N < 0 || o.N > MaxN {
		faults = append(faults, fmt.Errorf("%d samples; take 1 to %d", o.N, MaxN))
	}
	if o.StdioMiB < 0 || o.StdioMiB > 1<<20 {
		faults = append(faults, fmt.Errorf("%d MiB for stdio; take 1 to %d", o.StdioMiB, 1<<20))
	}
	return errors.Join(append(faults, o.machine().Check())...)
}

func (o Options) machine() machine.Options {
	return machine.Options{
		Home: o.Home, CPUs: o.CPUs, MemMB: o.MemMB, Accel: o.Accel, VMM: o.VMM,
		Label: "kosa8 bench",
	}
}

// Run measures the benchmarks one after the other and reports them.
//
// It needs a built guest image. When it returns an error, also that of ctx,
// the report holds the benchmarks that were finished before. However it
// returns, every process it started is gone.
func Run(ctx context.Context, o Options) (Report, error) {
	if err := o.Check(); err != nil {
		return Report{}, err
	}
	o, err := o.withDefaults()
	if err != nil {
		return Report{}, err
	}
	chosen, err := choose(o.Names)
	if err != nil {
		return Report{}, err
	}
	bed, err := newBed(ctx, o)
	if err != nil {
		return Report{}, reason(ctx, err)
	}
	report := Report{Machine: bed.host, Benchmarks: []Result{}}
	for _, b := range chosen {
		n := b.N
		if o.N > 0 {
			n = o.N
		}
		r, err := b.measureOne(ctx, bed, n, func(done int) { o.Progress(b.Name, done, n) })
		if err != nil {
			return report, err
		}
		report.Benchmarks = append(report.Benchmarks, r)
	}
	return report, nil
}

// measureOne opens a benchmark, measures it and closes it again.
func (b Benchmark) measureOne(ctx context.Context, bed *bed, n int, step func(done int)) (r Result, err error) {
	p, err := b.open(ctx, bed)
	if err != nil {
		return r, fmt.Errorf("benchmark %s: %w", b.Name, reason(ctx, err))
	}
	defer func() {
		if cerr := p.close(); cerr != nil && err == nil {
			err = fmt.Errorf("benchmark %s: end: %w", b.Name, cerr)
		}
	}()
	m, err := alternate(ctx, p, n, b.Batch, step)
	if err != nil {
		return r, fmt.Errorf("benchmark %s: %w", b.Name, err)
	}
	return summarize(b, m), nil
}
