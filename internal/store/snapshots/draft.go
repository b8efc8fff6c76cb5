package snapshots

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/store"
)

// Draft is a snapshot being made. Nobody else sees it.
//
// Write the files at Path, then Publish, then Discard: after a Publish that
// went well Discard does nothing, so it may be deferred. A draft is for one
// goroutine.
type Draft struct {
	s       *Store
	id, dir string
	lock    *os.File // alone; nil when published or discarded
	made    Manifest // once sealed
}

// Draft makes the folder of a new snapshot. When it fails nothing is left.
func (s *Store) Draft(ctx context.Context, id string) (*Draft, error) {
	if err := CheckID(id); err != nil {
		return nil, err
	}
	d, err := s.draft(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("make snapshot %s: %w", id, store.WithRemedy(err))
	}
	return d, nil
}

func (s *Store) draft(ctx context.Context, id string) (_ *Draft, err error) {
	if err := s.make(); err != nil {
		return nil, err
	}
	if _, err := os.Lstat(s.folder(id)); err == nil {
		return nil, ErrExists
	}
	// With the gate shared no Collect sees the folder without its lock.
	gate, err := s.gate(ctx, store.LockShared)
	if err != nil {
		return nil, err
	}
	defer gate.Close()
	d := &Draft{s: s, id: id, dir: s.temporary(newPrefix, id)}
	if err := s.disk.mkdir(d.dir); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			d.lock.Close() // nil is fine
			os.RemoveAll(d.dir)
		}
	}()
	if d.lock, err = s.disk.create(filepath.Join(d.dir, lockName), 0o600); err != nil {
		return nil, err
	}
	return d, store.TryLock(d.lock, store.LockAlone)
}

// ID is the snapshot's id to be.
func (d *Draft) ID() string { return d.id }

// Path is where a file of the snapshot is to be written: StateName,
// MemoryName or a DiskName. There are no others.
func (d *Draft) Path(name string) string {
	if name != StateName && name != MemoryName && !isDisk(name) {
		panic("snapshots: a snapshot has no file " + name)
	}
	return filepath.Join(d.dir, name)
}

// Discard removes the draft; for one that was published it does nothing.
func (d *Draft) Discard() error {
	if d.lock == nil {
		return nil
	}
	dir, err := d.dir, error(nil)
	if dir == d.s.folder(d.id) { // could not be taken back
		dir = d.s.temporary(deadPrefix, d.id)
		err = os.Rename(d.dir, dir)
	}
	if err == nil {
		err = store.RemoveLocked(dir)
	}
	err = errors.Join(err, d.lock.Close())
	d.lock = nil
	return err
}

