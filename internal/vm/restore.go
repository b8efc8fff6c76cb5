package vm

import (
	"context"
	"errors"
	"fmt"

	"github.com/warren-vm/warren/internal/vm/ram"
)

// load brings a VM that waits for its state to where its snapshot was made: its
// memory first, because devices look into it when they are loaded. The VM goes
// on at Resume; a state that QEMU does not take ends it, and Exit says why.
func (v *VM) load(ctx context.Context, s Spec) error {
	if err := v.attach(s); err != nil {
		return err
	}
	for _, path := range s.Differences {
		if err := v.apply(path, s.MemBytes()); err != nil {
			return fmt.Errorf("restore the memory: %w", err)
		}
	}
	if err := v.memory.Settle(); err != nil {
		return fmt.Errorf("restore the memory: %w", err)
	}
	state, err := OpenState(s.State)
	if err != nil {
		return fmt.Errorf("restore the devices: %w", err)
	}
	defer state.Close()
	const name = "state"
	if err := v.qmp.GetFD(ctx, name, state); err != nil {
		return fmt.Errorf("restore the devices: %w", err)
	}
	if err := v.qmp.Do(ctx, "migrate-incoming", map[string]any{"uri": "fd:" + name}, nil); err != nil {
		return fmt.Errorf("restore the devices: %w", err)
	}
	return nil
}

func (v *VM) apply(path string, size int64) error {
	d, err := ram.OpenDifference(path, size)
	if err != nil {
		return err
	}
	return errors.Join(v.ram.Inject(d), d.Close())
}

// attach opens the RAM of a VM that maps it privately, so that it can be
// snapshotted.
func (v *VM) attach(s Spec) error {
	var err error
	if v.ram, err = ram.Attach(v.PID(), s.Memory, s.MemBytes()); err != nil {
		return fmt.Errorf("find the VM's memory: %w", err)
	}
	v.memory = ram.NewTracker(v.ram)
	return nil
}
