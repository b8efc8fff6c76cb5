package machine

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/vm"
)

// MaxForks is how many copies one call of Fork makes at most.
const MaxForks = 1000

// Save makes a snapshot that is kept until it is deleted.
//
// When it returns without an error the snapshot survives a power cut. When it
// returns an error no snapshot exists and the machine runs on.
func (m *Machine) Save(ctx context.Context, label string) (supervisor.SnapshotInfo, error) {
	return m.Snapshot(ctx, supervisor.SnapshotRequest{ID: snapshots.NewID(), Kind: string(snapshots.KindSnapshot), Label: label})
}

// Forked is one copy that Fork was to make: a machine, or why there is none.
type Forked struct {
	Machine *Machine
	Err     error
}

// Forks is what Fork did.
type Forks struct {
	// Capture describes the one snapshot that all copies are of. It goes when
	// nothing needs it any more.
	Capture supervisor.SnapshotInfo
	// Copies are in order; each may have failed on its own.
	Copies []Forked
}

// ForkHooks are what Fork asks and tells on its way. Each may be nil.
type ForkHooks struct {
	// Name gives each copy its host name.
	Name func(copy int) string
	// Ready is told of each copy as soon as it runs or has failed, by several
	// goroutines at once; Fork waits for it. Who has work for every copy gives
	// it here: copies that wait for the last of many cost the others time.
	Ready func(copy int, f Forked)
}

// Fork makes n running copies of the machine, from one snapshot, side by side.
// The machine itself stands still for the capture alone. The copies share
// memory and disk with it until they change them, have identities of their
// own, and end with this process unless o.Outlive is set. Of o only Hostname,
// Label, Outlive and BootTimeout count.
//
// An error means that no copy exists.
func (m *Machine) Fork(ctx context.Context, n int, o Options, hooks ForkHooks) (Forks, error) {
	if n < 1 || n > MaxForks {
		return Forks{}, fmt.Errorf("fork %d ways: 1 to %d are possible", n, MaxForks)
	}
	began := time.Now()
	capture, err := m.Snapshot(ctx, supervisor.SnapshotRequest{ID: snapshots.NewID(), Kind: string(snapshots.KindFork)})
	if err != nil {
		return Forks{}, fmt.Errorf("fork: %w", err)
	}
	forks := Forks{Capture: capture, Copies: make([]Forked, n)}
	sn, err := snapshots.In(m.home, snapshots.WithOwner(vm.Own)).Open(ctx, capture.ID)
	if err == nil && n > 1 {
		if err = flatten(ctx, sn); err != nil { // or each copy would have its own of what changed
			err = errors.Join(err, sn.Close())
		}
	}
	if err != nil {
		// The capture stays as what the machine's next snapshot is compared with.
		return Forks{}, fmt.Errorf("fork: %w", err)
	}
	defer sn.Close()
	// The rest is the machine's own.
	o = Options{
		Home: m.options.Home, VMM: m.options.VMM, QEMU: m.options.QEMU,
		Hostname: o.Hostname, Label: o.Label, Outlive: o.Outlive, BootTimeout: o.BootTimeout,
	}
	places := make(chan struct{}, 2*runtime.NumCPU())
	var wg sync.WaitGroup
	for i := range forks.Copies {
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			mine := o
			if hooks.Name != nil {
				mine.Hostname = hooks.Name(i)
			}
			copy := &forks.Copies[i]
			copy.Machine, copy.Err = restoreFrom(ctx, sn, mine, began)
			if hooks.Ready != nil {
				hooks.Ready(i, *copy)
			}
		})
	}
	wg.Wait()
	return forks, nil
}

// Rewind replaces the machine by one that goes on where the snapshot was made.
// The new machine has the options of this one; this one is gone. It stands
// still from the beginning, so that the two never run side by side. When the
// snapshot cannot be restored it is again as it was, running or paused, and the
// error says why.
func (m *Machine) Rewind(ctx context.Context, id string) (*Machine, error) {
	sn, err := snapshots.In(m.home, snapshots.WithOwner(vm.Own)).Open(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("rewind: %w", err)
	}
	defer sn.Close()
	was, err := m.Status(ctx)
	if err == nil {
		err = m.Pause(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("rewind: %w", err)
	}
	next, err := restoreFrom(ctx, sn, m.options, time.Now())
	if err != nil {
		err = fmt.Errorf("rewind: %w", err)
		if !was.Paused {
			err = errors.Join(err, m.Resume(context.WithoutCancel(ctx)))
		}
		return nil, err
	}
	if err := m.end(context.WithoutCancel(ctx)); err != nil {
		return nil, errors.Join(fmt.Errorf("rewind: %w", err), next.end(context.WithoutCancel(ctx)))
	}
	return next, nil
}

// end ends a machine that may outlive this process too.
func (m *Machine) end(ctx context.Context) error { return errors.Join(m.Kill(ctx), m.Close(ctx)) }
