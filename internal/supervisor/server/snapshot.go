package server

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/supervisor/control"
	"github.com/warren-vm/warren/internal/vm"
)

// capturer is a Machine that can be snapshotted.
type capturer interface {
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error
	AddOverlay(ctx context.Context, path string) (*vm.Overlay, error)
	PrepareCapture(ctx context.Context) error
	Capture(ctx context.Context, spill *os.File, next *vm.Overlay) (*vm.Capture, error)
}

// captureDeadline bounds how long a VM is kept from going on.
const captureDeadline = time.Minute

// history is what the snapshots of a restored VM stand on.
type history struct {
	// turn is held by who pauses, captures or resumes the VM.
	turn  limiter
	store *snapshots.Store
	// base is what the VM's memory is compared with.
	base *snapshots.Snapshot
	// disks are the frozen overlays under the one written to, oldest first;
	// orphans, on top of them, are frozen but in no snapshot yet.
	disks   []string // by snapshot
	orphans []string
	active  string // path of the overlay that is written to
	count   int    // overlays of this VM so far, for their names
	spare   *vm.Overlay
	// failed is how many bytes of memory the snapshot before this one could not
	// write.
	failed int64
	paused atomic.Bool // changed by who has the turn
	frozen bool        // what the guest said when it was paused
	still  stillness

	flattening limiter
}

// adoptSnapshot holds what the VM was restored from.
func (s *server) adoptSnapshot(ctx context.Context) error {
	h := &s.history
	h.turn, h.flattening = make(limiter, 1), make(limiter, 1)
	h.active = s.Config.VM.DataDisk
	id := s.Config.Snapshot
	if id == "" {
		return nil
	}
	h.store = snapshots.In(store.HomeOf(s.Dir.Path), snapshots.WithOwner(vm.Own), snapshots.WithFaults(s.Faults))
	var err error
	if h.base, err = h.store.Open(ctx, id); err != nil {
		return err
	}
	h.disks = h.base.Manifest().Disks
	return nil
}

// letGo gives up what adoptSnapshot and later snapshots hold, once a snapshot
// that was on its way when the VM ended is done with it.
func (s *server) letGo() {
	if s.history.turn == nil { // it did not come so far
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopLimit)
	defer cancel()
	if s.history.turn.take(ctx) != nil {
		s.Log.Warn("a snapshot does not end with its VM")
		return // the locks go with the process
	}
	if s.history.base != nil {
		s.history.base.Close()
	}
}

// takeTurn waits until the VM is this caller's to pause and resume.
func (s *server) takeTurn(ctx context.Context) (capturer, *guest, func(), error) {
	g, fault := s.ready()
	if fault != nil {
		return nil, nil, nil, fault
	}
	c, ok := s.machine.(capturer)
	if !ok || s.history.base == nil {
		return nil, nil, nil, control.Faultf(control.Bad, "this VM was booted, not restored; only a restored one can be paused or snapshotted")
	}
	if fault := s.history.turn.take(ctx); fault != nil {
		return nil, nil, nil, fault
	}
	return c, g, s.history.turn.free, nil
}

// servePause stops the VM until serveResume.
func (s *server) servePause(ctx context.Context, _ guestapi.Empty) (guestapi.Empty, error) {
	c, g, free, err := s.takeTurn(ctx)
	if err != nil {
		return guestapi.Empty{}, err
	}
	defer free()
	if s.history.paused.Load() {
		return guestapi.Empty{}, nil
	}
	// What is done half has to be undone, so it does not end with the caller.
	ctx, cancel := context.WithTimeout(s.life, captureDeadline)
	defer cancel()
	frozen, err := s.freezePrograms(ctx, g)
	if err != nil {
		return guestapi.Empty{}, err
	}
	if err := c.Pause(ctx); err != nil {
		return guestapi.Empty{}, errors.Join(err, s.goOnAfter(c), s.thaw(g))
	}
	s.history.frozen = frozen
	s.history.paused.Store(true)
	return guestapi.Empty{}, nil
}

