package snapshots

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Survey says how a store stands, without reading memory or disks and without
// changing anything.
type Survey struct {
	// Kept are the snapshots that users made and that are whole.
	Kept []string
	// Damaged cannot be read, or lack a file or some of one.
	Damaged []string
	// Unusable are whole themselves, but need one that is damaged or gone.
	Unusable []string
	// Leftovers counts the drafts and half removed snapshots that nobody holds,
	// Forks are those that nothing needs and nobody holds, and OldCache is how
	// many bytes other boots of the host left in the cache: what Collect would
	// remove.
	Leftovers int
	Forks     []string
	OldCache  int64
}

// Clean says whether Collect has nothing to do.
func (s Survey) Clean() bool { return s.Leftovers == 0 && len(s.Forks) == 0 && s.OldCache == 0 }

// Survey looks at names, manifests and sizes. What is being made or removed
// meanwhile may be counted either way.
func (s *Store) Survey(ctx context.Context) (Survey, error) {
	var found Survey
	all, problems, err := s.List(ctx)
	if err != nil {
		return found, err
	}
	found.Damaged, found.Unusable = s.Unfit(all, problems)
	needed := s.neededBy(all, problems)
	for _, m := range all {
		switch {
		case slices.Contains(found.Damaged, m.ID), slices.Contains(found.Unusable, m.ID):
		case m.Kind == KindSnapshot:
			found.Kept = append(found.Kept, m.ID)
		// What a damaged one needs is not known.
		case m.Kind == KindFork && len(needed[m.ID]) == 0 && len(problems) == 0 && isFree(s.folder(m.ID)):
			found.Forks = append(found.Forks, m.ID)
		}
	}
	if found.Leftovers, err = s.countLeftovers(); err != nil {
		return found, err
	}
	for _, c := range []cache{ramCache, diskCache} {
		found.OldCache += s.oldCache(c)
	}
	return found, nil
}

// Unfit are the snapshots of a List that no VM can go on from: the damaged,
// sorted, and those that are whole themselves, in the order of the list. It
// looks at sizes; see Survey.
func (s *Store) Unfit(all []Manifest, problems []Problem) (damaged, useless []string) {
	bad := map[string]bool{}
	for _, p := range problems {
		bad[p.ID] = true
	}
	for _, m := range all {
		bad[m.ID] = !s.whole(m)
	}
	for id, is := range bad {
		if is {
			damaged = append(damaged, id)
		}
	}
	slices.Sort(damaged)
	lack := unusable(all, bad)
	for _, m := range all {
		if lack[m.ID] && !bad[m.ID] {
			useless = append(useless, m.ID)
		}
	}
	return damaged, useless
}

// unusable are those that need, over whatever others, one that is bad, not
// there or another than it was.
func unusable(all []Manifest, bad map[string]bool) map[string]bool {
	there, out := map[string]Manifest{}, map[string]bool{}
	for _, m := range all {
		there[m.ID] = m
	}
	for again := true; again; {
		again = false
		for _, m := range all {
			lacks := slices.ContainsFunc(m.Needs(), func(id string) bool {
				other, is := there[id]
				return bad[id] || out[id] || !is || !m.madeOn(other)
			})
			if lacks && !out[m.ID] {
				out[m.ID], again = true, true
			}
		}
	}
	return out
}

// whole says whether a snapshot's files are there with their sizes.
func (s *Store) whole(m Manifest) bool {
	for _, f := range m.Files {
		is, _, err := look(filepath.Join(s.folder(m.ID), f.Name))
		if err != nil || is.Size != f.Size {
			return false
		}
	}
	return true
}

func (s *Store) countLeftovers() (n int, err error) {
	entries, err := os.ReadDir(s.dir())
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	for _, e := range entries {
		if isLeftover(e.Name()) && isFree(filepath.Join(s.dir(), e.Name())) {
			n++
		}
	}
	return n, err
}

// isLeftover says whether a folder of that name is a draft or half removed, and
// nobody's unless it is held.
func isLeftover(name string) bool {
	return strings.HasPrefix(name, newPrefix) || strings.HasPrefix(name, deadPrefix)
}

// isFree says whether nobody holds a folder. It has the lock for an instant.
func isFree(dir string) bool {
	lock, err := claim(dir)
	if lock != nil {
		lock.Close()
	}
	return err == nil
}

// oldCache is the size of what other boots of the host left.
func (s *Store) oldCache(c cache) (bytes int64) {
	others, _ := s.otherBoots(c)
	for _, path := range others {
		bytes += usage(path)
	}
	return bytes
}
