package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/warren-vm/warren/internal/machine"
)

// fork measures n copies of one running machine until all have answered an
// exec, against plain QEMUs that are restored n times until each has answered.
func fork(n, samples int, bar float64) Benchmark {
	return Benchmark{
		Name:  fmt.Sprintf("fork%d", n),
		Title: fmt.Sprintf("fork %d ways, an exec in each", n),
		Floor: fmt.Sprintf("%d plain restores, one answer each", n),
		Unit:  Milliseconds,
		N:     samples,
		Bars:  []Bar{{Of: "ratio", AtMost: bar}},
		open: func(ctx context.Context, b *bed) (pair, error) {
			id, err := machine.Template(ctx, b.o.machine())
			if err != nil {
				return nil, err
			}
			plain, err := b.plainRestore(ctx, id)
			if err != nil {
				return nil, err
			}
			m, err := machine.Create(ctx, b.o.machine())
			if err != nil {
				plain.release()
				return nil, err
			}
			return &forkPair{n, m, plain}, nil
		},
	}
}

type forkPair struct {
	n     int
	m     *machine.Machine
	plain *plainRestore
}

func (p *forkPair) subject(ctx context.Context, count int) ([]sample, error) {
	var out []sample
	for range count {
		s, err := p.fork(ctx)
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

func (p *forkPair) fork(ctx context.Context) (s sample, err error) {
	ctx, cancel := deadline(ctx, restoreDeadline)
	defer cancel()
	began := time.Now()
	errs := make([]error, p.n)
	var first atomic.Int64 // in nanoseconds
	forks, err := p.m.Fork(ctx, p.n, machine.Options{Label: "kosa8 bench"}, machine.ForkHooks{Ready: func(i int, c machine.Forked) {
		if c.Err != nil {
			errs[i] = fmt.Errorf("copy %d: %w", i, c.Err)
		} else {
			errs[i] = runSmallest(ctx, c.Machine)
		}
		first.CompareAndSwap(0, int64(time.Since(began)))
	}})
	if err != nil {
		return s, reason(ctx, err)
	}
	s = sample{milliseconds(time.Since(began)), map[string]float64{
		"pause": float64(forks.Capture.PauseUS) / 1000,
		"first": milliseconds(time.Duration(first.Load())),
	}}
	return s, reason(ctx, errors.Join(append(errs, closeForks(forks))...))
}

func closeForks(forks machine.Forks) error {
	return each(len(forks.Copies), func(i int) error {
		if m := forks.Copies[i].Machine; m != nil {
			return closeMachine(m)
		}
		return nil
	})
}

// each does something n times, a few side by side.
func each(n int, do func(i int) error) error {
	errs := make([]error, n)
	places := make(chan struct{}, 2*runtime.NumCPU())
	var wg sync.WaitGroup
	for i := range n {
		places <- struct{}{}
		wg.Go(func() {
			errs[i] = do(i)
			<-places
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (p *forkPair) floor(ctx context.Context, count int) ([]float64, error) {
	ctx, cancel := deadline(ctx, restoreDeadline)
	defer cancel()
	var out []float64
	for range count {
		began := time.Now()
		vms, err := p.plain.startMany(ctx, p.n)
		out = append(out, milliseconds(time.Since(began)))
		each(len(vms), func(i int) error { vms[i].end(); return nil })
		if err != nil {
			return nil, reason(ctx, err)
		}
	}
	return out, nil
}

// startMany restores n VMs, a few side by side, and waits for an answer of
// each. What it returns is to be ended, also with an error.
func (p *plainRestore) startMany(ctx context.Context, n int) ([]*restoredVM, error) {
	all := make([]*restoredVM, n)
	err := each(n, func(i int) (err error) {
		all[i], err = p.start(ctx)
		return err
	})
	var vms []*restoredVM
	for _, v := range all {
		if v != nil {
			vms = append(vms, v)
		}
	}
	return vms, err
}

func (p *forkPair) close() error {
	p.plain.release()
	return closeMachine(p.m)
}