// serveResume lets the VM go on. One that is not paused has its programs
// thawed all the same: the snapshot before may have failed to.
func (s *server) serveResume(ctx context.Context, _ guestapi.Empty) (guestapi.Empty, error) {
	c, g, free, err := s.takeTurn(ctx)
	if err != nil {
		return guestapi.Empty{}, err
	}
	defer free()
	if err := s.goOnAfter(c); err != nil {
		return guestapi.Empty{}, err
	}
	s.history.paused.Store(false)
	return guestapi.Empty{}, s.thaw(g)
}

// goOnAfter lets the processors go on, whatever became of the caller and of
// the pause. Those that run already do not mind.
func (s *server) goOnAfter(c capturer) error {
	ctx, cancel := context.WithTimeout(s.life, captureDeadline)
	defer cancel()
	return c.Resume(ctx)
}

// freezePrograms stops the guest's programs until thaw. After an error they
// run: a guest may have done what it was asked and its answer be lost.
func (s *server) freezePrograms(ctx context.Context, g *guest) (all bool, err error) {
	s.history.still.begin()
	frozen, err := call(ctx, g, guestapi.Freeze, guestapi.Empty{})
	if err != nil {
		return false, errors.Join(err, s.thaw(g))
	}
	return frozen.Frozen, nil
}

// thawTries is how often a guest that does not answer is asked to thaw: what
// runs in it stands still for good otherwise.
const thawTries = 3

// thaw lets the guest's programs go on, with the clock right again. It does
// not end with the caller: programs must not stay frozen because of him.
func (s *server) thaw(g *guest) (err error) {
	var since time.Time
	for range thawTries {
		since = time.Now()
		_, err = call(s.life, g, guestapi.Thaw, guestapi.ThawRequest{UnixNano: since.UnixNano()})
		var fault *control.Fault
		if !errors.As(err, &fault) || fault.Kind != control.Silent {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("let the guest's programs go on: %w", err)
	}
	s.history.still.end()
	s.mendClock(s.life, g, time.Since(since))
	return nil
}

// serveSnapshot makes a snapshot. When it fails no snapshot exists, and the VM
// is as it was.
func (s *server) serveSnapshot(ctx context.Context, req control.SnapshotRequest) (control.SnapshotInfo, error) {
	if s.Config.VM.SharedMemory {
		return s.makeTemplate(ctx, req)
	}
	c, g, free, err := s.takeTurn(ctx)
	if err != nil {
		return control.SnapshotInfo{}, err
	}
	defer free()
	shot := &shot{s: s, h: &s.history, vm: c, guest: g, req: req, since: time.Now()}
	defer shot.close()
	if err := shot.take(ctx); err != nil {
		return control.SnapshotInfo{}, fmt.Errorf("snapshot: %w", store.WithRemedy(err))
	}
	s.flattenAside()
	return shot.info, nil
}

// shot is one snapshot on its way.
type shot struct {
	s     *server
	h     *history
	vm    capturer
	guest *guest
	req   control.SnapshotRequest

	draft         *snapshots.Draft
	state, memory *os.File
	capture       *vm.Capture
	info          control.SnapshotInfo
	since         time.Time
}

// lap closes a phase.
func (t *shot) lap(name string) {
	now := time.Now()
	t.add(name, now.Sub(t.since))
	t.since = now
}

func (t *shot) add(name string, took time.Duration) {
	t.info.Phases = append(t.info.Phases, control.Phase{Name: name, Microseconds: took.Microseconds()})
}

func (t *shot) take(ctx context.Context) error {
	if err := t.prepare(ctx); err != nil {
		return err
	}
	t.lap(control.PhaseDraft)
	if err := t.standStill(); err != nil {
		return err
	}
	data, _ := t.capture.Pages()
	t.h.failed = int64(data) * pageSize
	if err := t.capture.Finish(ctx, t.state); err != nil {
		return err
	}
	t.lap(control.PhaseWrite)
	if err := t.publish(ctx); err != nil {
		return err
	}
	t.h.failed = 0
	return nil
}

// maxOrphans is how many snapshots in a row may fail after the disk had been
// frozen. More overlays than a snapshot can have go into a root.
const maxOrphans = 4 * snapshots.MaxOverlays

// prepare does before the pause what can be done before it.
func (t *shot) prepare(ctx context.Context) (err error) {
	if n := len(t.h.orphans); n >= maxOrphans {
		return fmt.Errorf("%d snapshots of this VM failed after its disk had been frozen, and there is no room for one more; "+
			"copy what you need out of it and start afresh", n)
	}
	if t.draft, err = t.h.store.Draft(ctx, t.req.ID); err != nil {
		return err
	}
	if t.state, err = create(t.draft.Path(snapshots.StateName)); err != nil {
		return err
	}
	if t.memory, err = create(t.draft.Path(snapshots.MemoryName)); err != nil {
		return err
	}
	if err := reserve(t.memory, t.h.failed); err != nil {
		return err
	}
	if t.h.spare == nil {
		if err := t.addSpare(ctx); err != nil {
			return err
		}
	}
	if snapshots.Kind(t.req.Kind) == snapshots.KindTemplate {
		if err := t.s.rehearse(ctx, t.guest); err != nil {
			return err
		}
	}
	if err := t.vm.PrepareCapture(ctx); err != nil {
		return err
	}
	// What the guest wrote goes to the host's disk now; the pause would wait
	// for it.
	return syncFile(t.h.active)
}

func create(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
}

// reserve makes room for as much as the snapshot before this one could not
// write. It costs a VM whose snapshots fail an overlay each time its disk is
// frozen for nothing: with a full disk it is not.
func reserve(f *os.File, bytes int64) error {
	if bytes == 0 {
		return nil
	}
	err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, bytes)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return &os.PathError{Op: "write", Path: f.Name(), Err: err}
	}
	return nil // any other is a file system that cannot
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Fdatasync(int(f.Fd()))
}

