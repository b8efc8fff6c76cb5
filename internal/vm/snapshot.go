package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/vm/ram"
)

// ErrNoMemoryFile says that a VM cannot be snapshotted because its RAM is not
// a file's private mapping: it was booted and not restored.
var ErrNoMemoryFile = errors.New("only a restored VM can be snapshotted")

// Pause stops the guest's processors, drains and flushes its disks, and
// returns when nothing moves any more. Pausing a paused VM does nothing.
func (v *VM) Pause(ctx context.Context) error {
	if err := v.qmp.Do(ctx, "stop", nil, nil); err != nil {
		return fmt.Errorf("pause the VM: %w", err)
	}
	return nil
}

// Resume lets the guest go on. A restored VM whose state is still being loaded
// goes on as soon as it is.
func (v *VM) Resume(ctx context.Context) error {
	if err := v.qmp.Do(ctx, "cont", nil, nil); err != nil {
		return fmt.Errorf("let the VM go on: %w", err)
	}
	return nil
}

// PrepareCapture does, while the VM still runs, what the next Capture would
// keep the guest waiting for.
func (v *VM) PrepareCapture(ctx context.Context) error {
	v.capture.Lock()
	defer v.capture.Unlock()
	if v.memory == nil {
		return ErrNoMemoryFile
	}
	if v.state == nil {
		var err error
		if v.state, err = v.lendState(ctx); err != nil {
			return fmt.Errorf("prepare to save the devices: %w", err)
		}
	}
	return v.memory.Prepare()
}

// Capture is what was copied out of a paused VM. The caller always closes it.
type Capture struct {
	state  *lentState // nil once it was taken
	memory *ram.Capture
	vm     *VM
	// DiskFrozen is true when the disk had changed: the overlay the VM wrote to
	// is frozen, and the VM writes to the new one.
	DiskFrozen bool
	// Took is how long each part took, of those that kept the VM paused.
	Took CaptureTimes
}

// CaptureTimes are the parts of a capture.
type CaptureTimes struct{ Devices, Memory, Disk time.Duration }

// Capture copies the devices and the changed memory of a paused VM for which
// PrepareCapture was called; what does not fit into memory goes to spill, which
// is open for writing and empty. If next is not nil and the guest has written
// to its disk, it freezes the disk's overlay and puts next on top of it.
//
// When it fails nothing has changed, but that the disk may have been frozen
// (see DiskFrozen of the capture, which is never nil). The VM can go on
// whatever happened.
func (v *VM) Capture(ctx context.Context, spill *os.File, next *Overlay) (*Capture, error) {
	v.capture.Lock()
	defer v.capture.Unlock()
	c := &Capture{vm: v}
	if v.memory == nil {
		return c, ErrNoMemoryFile
	}
	began := time.Now()
	lap := func(d *time.Duration) {
		now := time.Now()
		*d, began = now.Sub(began), now
	}
	if v.state == nil {
		return c, errors.New("save the devices: nothing was prepared")
	}
	c.state, v.state = v.state, nil
	err := c.state.save(ctx, v)
	if err != nil {
		return c, fmt.Errorf("save the devices: %w", err)
	}
	lap(&c.Took.Devices)
	if c.memory, err = v.memory.Capture(spill); err != nil {
		return c, fmt.Errorf("copy the changed memory: %w", err)
	}
	lap(&c.Took.Memory)
	if next != nil {
		c.DiskFrozen, err = v.freezeDisk(ctx, next)
		lap(&c.Took.Disk)
	}
	return c, err
}

// Finish writes the state file, which is empty, and completes the memory file
// that was the capture's spill. The VM may be running.
func (c *Capture) Finish(ctx context.Context, state *os.File) error {
	saved, err := c.takeState(ctx)
	if err == nil {
		err = writeState(state, saved)
	}
	if err != nil {
		return fmt.Errorf("write the devices' state: %w", err)
	}
	return c.memory.Finish()
}

// Pages is how many pages of memory changed: those with data, and those that
// are zero now.
func (c *Capture) Pages() (data, zero uint64) { return c.memory.Pages() }

// Commit makes the capture what the next one is compared with. It is called
// when the snapshot is there for good; without it the next capture has these
// changes too.
func (c *Capture) Commit() {
	c.vm.capture.Lock()
	defer c.vm.capture.Unlock()
	if c.vm.memory != nil {
		c.vm.memory.Commit(c.memory)
	}
}