// Publish makes the draft a snapshot and holds it. m says what it is; Format,
// ID, Overlays, Files and the digests are filled in, and Created if it is zero.
//
// The files' modes are set, their owners left. When it returns nil the
// snapshot survives a power cut. When it returns an error there is no
// snapshot, and the draft is still to be discarded. ErrExists says that
// another has its id.
func (d *Draft) Publish(ctx context.Context, m Manifest) (*Snapshot, error) {
	m.Format, m.ID = format, d.id
	if m.Created.IsZero() {
		m.Created = time.Now()
	}
	m.Created = m.Created.UTC().Round(0)
	m.Files, m.NeedsSHA256 = nil, d.s.digestsOf(m.Needs())
	err := d.seal(ctx, m)
	var sn *Snapshot
	if err == nil {
		sn, err = d.commit(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("publish snapshot %s: %w", d.id, store.WithRemedy(err))
	}
	return sn, nil
}

// digestsOf are those of the manifests of snapshots. What cannot be read is
// left out: commit finds that it is not there.
func (s *Store) digestsOf(ids []string) map[string]string {
	sums := map[string]string{}
	for _, id := range ids {
		if m, err := readManifest(s.folder(id), id); err == nil {
			sums[id] = m.SHA256
		}
	}
	return sums
}

// seal computes the digests, writes the manifest and puts everything on the
// disk. If m has files already, those on disk have to be the same.
func (d *Draft) seal(ctx context.Context, m Manifest) error {
	if d.lock == nil {
		return errors.New("the draft was published or discarded")
	}
	m.Overlays = d.overlays()
	if m.Overlays > 0 && !slices.Contains(m.Disks, d.id) {
		return fmt.Errorf("there is a %s that is not part of its own disk", DiskName(0))
	}
	if err := m.checkPlan(); err != nil {
		return err
	}
	want := m.Files
	m.Files = nil
	found := stamps{Files: map[string]stamp{}}
	for _, name := range m.fileNames() {
		f, at, used, err := d.sealFile(ctx, name, m.sparse(name))
		if err != nil {
			return err
		}
		m.Files, found.Files[name] = append(m.Files, f), at
		if name == MemoryName && m.Memory.Kind == MemoryFlat && want == nil {
			m.Memory.Bytes = used
		}
	}
	if want != nil && !slices.Equal(want, m.Files) {
		return damaged(d.id, "its files are not those of its manifest")
	}
	m.SHA256 = m.sum()
	if err := m.check(); err != nil {
		return err
	}
	data := m.encode()
	if len(data) > maxManifest {
		return fmt.Errorf("its manifest has %d bytes; the most is %d", len(data), maxManifest)
	}
	found.Manifest = m.SHA256
	if err := d.s.disk.write(filepath.Join(d.dir, manifestName), data, 0o400); err != nil {
		return err
	}
	if err := d.s.disk.write(filepath.Join(d.dir, stampName), found.encode(), 0o600); err != nil {
		return err
	}
	d.made = m
	return d.s.disk.syncDir(d.dir)
}

// overlays counts the overlays that were written.
func (d *Draft) overlays() (n int) {
	for ; n < MaxOverlays; n++ {
		if _, err := os.Lstat(d.Path(DiskName(n))); err != nil {
			break
		}
	}
	return n
}

// sealFile makes one file what it stays.
func (d *Draft) sealFile(ctx context.Context, name string, sparse bool) (File, stamp, int64, error) {
	path := d.Path(name)
	fail := func(err error) (File, stamp, int64, error) { return File{}, stamp{}, 0, err }
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return fail(err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return fail(errors.Join(fmt.Errorf("%s %w", path, errNotRegular), err))
	}
	// QEMU 7.2 opens the memory for writing although its mapping is private.
	perm := fs.FileMode(0o600)
	if name == StateName {
		perm = 0o400
	}
	if err := d.s.disk.chmod(f, perm); err != nil {
		return fail(err)
	}
	if err := d.s.disk.sync(f); err != nil {
		return fail(err)
	}
	before, used, err := look(path)
	if err != nil {
		return fail(err)
	}
	sum, err := compute(ctx, path, sparse)
	if err != nil {
		return fail(err)
	}
	if after, _, err := look(path); err != nil || after != before {
		return fail(errors.Join(fmt.Errorf("%s changed while it was read", path), err))
	}
	return File{Name: name, Size: before.Size, SHA256: sum, Sparse: sparse}, before, used, nil
}

// commit gives a sealed draft its name.
func (d *Draft) commit(ctx context.Context) (_ *Snapshot, err error) {
	gate, err := d.s.gate(ctx, store.LockShared)
	if err != nil {
		return nil, err
	}
	defer gate.Close()
	c := &closure{byID: map[string]*node{}}
	defer func() {
		if err != nil {
			c.release()
		}
	}()
	if err := d.s.addNeeds(ctx, c, d.made); err != nil {
		if errors.Is(err, errGone) {
			err = fmt.Errorf("%w: it needs one that is not there: %w", ErrNotFound, err)
		}
		return nil, err
	}
	if _, cycle := c.byID[d.id]; cycle {
		return nil, ErrExists
	}
	n := &node{m: d.made, dir: d.s.folder(d.id), lock: d.lock}
	// The lock stays ours alone until the name is on the disk, so that nobody
	// opens a snapshot that is taken back.
	if err := d.s.disk.rename(d.dir, n.dir); err != nil {
		if errors.Is(err, fs.ErrExist) {
			err = ErrExists
		}
		return nil, err
	}
	if err := d.s.disk.syncDir(d.s.dir()); err != nil {
		if back := os.Rename(n.dir, d.dir); back != nil {
			d.dir = n.dir // Discard removes it from there
			err = errors.Join(err, back)
		}
		return nil, err
	}
	// Not one step, but whoever wants it alone waits at the gate.
	if err := store.Lock(ctx, d.lock, store.LockShared); err != nil {
		d.dir = n.dir
		return nil, err
	}
	d.lock = nil
	c.byID[d.id] = n
	c.order, c.locks = append(c.order, n), append(c.locks, n.lock)
	return &Snapshot{s: d.s, c: c, n: n}, nil
}
