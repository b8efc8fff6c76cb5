package snapshots

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/warren-vm/warren/internal/store"
)

// maxClosure bounds how many snapshots one can need. Each is an open file,
// and a manifest of so many disks still fits in its 64 KiB.
const maxClosure = 512

// node is one snapshot that is held.
type node struct {
	m    Manifest
	dir  string
	lock *os.File // shared
}

func (n *node) path(name string) string { return filepath.Join(n.dir, name) }

// closure is snapshots with all that they need, all held. What one needs
// stands before it in order.
type closure struct {
	order []*node
	byID  map[string]*node // nil while what it needs is being looked for
	locks []*os.File
}

func (c *closure) release() error {
	var errs []error
	for _, f := range c.locks {
		errs = append(errs, f.Close())
	}
	c.locks = nil
	return errors.Join(errs...)
}

// releaseAllBut keeps one lock. What the snapshot needs stays as long as it is
// there itself; a chain of hundreds would take tens of thousands of files.
func (c *closure) releaseAllBut(n *node) {
	for _, f := range c.locks {
		if f != n.lock {
			f.Close()
		}
	}
	c.locks = []*os.File{n.lock}
}

// hold holds a snapshot and all that it needs.
func (s *Store) hold(ctx context.Context, id string) (*closure, error) {
	if err := CheckID(id); err != nil {
		return nil, err
	}
	gate, err := s.gate(ctx, store.LockShared)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, s.notFound(id)
	}
	if err != nil {
		return nil, fmt.Errorf("open snapshot %s: %w", id, store.WithRemedy(err))
	}
	defer gate.Close()
	c := &closure{byID: map[string]*node{}}
	if err := s.add(ctx, c, id); err != nil {
		c.release()
		if errors.Is(err, errGone) {
			return nil, s.notFound(id)
		}
		if d := (*damage)(nil); errors.As(err, &d) {
			err = neededFor(id, d.id, err)
		}
		return nil, err
	}
	return c, nil
}

var (
	errGone  = errors.New("is gone")
	errUnfit = errors.New("does not fit what it needs")
)

// add takes a snapshot and what it needs into c. The gate must be shared.
// errGone says that there is no such snapshot; one that is needed and gone is
// damage.
func (s *Store) add(ctx context.Context, c *closure, id string) error {
	if n, seen := c.byID[id]; seen {
		if n == nil {
			return damaged(id, "it needs itself")
		}
		return nil
	}
	if len(c.byID) >= maxClosure {
		return fmt.Errorf("snapshot %s is one of more than %d that need each other; start the sandbox fresh", id, maxClosure)
	}
	c.byID[id] = nil
	n, err := s.lock(ctx, id)
	if err != nil {
		return err
	}
	c.locks = append(c.locks, n.lock)
	if n.m, err = readManifest(n.dir, id); err != nil {
		return err
	}
	if err := s.addNeeds(ctx, c, n.m); err != nil {
		if errors.Is(err, errGone) || errors.Is(err, errUnfit) {
			return damaged(id, "%v", err) // no longer about the one asked for
		}
		return err
	}
	c.byID[id] = n
	c.order = append(c.order, n)
	return nil
}

// addNeeds takes what m needs into c and checks that it fits: errUnfit.
func (s *Store) addNeeds(ctx context.Context, c *closure, m Manifest) error {
	for _, need := range m.Needs() {
		if err := s.add(ctx, c, need); err != nil {
			return err
		}
		if !m.madeOn(c.byID[need].m) {
			return fmt.Errorf("it %w: the snapshot %s that is here is another than the one it was made on", errUnfit, need)
		}
	}
	if m.Parent != "" {
		if was := c.byID[m.Parent].m.Machine.MemMB; was != m.Machine.MemMB {
			return fmt.Errorf("it %w: its machine has %d MB of memory, its parent's %d", errUnfit, m.Machine.MemMB, was)
		}
	}
	for _, disk := range m.Disks {
		if disk != m.ID && c.byID[disk].m.Overlays == 0 {
			return fmt.Errorf("it %w: its disk has the overlay of %s, which has none", errUnfit, disk)
		}
	}
	return nil
}

// lock takes the lock of a snapshot, shared. With the gate shared only its
// maker can still have it alone, and not for long.
func (s *Store) lock(ctx context.Context, id string) (*node, error) {
	n := &node{dir: s.folder(id)}
	f, err := os.Open(n.path(lockName))
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(n.dir); err == nil {
			return nil, damaged(id, "it has no lock")
		}
		return nil, fmt.Errorf("snapshot %s %w", id, errGone)
	}
	if err != nil {
		return nil, fmt.Errorf("open snapshot %s: %w", id, store.WithRemedy(err))
	}
	if err := store.Lock(ctx, f, store.LockShared); err != nil {
		f.Close()
		return nil, fmt.Errorf("open snapshot %s: %w", id, err)
	}
	// A publication that failed goes back to being a draft.
	if !store.IsAt(f, n.path(lockName)) {
		f.Close()
		return nil, fmt.Errorf("snapshot %s %w", id, errGone)
	}
	n.lock = f
	return n, nil
}
