package bench

import (
	"context"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/supervisor"
)

// execDeadline bounds a batch on either side.
const execDeadline = 2 * time.Minute

// execute measures the round trip of the smallest program there is, against
// what the agent needs to start it and wait for it.
func execute() Benchmark {
	return Benchmark{
		Name:  "exec",
		Title: "round trip of `true`",
		Floor: "in the guest",
		Unit:  Milliseconds,
		N:     200,
		Batch: 20,
		Bars:  []Bar{{Of: "ratio", AtMost: 1.5}},
		open: func(ctx context.Context, b *bed) (pair, error) {
			m, err := machine.Boot(ctx, b.o.machine())
			if err != nil {
				return nil, err
			}
			return &execPair{m}, nil
		},
	}
}

type execPair struct{ m *machine.Machine }

// smallest is the program that does nothing.
var smallest = []string{"true"}

func (p *execPair) subject(ctx context.Context, count int) ([]sample, error) {
	ctx, cancel := deadline(ctx, execDeadline)
	defer cancel()
	var out []sample
	for range count {
		began := time.Now()
		if err := runSmallest(ctx, p.m); err != nil {
			return nil, reason(ctx, err)
		}
		took := time.Since(began)
		out = append(out, sample{value: milliseconds(took)})
	}
	return out, nil
}

func (p *execPair) floor(ctx context.Context, count int) ([]float64, error) {
	ctx, cancel := deadline(ctx, execDeadline)
	defer cancel()
	info, err := supervisor.Do(ctx, p.m.Client, guestapi.SpawnTime, guestapi.SpawnTimeRequest{Argv: smallest, Count: count})
	if err != nil {
		return nil, reason(ctx, err)
	}
	var out []float64
	for _, us := range info.Microseconds {
		out = append(out, float64(us)/1000)
	}
	return out, nil
}

func (p *execPair) close() error { return closeMachine(p.m) }
