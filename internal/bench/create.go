package bench

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/machine"
)

// restoreDeadline bounds one turn of what restores VMs.
const restoreDeadline = 5 * time.Minute

// create measures a new VM to its first answered exec.
func create() Benchmark {
	return Benchmark{
		Name:  "create",
		Title: "new VM to its first exec",
		Floor: "plain restore, one answer",
		Unit:  Milliseconds,
		N:     30,
		Bars:  []Bar{{Of: "ratio", AtMost: 1.5}},
		open: func(ctx context.Context, b *bed) (pair, error) {
			id, err := machine.Template(ctx, b.o.machine())
			if err != nil {
				return nil, err
			}
			return b.against(ctx, id, func(ctx context.Context) (*machine.Machine, error) {
				return machine.Create(ctx, b.o.machine())
			}, nil)
		},
	}
}

// restorePair is one way to a machine, up to its first exec, beside a plain
// QEMU that is restored from one snapshot.
type restorePair struct {
	make  func(ctx context.Context) (*machine.Machine, error)
	plain *plainRestore
	done  func() error
}

func (b *bed) against(ctx context.Context, id string, make func(context.Context) (*machine.Machine, error), done func() error) (pair, error) {
	p, err := b.plainRestore(ctx, id)
	if err != nil {
		return nil, err
	}
	return &restorePair{make, p, done}, nil
}

func (p *restorePair) subject(ctx context.Context, count int) ([]sample, error) {
	ctx, cancel := deadline(ctx, restoreDeadline)
	defer cancel()
	var out []sample
	for range count {
		s, err := firstExec(ctx, p.make)
		if err != nil {
			return nil, reason(ctx, err)
		}
		out = append(out, s)
	}
	return out, nil
}

func (p *restorePair) floor(ctx context.Context, count int) ([]float64, error) {
	ctx, cancel := deadline(ctx, restoreDeadline)
	defer cancel()
	return p.plain.answers(ctx, count)
}

func (p *restorePair) close() error {
	p.plain.release()
	if p.done == nil {
		return nil
	}
	return p.done()
}

// firstExec makes a machine, runs the smallest program in it and ends it.
func firstExec(ctx context.Context, make func(context.Context) (*machine.Machine, error)) (sample, error) {
	began := time.Now()
	m, err := make(ctx)
	if err != nil {
		return sample{}, err
	}
	defer closeMachine(m)
	ready := time.Now()
	if err := runSmallest(ctx, m); err != nil {
		return sample{}, err
	}
	s := sample{value: milliseconds(time.Since(began)), phases: map[string]float64{"exec": milliseconds(time.Since(ready))}}
	for _, p := range m.Phases() {
		s.phases[p.Name] = milliseconds(p.Took)
	}
	return s, nil
}

// runSmallest runs a program that does nothing.
func runSmallest(ctx context.Context, m *machine.Machine) error { return run(ctx, m, smallest...) }

// run runs a program in the machine to its end, which must be a good one.
func run(ctx context.Context, m *machine.Machine, argv ...string) error {
	p, err := m.Exec(ctx, guestapi.ExecRequest{ID: "bench", Argv: argv}, io.Discard, io.Discard)
	if err != nil {
		return err
	}
	status, err := p.Wait()
	if err != nil {
		return err
	}
	if code := status.ExitCode(); code != 0 {
		return fmt.Errorf("%s ended with code %d", argv[0], code)
	}
	return nil
}