// addSpare makes the overlay that the VM will write to after the snapshot. It
// stays for the next one if the disk has not changed.
func (t *shot) addSpare(ctx context.Context) error {
	t.h.count++
	path := filepath.Join(t.s.Dir.Path, fmt.Sprintf("data-%d.qcow2", t.h.count))
	if err := store.CopySparse(t.s.Config.DataTemplate, path); err != nil {
		return err
	}
	spare, err := t.vm.AddOverlay(ctx, path)
	if err != nil {
		return errors.Join(err, os.Remove(path))
	}
	t.h.spare = spare
	return nil
}

// standStill freezes the guest's programs, so that none of them runs in a copy
// before it has its own identity, stops the processors, copies, and lets
// everything go on, whatever happened. A caller who gives up meanwhile is not
// listened to: QEMU and the guest would do what they were asked all the same.
func (t *shot) standStill() (err error) {
	ctx, cancel := context.WithTimeout(t.s.life, captureDeadline)
	defer cancel()
	if t.h.paused.Load() {
		t.info.Frozen = t.h.frozen
		return t.copy(ctx)
	}
	if t.info.Frozen, err = t.s.freezePrograms(ctx, t.guest); err != nil {
		return err
	}
	t.lap(control.PhaseFreeze)
	defer func() {
		err = errors.Join(err, t.s.thaw(t.guest))
		t.lap(control.PhaseThaw)
	}()
	stopped := time.Now()
	if err = t.vm.Pause(ctx); err == nil {
		t.lap(control.PhaseStop)
		err = t.copy(ctx)
	}
	since := time.Now()
	err = errors.Join(err, t.s.goOnAfter(t.vm))
	t.since = time.Now()
	t.add(control.PhaseGo, t.since.Sub(since))
	t.info.PauseUS = t.since.Sub(stopped).Microseconds()
	return err
}

