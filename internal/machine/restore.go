package machine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/vm"
	"github.com/warren-vm/warren/internal/vm/ram"
)

// ErrIncompatible says that a snapshot was made by a QEMU, on a processor or
// with a machine that is not at hand.
var ErrIncompatible = errors.New("the snapshot cannot be restored here")

// ErrSize says that another size was asked for than a snapshot has.
var ErrSize = errors.New("the size of a machine is its snapshot's")

// Create starts a machine as a copy of its template, which is made first when
// there is none: that takes seconds, once for each size of VM, guest image,
// QEMU and accelerator. Otherwise it is Boot in milliseconds.
func Create(ctx context.Context, o Options) (*Machine, error) {
	began := time.Now()
	p, o, err := ready(ctx, o)
	if err != nil {
		return nil, err
	}
	template, err := p.template(ctx, o)
	if err != nil {
		p.release()
		return nil, err
	}
	defer template.Close()
	return p.restore(ctx, o, began, template)
}

// Restore starts a machine that goes on where the snapshot was made, with an
// identity of its own. Its size is the snapshot's: o.CPUs and o.MemMB are 0 or
// that, and o.Accel is empty or the snapshot's.
//
// What does not fit is found before a VM starts: ErrSize, ErrIncompatible,
// snapshots.ErrNotFound, ErrDamaged or ErrNewer, guestimage.ErrNotBuilt.
func Restore(ctx context.Context, id string, o Options) (*Machine, error) {
	began := time.Now()
	home, err := o.homeOf()
	if err != nil {
		return nil, err
	}
	sn, err := snapshots.In(home, snapshots.WithOwner(vm.Own)).Open(ctx, id)
	if err != nil {
		return nil, err
	}
	defer sn.Close()
	return restoreFrom(ctx, sn, o, began)
}

// restoreFrom is Restore of an open snapshot.
func restoreFrom(ctx context.Context, sn *snapshots.Snapshot, o Options, began time.Time) (*Machine, error) {
	o, err := o.sizeOf(sn.Manifest())
	if err != nil {
		return nil, err
	}
	if err := o.Check(); err != nil {
		return nil, err
	}
	o = o.withDefaults()
	home, err := o.homeOf()
	if err != nil {
		return nil, err
	}
	p, err := prepare(ctx, o, home, sn.Manifest().ImageID)
	if err != nil {
		return nil, err
	}
	if err := compatible(sn.Manifest(), p.machine); err != nil {
		p.release()
		return nil, err
	}
	return p.restore(ctx, o, began, sn)
}

// sizeOf gives o the snapshot's size, or says that it asks for another.
func (o Options) sizeOf(m snapshots.Manifest) (Options, error) {
	var faults []error
	same := func(what string, asked *int, is int) {
		if *asked != 0 && *asked != is {
			faults = append(faults, fmt.Errorf("snapshot %s has %d %s, not %d", m.ID, is, what, *asked))
		}
		*asked = is
	}
	same("CPUs", &o.CPUs, m.Machine.CPUs)
	same("MiB of memory", &o.MemMB, m.Machine.MemMB)
	if o.Accel != "" && o.Accel != "auto" && o.Accel != m.Machine.Accel {
		faults = append(faults, fmt.Errorf("snapshot %s runs with %s, not %s", m.ID, m.Machine.Accel, o.Accel))
	}
	o.Accel = m.Machine.Accel
	if len(faults) > 0 {
		return o, fmt.Errorf("%w: %w", ErrSize, errors.Join(faults...))
	}
	return o, nil
}

// compatible says what of a snapshot's machine is not at hand.
func compatible(m snapshots.Manifest, here snapshots.Machine) error {
	var faults []error
	fault := func(what, was, is string) {
		if was != is {
			faults = append(faults, fmt.Errorf("%s %q, this host has %q", what, was, is))
		}
	}
	fault("made by QEMU", m.Machine.QEMU, here.QEMU)
	fault("made on the processor", m.Machine.CPUModel, here.CPUModel)
	fault("made with the firmware", m.Machine.Firmware, here.Firmware)
	if err := vm.CanUse(vm.Accel(m.Machine.Accel)); err != nil {
		faults = append(faults, fmt.Errorf("made with the accelerator %s: %w", m.Machine.Accel, err))
	}
	if len(faults) == 0 {
		return nil
	}
	return fmt.Errorf("snapshot %s: %w: %w; restore it on a host like the one it was made on, or start afresh",
		m.ID, ErrIncompatible, errors.Join(faults...))
}

// restore starts a machine from an open snapshot whose parts p are.
func (p parts) restore(ctx context.Context, o Options, began time.Time, sn *snapshots.Snapshot) (*Machine, error) {
	m := sn.Manifest()
	flat, differences := sn.Base()
	// What every machine of its size is a copy of is worth a file to share.
	if ram.Size(differences) > maxApplied || m.Kind == snapshots.KindTemplate && len(differences) > 0 {
		if err := flatten(ctx, sn); err != nil {
			p.release()
			return nil, err
		}
		flat, differences = sn.Base()
	}
	if len(sn.Overlays()) > maxOverlays {
		if err := sn.MergeOverlays(ctx, vm.Merger(ctx, p.image.DataBase)); err != nil {
			p.release()
			return nil, err
		}
	}
	return launch(ctx, p, o, began, func(c *supervisor.Config, _ *store.VMDir) {
		c.Snapshot, c.Prepared = m.ID, m.Prepared
		c.VM.Kernel, c.VM.Initramfs, c.VM.Cmdline = "", "", ""
		c.VM.Memory, c.VM.Differences = flat, differences
		c.VM.State, c.VM.Overlays = sn.State(), sn.Overlays()
	})
}

// maxApplied is how many bytes of differences a restore writes into the new VM
// itself, which takes it 1 ms for 2 MiB each time; more than that is flattened
// once.
const maxApplied = 24 << 20

// maxOverlays is how many disk overlays a restore has QEMU open; more are
// merged once. A supervisor merges its VM's aside before there are so many.
const maxOverlays = 16

// flatten makes a flat file of a snapshot's memory, which its copies share.
func flatten(ctx context.Context, sn *snapshots.Snapshot) error {
	size := int64(sn.Manifest().Machine.MemMB) << 20
	if _, err := sn.MakeFlat(ctx, ram.Flattener(ctx, size)); err != nil {
		return fmt.Errorf("flatten the memory of snapshot %s: %w", sn.Manifest().ID, err)
	}
	return nil
}
