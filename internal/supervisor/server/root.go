package server

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/vm"
	"github.com/warren-vm/warren/internal/vm/ram"
)

// maxDepth is how many snapshots a new one may need. The next one is a root:
// it needs none, so that a VM can be snapshotted without end. It holds all
// memory and the whole disk, and is made while the VM runs.
const maxDepth = 128

// becomeRoot makes the draft a root when it is time, or when there are more
// overlays that are in no snapshot yet than one can have. Only then the error
// of one that cannot is returned: any other becomes a difference like those
// before it.
func (t *shot) becomeRoot(ctx context.Context, m *snapshots.Manifest) (bool, error) {
	must := len(t.h.orphans) > snapshots.MaxOverlays
	if !must && t.h.base.Depth() < maxDepth {
		return false, nil
	}
	err := t.makeRoot(ctx, m)
	if err != nil && !must {
		t.s.Log.Warn("snapshot", "error", err)
		return false, nil
	}
	return err == nil, err
}

// makeRoot makes the draft a root, or leaves it as it is. The overlays that
// are in no snapshot yet are in the root's, and not needed any more.
func (t *shot) makeRoot(ctx context.Context, m *snapshots.Manifest) (err error) {
	memory, disk := filepath.Join(t.s.Dir.Path, "root-memory"), filepath.Join(t.s.Dir.Path, "root-disk")
	defer func() {
		if err != nil {
			os.Remove(memory)
			os.Remove(disk)
			err = fmt.Errorf("make a snapshot that needs no other: %w", err)
		}
	}()
	base, differences := t.h.base.Base()
	flatten := ram.Flattener(ctx, t.s.Config.VM.MemBytes())
	err = fill(memory, func(dst *os.File) error {
		return flatten(dst, base, append(differences, t.draft.Path(snapshots.MemoryName)))
	})
	if err != nil {
		return err
	}
	overlays := append(t.h.base.Overlays(), t.h.orphans...)
	if len(overlays) > 0 {
		merge := vm.Merger(ctx, t.s.Config.VM.DataBase)
		if err := fill(disk, func(dst *os.File) error { return merge(dst, overlays) }); err != nil {
			return err
		}
		if err := os.Rename(disk, t.draft.Path(snapshots.DiskName(0))); err != nil {
			return err
		}
	}
	if err := os.Rename(memory, t.draft.Path(snapshots.MemoryName)); err != nil {
		os.Remove(t.draft.Path(snapshots.DiskName(0)))
		return err
	}
	// Only now: after a failure it becomes a difference like the others.
	if len(overlays) > 0 {
		m.Disks = []string{t.req.ID}
	}
	m.Parent, m.Memory = "", snapshots.Memory{Kind: snapshots.MemoryFlat}
	return nil
}

// fill makes a file that is QEMU's to open.
func fill(path string, build func(dst *os.File) error) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = vm.Own(path)
	if err == nil {
		err = build(f)
	}
	if closed := f.Close(); err == nil {
		err = closed
	}
	return err
}
