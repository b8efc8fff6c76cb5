package snapshots

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// Snapshot is a snapshot that is held, with all that it needs: nothing of it
// goes away before Close, or before the process ends.
//
// Its methods may be called from any goroutine, but for Close, which ends it.
type Snapshot struct {
	s *Store
	c *closure
	n *node

	mu   sync.Mutex
	held map[string]*os.File // in the cache, by kind and snapshot
}

// Open holds a snapshot and makes sure that it and what it needs is what was
// published: files whose sizes, inodes or times are not as they were when
// their digests were last computed are read again.
//
// The error is ErrNotFound, ErrNewer, ErrDamaged, or one of the file system's.
func (s *Store) Open(ctx context.Context, id string) (*Snapshot, error) {
	c, err := s.hold(ctx, id)
	if err != nil {
		return nil, err
	}
	sn := &Snapshot{s: s, c: c, n: c.byID[id]}
	for _, n := range c.order {
		err := s.ownCopied(n, sn.uses(n))
		if err == nil {
			err = n.check(ctx, sn.uses(n), byStamp, func(string) {})
		}
		if err != nil {
			c.release()
			return nil, neededFor(id, n.m.ID, err)
		}
	}
	return sn, nil
}

// Verify computes all digests of a snapshot and of what it needs anew,
// whatever was recorded. progress is told what is being read; it may be nil.
func (s *Store) Verify(ctx context.Context, id string, progress func(step string)) error {
	if progress == nil {
		progress = func(string) {}
	}
	c, err := s.hold(ctx, id)
	if err != nil {
		return err
	}
	defer c.release()
	for _, n := range c.order {
		if err := n.check(ctx, n.m.fileNames(), byDigest, progress); err != nil {
			return neededFor(id, n.m.ID, err)
		}
	}
	return nil
}

// uses are the files of n that a restore of sn reads.
func (sn *Snapshot) uses(n *node) []string {
	if n == sn.n {
		return n.m.fileNames()
	}
	var names []string
	if slices.Contains(sn.chain(), n) {
		names = append(names, MemoryName)
	}
	if slices.Contains(sn.n.m.Disks, n.m.ID) {
		names = append(names, n.m.overlays()...)
	}
	return names
}

// chain is the snapshots that make up the memory, from this one to the flat.
func (sn *Snapshot) chain() []*node {
	nodes := []*node{sn.n}
	for n := sn.n; n.m.Parent != ""; {
		n = sn.c.byID[n.m.Parent]
		nodes = append(nodes, n)
	}
	return nodes
}

// Manifest says what the snapshot is.
func (sn *Snapshot) Manifest() Manifest {
	m := sn.n.m
	m.Disks, m.Files = slices.Clone(m.Disks), slices.Clone(m.Files)
	return m
}

// ID is its id.
func (sn *Snapshot) ID() string { return sn.n.m.ID }

// Depth is how many snapshots it needs, itself included.
func (sn *Snapshot) Depth() int { return len(sn.c.order) }

// State is the path of the devices' state.
func (sn *Snapshot) State() string { return sn.n.path(StateName) }

// Size is what the snapshot itself takes on the disk, in bytes.
func (sn *Snapshot) Size() int64 { return usage(sn.n.dir) }

// Usage is what a snapshot takes on the disk itself, in bytes; 0 for one that is
// not there.
func (s *Store) Usage(id string) int64 {
	if CheckID(id) != nil {
		return 0
	}
	return usage(s.folder(id))
}

// usage is the disk usage of a file, or of the files in a folder.
func usage(path string) int64 {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return 0
	}
	total := st.Blocks * 512
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		entries, _ := os.ReadDir(path)
		for _, e := range entries {
			total += usage(path + "/" + e.Name())
		}
	}
	return total
}

// Close gives everything up. A second one does nothing.
func (sn *Snapshot) Close() error {
	sn.mu.Lock()
	defer sn.mu.Unlock()
	var errs []error
	for _, f := range sn.held {
		errs = append(errs, f.Close())
	}
	sn.held = nil
	return errors.Join(append(errs, sn.c.release())...)
}

// ownCopied gives the files that QEMU opens to the user it runs as, if they are
// ours: a home that root copied has lost who they belonged to.
func (s *Store) ownCopied(n *node, names []string) error {
	for _, name := range names {
		var st unix.Stat_t
		if !n.m.sparse(name) || unix.Lstat(n.path(name), &st) != nil || int(st.Uid) != os.Geteuid() || st.Mode&unix.S_IFMT != unix.S_IFREG {
			continue // what is missing is somebody else's to report
		}
		if err := s.own(n.path(name)); err != nil {
			return fmt.Errorf("snapshot %s: %w", n.m.ID, err)
		}
	}
	return nil
}
