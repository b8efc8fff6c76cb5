package server

import (
	"context"

	"github.com/warren-vm/warren/internal/vm"
	"github.com/warren-vm/warren/internal/vm/ram"
)

// A restore writes the differences that no flat file has into the new VM, and
// opens the overlays that are not merged. With more than this they are made one
// aside, so that a restore does not take longer the more snapshots there were
// before.
const (
	maxDifferences     = 8
	maxDifferenceBytes = 16 << 20
	// Each overlay is opened by QEMU, which takes it 2 ms.
	maxOverlays = 8
)

// flattenAside makes the newest snapshot quick to restore, if it is not, while
// the VM runs. One at a time: those that come meanwhile are
// looked at with the next snapshot.
func (s *server) flattenAside() {
	h := &s.history
	id := h.base.Manifest().ID
	if h.flattening.try() != nil {
		return
	}
	s.aside.Go(func() {
		defer h.flattening.free()
		// A failure costs later restores time and nothing else.
		if err := s.flatten(s.life, id); err != nil && s.life.Err() == nil {
			s.Log.Warn("make one of what a snapshot is made of", "snapshot", id, "error", err)
		}
	})
}

func (s *server) flatten(ctx context.Context, id string) error {
	sn, err := s.history.store.Open(ctx, id)
	if err != nil {
		return err
	}
	defer sn.Close()
	_, differences := sn.Base()
	if len(differences) > maxDifferences || ram.Size(differences) > maxDifferenceBytes {
		if _, err := sn.MakeFlat(ctx, ram.Flattener(ctx, s.Config.VM.MemBytes())); err != nil {
			return err
		}
	}
	if len(sn.Overlays()) <= maxOverlays {
		return nil
	}
	return sn.MergeOverlays(ctx, vm.Merger(ctx, s.Config.VM.DataBase))
}
