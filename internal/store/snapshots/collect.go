package snapshots

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/warren-vm/warren/internal/store"
)

// keepFlats is how many flat files stay in the cache. Each may be as large as
// a machine's memory.
const keepFlats = 8

// Collected is what a Collect removed.
type Collected struct {
	// Removed are the forks and templates, Flats the snapshots of which
	// something in the cache went.
	Removed, Flats []string
	// Leftovers counts drafts and half removed snapshots.
	Leftovers int
	// Bytes were freed on the disk.
	Bytes int64
	// Unreadable are snapshots that cannot be read. What they need is not
	// known, so while there are any no fork and no template is removed.
	Unreadable []Problem
}

// Collect removes what killed processes left, forks that nothing needs,
// templates that keepTemplate refuses (nil keeps all) and nothing needs, and
// the oldest of the cache. It touches nothing that is held. It may be killed
// at any point, and any number may run at once. It goes on after what it
// cannot remove and reports all such in the error.
func (s *Store) Collect(ctx context.Context, keepTemplate func(Manifest) bool) (Collected, error) {
	var done Collected
	dead, err := s.buryUnneeded(ctx, keepTemplate, &done)
	defer func() {
		for _, c := range dead {
			c.release()
		}
	}()
	if err != nil {
		return done, fmt.Errorf("collect snapshots: %w", store.WithRemedy(err))
	}
	var errs []error
	for _, c := range dead {
		bytes, err := c.remove()
		if err != nil {
			errs = append(errs, fmt.Errorf("collect %s: %w", c.path, err))
			continue
		}
		done.Bytes += bytes
	}
	for _, c := range []cache{ramCache, diskCache} {
		if err := s.collectCache(c, &done); err != nil {
			errs = append(errs, fmt.Errorf("collect %s: %w", s.cacheRoot(c), err))
		}
	}
	return done, errors.Join(errs...)
}

// buryUnneeded renames, with the gate closed, what is to be removed.
func (s *Store) buryUnneeded(ctx context.Context, keepTemplate func(Manifest) bool, done *Collected) ([]corpse, error) {
	gate, err := s.gate(ctx, store.LockAlone)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer gate.Close()
	dead, err := s.leftovers()
	if err != nil {
		return dead, err
	}
	done.Leftovers = len(dead)
	all, problems, err := s.List(ctx)
	if err != nil {
		return dead, err
	}
	done.Unreadable = problems
	if len(problems) > 0 {
		return dead, nil
	}
	unneeded := func(m Manifest) bool {
		return m.Kind == KindFork || m.Kind == KindTemplate && keepTemplate != nil && !keepTemplate(m)
	}
	for again := true; again; {
		again = false
		needed := s.neededBy(all, nil)
		for _, m := range slices.Clone(all) {
			if !unneeded(m) || len(needed[m.ID]) > 0 {
				continue
			}
			c, err := s.rename(m.ID)
			if errors.Is(err, store.ErrHeld) {
				continue
			}
			if err != nil {
				return dead, err
			}
			dead, done.Removed = append(dead, c), append(done.Removed, m.ID)
			all = slices.DeleteFunc(all, func(o Manifest) bool { return o.ID == m.ID })
			again = true
		}
	}
	if len(done.Removed) == 0 {
		return dead, nil
	}
	return dead, store.SyncDir(s.dir()) // before the files; see buryOnce
}

// leftovers finds the folders and template locks that nobody holds any more.
func (s *Store) leftovers() ([]corpse, error) {
	entries, err := os.ReadDir(s.dir())
	if err != nil {
		return nil, err
	}
	var dead []corpse
	for _, e := range entries {
		path := filepath.Join(s.dir(), e.Name())
		switch {
		case isLeftover(e.Name()):
			if lock, err := claim(path); err == nil {
				dead = append(dead, corpse{path, lock})
			}
		case strings.HasPrefix(e.Name(), templatePrefix) && e.Type().IsRegular():
			if lock, free := tryLockPath(path); free {
				os.Remove(path)
				lock.Close()
			}
		}
	}
	return dead, nil
}

// collectCache removes the cache of other boots, and of this one what is left
// over, what belongs to no snapshot, and what was not used for longest.
func (s *Store) collectCache(c cache, done *Collected) error {
	here, err := s.cacheDir(c)
	if err != nil {
		return err
	}
	others, err := s.otherBoots(c)
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range others {
		done.Bytes += usage(path)
		errs = append(errs, os.RemoveAll(path))
	}
	entries, err := os.ReadDir(here)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errors.Join(append(errs, err)...)
	}
	old := s.oldFlats(here)
	seen := map[string]bool{}
	for _, e := range entries {
		id := flatID(e.Name())
		if CheckID(id) != nil {
			errs = append(errs, os.RemoveAll(filepath.Join(here, e.Name())))
			continue
		}
		if !seen[id] {
			seen[id] = true
			errs = append(errs, s.collectFlat(filepath.Join(here, id), old[id], done))
		}
	}
	return errors.Join(errs...)
}

// otherBoots are the folders that other boots of the host made in the cache.
func (s *Store) otherBoots(c cache) (paths []string, err error) {
	here, err := s.cacheDir(c)
	if err != nil {
		return nil, err
	}
	boots, err := os.ReadDir(s.cacheRoot(c))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, b := range boots {
		if path := filepath.Join(s.cacheRoot(c), b.Name()); path != here {
			paths = append(paths, path)
		}
	}
	return paths, err
}

// flatID is the snapshot that a file in the cache belongs to. No id has a dot.
func flatID(name string) string {
	name = strings.TrimPrefix(name, newPrefix)
	id, _, _ := strings.Cut(name, ".")
	return id
}

// oldFlats are the snapshots whose flats are beyond the newest keepFlats.
func (s *Store) oldFlats(dir string) map[string]bool {
	entries, _ := os.ReadDir(dir)
	type used struct {
		id string
		at int64
	}
	var flats []used
	for _, e := range entries {
		if id, ok := strings.CutSuffix(e.Name(), ".stamp"); ok && CheckID(id) == nil {
			if info, err := e.Info(); err == nil {
				flats = append(flats, used{id, info.ModTime().UnixNano()})
			}
		}
	}
	slices.SortFunc(flats, func(a, b used) int { return int(max(-1, min(1, b.at-a.at))) })
	old := map[string]bool{}
	for i := keepFlats; i < len(flats); i++ {
		old[flats[i].id] = true
	}
	return old
}

// collectFlat removes what there is of one flat file: all of it if the
// snapshot is gone or it is old, else what a killed maker left. Nobody's file
// is touched who holds it or is making it.
func (s *Store) collectFlat(path string, old bool, done *Collected) error {
	id := filepath.Base(path)
	lock, free := tryLockPath(lockOf(path))
	if !free {
		return nil
	}
	defer lock.Close()
	for _, fresh := range []string{newPrefix + id, newPrefix + id + ".stamp"} {
		os.Remove(filepath.Join(filepath.Dir(path), fresh))
	}
	m, err := readManifest(s.folder(id), id)
	if err == nil && !old && readFlatStamp(path, m.SHA256) {
		return nil
	}
	f, err := os.Open(path)
	if err == nil {
		defer f.Close()
		if store.TryLock(f, store.LockAlone) != nil {
			return nil
		}
		bytes := usage(path)
		if err := os.Remove(path); err != nil {
			return err
		}
		done.Bytes += bytes
		done.Flats = append(done.Flats, id)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Remove(stampOf(path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Remove(lockOf(path))
}
