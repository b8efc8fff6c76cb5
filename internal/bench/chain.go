package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/vm"
	"github.com/warren-vm/warren/internal/vm/ram"
)

// restore measures a VM that goes on from a snapshot of a running one.
func restore() Benchmark {
	return Benchmark{
		Name:  "restore",
		Title: "restore of a snapshot to its first exec",
		Floor: "plain restore, one answer",
		Unit:  Milliseconds,
		N:     20,
		Bars:  []Bar{{Of: "ratio", AtMost: 1.6}},
		open:  openRestore,
	}
}

func openRestore(ctx context.Context, bed *bed) (pair, error) {
	made, err := bed.chain(ctx, 1)
	remove := func() error { return bed.remove(made) }
	if err != nil {
		return nil, errors.Join(err, remove())
	}
	template, err := machine.Template(ctx, bed.o.machine())
	if err != nil {
		return nil, errors.Join(err, remove())
	}
	p, err := bed.against(ctx, template, func(ctx context.Context) (*machine.Machine, error) {
		return machine.Restore(ctx, made[0], bed.o.machine())
	}, remove)
	if err != nil {
		return nil, errors.Join(err, remove())
	}
	return p, nil
}

// chain1 and chain50 measure the same after so many snapshots in a row; the
// floor of the second is the first snapshot of its chain.
func chain1() Benchmark {
	b := restore()
	b.Name, b.Title, b.N = "chain-1", "restore after 1 snapshot", 10
	return b
}

func chain50() Benchmark {
	return Benchmark{
		Name:  "chain-50",
		Title: "restore after 50 chained snapshots",
		Floor: "restore of the first of them",
		Unit:  Milliseconds,
		N:     10,
		Bars:  []Bar{{Of: "ratio", AtMost: 1.2}},
		open: func(ctx context.Context, bed *bed) (pair, error) {
			made, err := bed.chain(ctx, 50)
			if err != nil {
				return nil, errors.Join(err, bed.remove(made))
			}
			return &chainPair{bed, made}, nil
		},
	}
}

type chainPair struct {
	bed  *bed
	made []string
}

func (p *chainPair) restore(ctx context.Context, id string) (sample, error) {
	ctx, cancel := deadline(ctx, restoreDeadline)
	defer cancel()
	s, err := firstExec(ctx, func(ctx context.Context) (*machine.Machine, error) {
		return machine.Restore(ctx, id, p.bed.o.machine())
	})
	return s, reason(ctx, err)
}

func (p *chainPair) subject(ctx context.Context, count int) ([]sample, error) {
	var out []sample
	for range count {
		s, err := p.restore(ctx, p.made[len(p.made)-1])
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

func (p *chainPair) floor(ctx context.Context, count int) ([]float64, error) {
	var out []float64
	for range count {
		s, err := p.restore(ctx, p.made[0])
		if err != nil {
			return nil, err
		}
		out = append(out, s.value)
	}
	return out, nil
}

func (p *chainPair) close() error { return p.bed.remove(p.made) }

// settleTime is how long the flattening of a chain may take, which goes on
// aside after the last snapshot.
const settleTime = 30 * time.Second

// chain makes so many snapshots of one machine, each with a little of memory
// and of the disk changed.
func (b *bed) chain(ctx context.Context, length int) (made []string, err error) {
	m, err := machine.Create(ctx, b.o.machine())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, closeMachine(m)) }()
	for i := range length {
		change := fmt.Sprintf("head -c 1048576 /dev/urandom > /dev/shm/%d; echo %d >> /root/log; sync", i, i)
		if err := run(ctx, m, "sh", "-c", change); err != nil {
			return made, err
		}
		info, err := m.Save(ctx, "kosa8 bench")
		if err != nil {
			return made, err
		}
		made = append(made, info.ID)
	}
	return made, b.awaitFlat(ctx, made[length-1])
}

// awaitFlat waits until what a restore has to do for the history is little.
func (b *bed) awaitFlat(ctx context.Context, id string) error {
	for end := time.Now().Add(settleTime); ; time.Sleep(50 * time.Millisecond) {
		sn, err := snapshots.In(b.home, snapshots.WithOwner(vm.Own)).Open(ctx, id)
		if err != nil {
			return err
		}
		_, differences := sn.Base()
		left, overlays := ram.Size(differences), len(sn.Overlays())
		sn.Close()
		if left <= 16<<20 && overlays <= 8 || time.Now().After(end) {
			return nil
		}
	}
}

// rewind measures going back to a snapshot in place of the running machine,
// against making a new one.
func rewind() Benchmark {
	return Benchmark{
		Name:  "rewind",
		Title: "rewind to a snapshot, first exec",
		Floor: "create, first exec",
		Unit:  Milliseconds,
		N:     20,
		Bars:  []Bar{{Of: "ratio", AtMost: 1.5}},
		open: func(ctx context.Context, b *bed) (pair, error) {
			m, err := machine.Create(ctx, b.o.machine())
			if err != nil {
				return nil, err
			}
			info, err := m.Save(ctx, "kosa8 bench")
			if err != nil {
				return nil, errors.Join(err, closeMachine(m))
			}
			return &rewindPair{b, m, info.ID}, nil
		},
	}
}

type rewindPair struct {
	bed *bed
	m   *machine.Machine
	id  string
}

func (p *rewindPair) subject(ctx context.Context, count int) ([]sample, error) {
	ctx, cancel := deadline(ctx, restoreDeadline)
	defer cancel()
	var out []sample
	for range count {
		began := time.Now()
		next, err := p.m.Rewind(ctx, p.id)
		if err != nil {
			return nil, reason(ctx, err)
		}
		p.m = next
		ready := time.Now()
		if err := runSmallest(ctx, p.m); err != nil {
			return nil, reason(ctx, err)
		}
		out = append(out, sample{milliseconds(time.Since(began)), map[string]float64{
			"rewind": milliseconds(ready.Sub(began)), "exec": milliseconds(time.Since(ready)),
		}})
	}
	return out, nil
}

func (p *rewindPair) floor(ctx context.Context, count int) ([]float64, error) {
	ctx, cancel := deadline(ctx, restoreDeadline)
	defer cancel()
	var out []float64
	for range count {
		s, err := firstExec(ctx, func(ctx context.Context) (*machine.Machine, error) {
			return machine.Create(ctx, p.bed.o.machine())
		})
		if err != nil {
			return nil, reason(ctx, err)
		}
		out = append(out, s.value)
	}
	return out, nil
}

func (p *rewindPair) close() error {
	return errors.Join(closeMachine(p.m), p.bed.remove([]string{p.id}))
}