func (c *Capture) takeState(ctx context.Context) ([]byte, error) {
	lent := c.state
	c.state = nil
	return lent.take(ctx, c.vm)
}

// Close lets go of what was copied.
func (c *Capture) Close() {
	if c.state != nil {
		c.takeState(context.Background()) // of a capture that failed
	}
	if c.memory != nil {
		c.memory.Close()
	}
}

// Sets of descriptors that QEMU is lent.
const (
	stateSet        = 1
	firstOverlaySet = 16
)

// Overlay is an empty disk overlay that QEMU has open, to be put on top of the
// one the VM writes to.
type Overlay struct {
	Path string
	node string
	set  int
}

// AddOverlay opens the empty qcow2 overlay at path, which becomes QEMU's user's.
// It does not end with ctx: nobody would know what QEMU has open.
func (v *VM) AddOverlay(ctx context.Context, path string) (*Overlay, error) {
	ctx = context.WithoutCancel(ctx)
	if user, err := vmUser(v.accel); err != nil {
		return nil, err
	} else if err := user.own(path); err != nil {
		return nil, err
	}
	v.overlays++
	o := &Overlay{Path: path, node: fmt.Sprintf("data-%d", v.overlays), set: firstOverlaySet + v.overlays}
	if err := v.lend(ctx, o); err != nil {
		return nil, fmt.Errorf("open the disk's next overlay: %w", err)
	}
	return o, nil
}

// lend gives QEMU the file in both ways in which it will want to open it: for
// writing now, for reading alone when it is frozen.
func (v *VM) lend(ctx context.Context, o *Overlay) error {
	var name string
	for _, flag := range []int{os.O_RDWR, os.O_RDONLY} {
		f, err := os.OpenFile(o.Path, flag|unix.O_NOFOLLOW, 0)
		if err != nil {
			return err
		}
		name, err = v.qmp.AddFD(ctx, o.set, f)
		f.Close()
		if err != nil {
			return err
		}
	}
	args := map[string]any{
		"driver": "qcow2", "node-name": o.node, "backing": nil, "discard": "unmap",
		"file": map[string]any{"driver": "file", "node-name": o.node + "-file", "filename": name, "discard": "unmap", "locking": "off"},
	}
	if err := v.qmp.Do(ctx, "blockdev-add", args, nil); err != nil {
		return errors.Join(err, v.qmp.RemoveFD(ctx, o.set))
	}
	return nil
}

// DropOverlay undoes AddOverlay for one that was not used.
func (v *VM) DropOverlay(ctx context.Context, o *Overlay) error {
	if err := v.qmp.Do(ctx, "blockdev-del", map[string]any{"node-name": o.node}, nil); err != nil {
		return fmt.Errorf("close the disk's unused overlay: %w", err)
	}
	// blockdev-del has closed the file; the set may be gone with it.
	v.qmp.RemoveFD(ctx, o.set)
	return nil
}

// freezeDisk puts next on top of the overlay the VM writes to, if it has
// written to it.
func (v *VM) freezeDisk(ctx context.Context, next *Overlay) (bool, error) {
	writes, err := v.diskWrites(ctx)
	if err != nil {
		return false, err
	}
	if writes == v.diskSeen {
		return false, nil
	}
	args := map[string]any{"node": v.diskNode, "overlay": next.node}
	if err := v.qmp.Do(ctx, "blockdev-snapshot", args, nil); err != nil {
		return false, fmt.Errorf("freeze the disk: %w", err)
	}
	v.diskNode, v.diskSeen = next.node, writes
	return true, nil
}

// diskWrites counts what could have changed the data disk.
func (v *VM) diskWrites(ctx context.Context) (uint64, error) {
	var devices []struct {
		QDev  string `json:"qdev"`
		Stats struct {
			Writes uint64 `json:"wr_operations"`
			Unmaps uint64 `json:"unmap_operations"`
		} `json:"stats"`
	}
	if err := v.qmp.Do(ctx, "query-blockstats", nil, &devices); err != nil {
		return 0, fmt.Errorf("ask what was written to the disk: %w", err)
	}
	for _, d := range devices {
		// An explicit id and the path below it are both seen.
		if d.QDev == dataDevice || d.QDev == "/machine/peripheral/"+dataDevice+"/virtio-backend" {
			return d.Stats.Writes + d.Stats.Unmaps, nil
		}
	}
	return 0, errors.New("ask what was written to the disk: QEMU does not know the data disk")
}
