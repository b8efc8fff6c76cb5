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

// Fork makes n running copies of the machine, from one snapshot, side by side.
// The machine itself stands still for the capture alone. The copies share
// memory and disk with it until they change them, have identities of their
// own, and end with this process unless o.Outlive is set. Of o only Hostname,
// Label, Outlive and BootTimeout count; name, if not nil, gives each copy its
// own.
//
// An error means that nothing was captured and no copy exists.
func (m *Machine) Fork(ctx context.Context, n int, o Options, name func(copy int) string) (Forks, error) {
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
		err = flatten(ctx, sn) // or each copy would have its own of what changed
	}
	if err != nil {
		if sn != nil {
			sn.Close()
		}
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
			if name != nil {
				mine.Hostname = name(i)
			}
			copy := &forks.Copies[i]
			copy.Machine, copy.Err = restoreFrom(ctx, sn, mine, began)
		})
	}
	wg.Wait()
	return forks, nil
}

// Rewind replaces the machine by one that goes on where the snapshot was made.
// The new machine has the options of this one; this one is gone. It stands
// still from the beginning, so that the two never run side by side, and goes
// on when the snapshot cannot be restored: then the error says why, and nothing
// has changed.
func (m *Machine) Rewind(ctx context.Context, id string) (*Machine, error) {
	sn, err := snapshots.In(m.home, snapshots.WithOwner(vm.Own)).Open(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("rewind: %w", err)
	}
	defer sn.Close()
	if err := m.Pause(ctx); err != nil {
		return nil, fmt.Errorf("rewind: %w", err)
	}
	next, err := restoreFrom(ctx, sn, m.options, time.Now())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("rewind: %w", err), m.Resume(context.WithoutCancel(ctx)))
	}
	if err := m.end(context.WithoutCancel(ctx)); err != nil {
		return nil, errors.Join(fmt.Errorf("rewind: %w", err), next.end(context.WithoutCancel(ctx)))
	}
	return next, nil
}

// end ends a machine that may outlive this process too.
func (m *Machine) end(ctx context.Context) error { return errors.Join(m.Kill(ctx), m.Close(ctx)) }
