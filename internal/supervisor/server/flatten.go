package server

import (
	"context"
	"os"

	"github.com/warren-vm/warren/internal/vm/ram"
)

// A restore writes the differences that no flat file has into the new VM. With
// more than this a flat file is made aside, so that a restore does not take
// longer the more snapshots there were before.
const (
	maxDifferences     = 8
	maxDifferenceBytes = 16 << 20
)

// flattenAside makes a flat file of the newest snapshot's memory if it would
// be needed, while the VM runs. One at a time: those that come meanwhile are
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
			s.Log.Warn("make a flat file of a snapshot's memory", "snapshot", id, "error", err)
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
	var total int64
	for _, path := range differences {
		if info, err := os.Stat(path); err == nil {
			total += info.Size()
		}
	}
	if len(differences) <= maxDifferences && total <= maxDifferenceBytes {
		return nil
	}
	_, err = sn.MakeFlat(ctx, ram.Flattener(ctx, s.Config.VM.MemBytes()))
	return err
}