// copy takes what is to be kept out of the paused VM.
func (t *shot) copy(ctx context.Context) (err error) {
	t.capture, err = t.vm.Capture(ctx, t.memory, t.h.spare)
	if t.capture.DiskFrozen {
		t.h.orphans = append(t.h.orphans, t.h.active)
		t.h.active, t.h.spare = t.h.spare.Path, nil
	}
	took := t.capture.Took
	t.add(control.PhaseDevices, took.Devices)
	t.add(control.PhaseMemory, took.Memory)
	t.add(control.PhaseDisk, took.Disk)
	return err
}

// publish makes the draft a snapshot, and the snapshot the VM's base.
func (t *shot) publish(ctx context.Context) error {
	m := t.h.base.Manifest()
	m.Parent, m.Kind, m.Label, m.Prepared = m.ID, snapshots.Kind(t.req.Kind), t.req.Label, true
	m.Created, m.Files = time.Time{}, nil
	m.Disks = slices.Clone(t.h.disks)
	data, zero := t.capture.Pages()
	m.Memory = snapshots.Memory{Kind: snapshots.MemoryDifference, Bytes: int64(data) * pageSize}
	if len(t.h.orphans) > 0 {
		m.Disks = append(m.Disks, t.req.ID)
	}
	orphans := t.h.orphans
	t.info.DiskChanged = len(orphans) > 0
	isRoot, err := t.becomeRoot(ctx, &m)
	var moved int
	if err == nil && !isRoot {
		moved, err = t.moveOverlays()
	}
	if err == nil {
		var made *snapshots.Snapshot
		if made, err = t.draft.Publish(ctx, m); err == nil {
			t.draft = nil
			t.adopt(made)
		}
	}
	if err != nil {
		// QEMU has them open and does not mind; the next snapshot takes them.
		// Where they are now the draft knows: it may have a name already.
		for i, path := range t.h.orphans[:moved] {
			err = errors.Join(err, os.Rename(t.draft.Path(snapshots.DiskName(i)), path))
		}
		return err
	}
	if isRoot {
		for _, path := range orphans {
			os.Remove(path) // QEMU has them open
		}
	}
	t.lap(control.PhasePublish)
	t.info.ID, t.info.Parent, t.info.DataPages, t.info.ZeroPages = m.ID, m.Parent, data, zero
	t.info.ID = t.req.ID
	t.info.Bytes = t.h.base.Size()
	return nil
}

const pageSize = 4096

// moveOverlays gives the draft the overlays that are frozen and in no snapshot
// yet, and says how many it did.
func (t *shot) moveOverlays() (moved int, err error) {
	for i, path := range t.h.orphans {
		if err := os.Rename(path, t.draft.Path(snapshots.DiskName(i))); err != nil {
			return i, err
		}
	}
	return len(t.h.orphans), nil
}

// adopt goes on from a snapshot that exists now.
func (t *shot) adopt(made *snapshots.Snapshot) {
	t.capture.Commit()
	old := t.h.base
	t.h.base, t.h.disks, t.h.orphans = made, made.Manifest().Disks, nil
	old.Close() // what it needs is needed by the new one, which holds it
	t.s.mu.Lock()
	t.s.record.Snapshot = made.Manifest().ID
	t.s.mu.Unlock()
}

func (t *shot) close() {
	for _, f := range []*os.File{t.state, t.memory} {
		if f != nil {
			f.Close()
		}
	}
	if t.capture != nil {
		t.capture.Close()
	}
	if t.draft != nil {
		if err := t.draft.Discard(); err != nil {
			t.s.Log.Warn("discard a snapshot", "error", err)
		}
	}
}

// serve offers one call about the VM as a whole.
func serve[Req, Resp any](s *server, mux *http.ServeMux, path string, answer func(context.Context, Req) (Resp, error)) {
	mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) {
		req, err := guestapi.Decode[Req](r.Body, control.MaxFault)
		if err != nil {
			control.WriteFault(w, badRequest(err))
			return
		}
		ctx, cancel := s.withLife(r.Context())
		defer cancel()
		resp, err := answer(ctx, req)
		if err != nil {
			control.WriteFault(w, asFault(err))
			return
		}
		writeJSON(w, resp)
	})
}
