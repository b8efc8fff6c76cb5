package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/supervisor/control"
	"github.com/warren-vm/warren/internal/vm"
	"github.com/warren-vm/warren/internal/vm/ram"
)

// freezer is a Machine whose RAM is a file that others will start from.
type freezer interface {
	Pause(ctx context.Context) error
	SaveDevices(ctx context.Context, f *os.File) error
}

// idleLine is what the agent says on the console when it has nothing left to
// do before it is prepared.
const idleLine = "warren: idle"

// awaitIdle waits until a guest that was booted to be a template is idle.
func (s *server) awaitIdle(ctx context.Context) error {
	for tick := time.NewTicker(5 * time.Millisecond); ; {
		for _, line := range s.console.Lines() {
			if strings.HasPrefix(line, idleLine) {
				tick.Stop()
				return nil
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			tick.Stop()
			return context.Cause(ctx)
		}
	}
}

// rehearse renews a guest that will be a template, as every copy of it will
// be: what that needs is in the guest's memory then, not on its disk, which
// spares each copy 14 of 130 ms.
func (s *server) rehearse(ctx context.Context, g *guest) error {
	if _, err := s.freezePrograms(ctx, g); err != nil {
		return err
	}
	_, err := call(ctx, g, guestapi.Renew, s.identity())
	return errors.Join(err, s.thaw(g))
}

// makeTemplate freezes a VM that was booted for it. The VM ends: its memory is
// the template's.
func (s *server) makeTemplate(ctx context.Context, req control.SnapshotRequest) (control.SnapshotInfo, error) {
	if _, fault := s.ready(); fault != nil {
		return control.SnapshotInfo{}, fault
	}
	f, ok := s.machine.(freezer)
	if !ok {
		return control.SnapshotInfo{}, control.Faultf(control.Bad, "this VM cannot be frozen")
	}
	if fault := s.history.turn.take(ctx); fault != nil {
		return control.SnapshotInfo{}, fault
	}
	defer s.history.turn.free()
	made, err := s.freeze(ctx, f, req)
	if err != nil {
		return control.SnapshotInfo{}, fmt.Errorf("make a template: %w", store.WithRemedy(err))
	}
	defer made.Close()
	s.requestStop(control.StopNow, control.End{Reason: "it was made a template", Asked: true})
	return control.SnapshotInfo{ID: req.ID, Bytes: made.Size()}, nil
}

func (s *server) freeze(ctx context.Context, f freezer, req control.SnapshotRequest) (_ *snapshots.Snapshot, err error) {
	st := snapshots.In(store.HomeOf(s.Dir.Path), snapshots.WithOwner(vm.Own))
	draft, err := st.Draft(ctx, req.ID)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, draft.Discard())
		}
	}()
	if err := f.Pause(ctx); err != nil {
		return nil, err
	}
	state, err := create(draft.Path(snapshots.StateName))
	if err != nil {
		return nil, err
	}
	err = f.SaveDevices(ctx, state)
	if err := errors.Join(err, state.Close()); err != nil {
		return nil, err
	}
	// A paused VM writes nothing, and this one never goes on.
	if err := os.Rename(s.Config.VM.Memory, draft.Path(snapshots.MemoryName)); err != nil {
		return nil, err
	}
	used, err := trim(draft.Path(snapshots.MemoryName))
	if err != nil {
		return nil, err
	}
	return draft.Publish(ctx, snapshots.Manifest{
		Kind: snapshots.Kind(req.Kind), Label: req.Label,
		Machine: s.Config.Machine, ImageID: s.Config.ImageID,
		Memory: snapshots.Memory{Kind: snapshots.MemoryFlat, Bytes: used},
	})
}

// trim makes holes of what is zero, and returns the bytes that are left.
func trim(path string) (int64, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if err := ram.Trim(f); err != nil {
		return 0, err
	}
	return store.Allocated(f)
}
