package snapshots

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/store"
)

// cache is one kind of files that are made of snapshots and can be made again.
type cache string

// Flat memory, and overlays of a disk merged into one.
const (
	ramCache  cache = "ram"
	diskCache cache = "disk"
)

// cacheRoot is the folder of the files made in any boot of the host; its rooms
// are one boot's each. A reboot empties the page cache, and with it most of
// what such a file is good for.
func (s *Store) cacheRoot(c cache) string { return filepath.Join(s.home.Cache(), string(c)) }

// cacheDir is the folder of this boot.
func (s *Store) cacheDir(c cache) (string, error) {
	boot, err := store.BootID()
	return filepath.Join(s.cacheRoot(c), boot), err
}

// flatStamp proves that a flat file is the one that was made for a manifest.
type flatStamp struct {
	Manifest string `json:"manifest"`
	stamp
}

func stampOf(flat string) string { return flat + ".stamp" }
func lockOf(flat string) string  { return flat + ".lock" }

// readFlatStamp says whether the flat file is the one that was stamped.
func readFlatStamp(flat, manifest string) bool {
	data, err := readSmall(stampOf(flat))
	if err != nil {
		return false
	}
	var was flatStamp
	if json.Unmarshal(data, &was) != nil || was.Manifest != manifest {
		return false
	}
	is, _, err := look(flat)
	return err == nil && was.stamp == is
}

// Base is what the memory is made from: the nearest flat file, be it of this
// snapshot or of one before it, in the store or in the cache, and the
// difference files to apply to it, oldest first. Both stay until Close.
func (sn *Snapshot) Base() (flat string, differences []string) {
	for _, n := range sn.chain() {
		if path, ok := sn.flat(n); ok {
			slices.Reverse(differences)
			return path, differences
		}
		differences = append(differences, n.path(MemoryName))
	}
	panic("snapshots: a chain without a flat file was opened") // Publish and Open refuse it
}

// Flat is this snapshot's own flat memory, if there is one. It stays until
// Close.
func (sn *Snapshot) Flat() (string, bool) { return sn.flat(sn.n) }

// flat finds the flat memory of a snapshot, and holds it if it is cached.
func (sn *Snapshot) flat(n *node) (string, bool) {
	if n.m.Memory.Kind == MemoryFlat {
		return n.path(MemoryName), true
	}
	return sn.cached(ramCache, n)
}

// cached finds what the cache has of a snapshot, and holds it.
func (sn *Snapshot) cached(c cache, n *node) (string, bool) {
	dir, err := sn.s.cacheDir(c)
	if err != nil {
		return "", false
	}
	path := filepath.Join(dir, n.m.ID)
	sn.mu.Lock()
	defer sn.mu.Unlock()
	key := string(c) + "/" + n.m.ID
	f := sn.held[key]
	if f == nil || !store.IsAt(f, path) {
		if f, err = os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0); err != nil {
			return "", false
		}
		if store.TryLock(f, store.LockShared) != nil || !store.IsAt(f, path) {
			f.Close()
			return "", false
		}
		sn.keep(key, f)
	}
	if !readFlatStamp(path, n.m.SHA256) {
		return "", false
	}
	now := time.Now()
	_ = os.Chtimes(stampOf(path), now, now) // Collect takes the oldest first
	return path, true
}

// keep holds a file of the cache until Close. sn.mu is held.
func (sn *Snapshot) keep(key string, f *os.File) {
	if sn.held == nil {
		sn.held = map[string]*os.File{}
	}
	if was := sn.held[key]; was != nil {
		was.Close()
	}
	sn.held[key] = f
}

// MakeFlat finds this snapshot's flat memory or makes it: build fills dst, an
// empty file, from what Base says. Two processes make it once. The file is in
// the cache and not synced; it stays at least until Close. When MakeFlat fails
// nothing is left, and Base is what it was.
func (sn *Snapshot) MakeFlat(ctx context.Context, build func(dst *os.File, base string, differences []string) error) (string, error) {
	if path, ok := sn.Flat(); ok {
		return path, nil
	}
	path, err := sn.fill(ctx, ramCache, sn.n, func(dst *os.File) error {
		base, differences := sn.Base()
		if err := build(dst, base, differences); err != nil {
			return err
		}
		info, err := dst.Stat()
		if err == nil && info.Size() != sn.n.m.ram() {
			err = fmt.Errorf("it has %d bytes, the machine %d", info.Size(), sn.n.m.ram())
		}
		return err
	})
	if err != nil {
		return "", fmt.Errorf("put the memory of snapshot %s together: %w", sn.n.m.ID, store.WithRemedy(err))
	}
	return path, nil
}

// fill finds what the cache has of n or makes it.
func (sn *Snapshot) fill(ctx context.Context, c cache, n *node, build func(dst *os.File) error) (string, error) {
	dir, err := sn.s.cacheDir(c)
	if err != nil {
		return "", err
	}
	if err := sn.s.disk.mkdirAll(dir); err != nil {
		return "", err
	}
	path := filepath.Join(dir, n.m.ID)
	lock, err := lockPath(ctx, lockOf(path))
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if path, ok := sn.cached(c, n); ok {
		return path, nil // made while this one waited
	}
	f, err := sn.s.fillFile(path, n, build)
	if err != nil {
		return "", err
	}
	sn.mu.Lock()
	sn.keep(string(c)+"/"+n.m.ID, f)
	sn.mu.Unlock()
	// Who fills the cache keeps it small: a VM that is saved often would fill
	// the disk before anybody calls Collect.
	_ = sn.s.collectCache(c, &Collected{})
	return path, nil
}

// fillFile makes a file of the cache and returns it held. Its lock is held:
// whatever has its temporary name or no right stamp is left over.
func (s *Store) fillFile(path string, n *node, build func(dst *os.File) error) (_ *os.File, err error) {
	fresh := filepath.Join(filepath.Dir(path), newPrefix+n.m.ID)
	_ = os.Remove(fresh)
	f, err := s.disk.create(fresh, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(fresh)
		}
	}()
	if err := store.TryLock(f, store.LockShared); err != nil {
		return nil, err
	}
	if err := s.own(fresh); err != nil {
		return nil, err
	}
	if err := build(f); err != nil {
		return nil, err
	}
	if err := s.disk.rename(fresh, path); err != nil {
		return nil, err
	}
	if err := s.stampFlat(path, n); err != nil {
		os.Remove(path)
		return nil, err
	}
	return f, nil
}

// stampFlat takes the stamp after the rename, which changes the change time.
func (s *Store) stampFlat(path string, n *node) error {
	is, _, err := look(path)
	if err != nil {
		return err
	}
	data, err := json.Marshal(flatStamp{n.m.SHA256, is})
	if err != nil {
		return err
	}
	fresh := filepath.Join(filepath.Dir(path), newPrefix+n.m.ID+".stamp")
	_ = os.Remove(fresh)
	f, err := s.disk.create(fresh, 0o600)
	if err != nil {
		return err
	}
	err = s.disk.writeAt(f, data, 0)
	f.Close()
	if err == nil {
		err = s.disk.rename(fresh, stampOf(path))
	}
	if err != nil {
		os.Remove(fresh)
	}
	return err
}
