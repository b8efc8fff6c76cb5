package snapshots

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// Problem is a snapshot that cannot be read.
type Problem struct {
	ID  string
	Err error
}

// List reads all manifests, oldest first, whatever their kind. It takes no
// lock and looks at no other file; what cannot be read is a Problem.
func (s *Store) List(ctx context.Context) ([]Manifest, []Problem, error) {
	ids, err := s.ids()
	if err != nil {
		return nil, nil, err
	}
	var all []Manifest
	var problems []Problem
	for _, id := range ids {
		if ctx.Err() != nil {
			return nil, nil, context.Cause(ctx)
		}
		m, err := readManifest(s.folder(id), id)
		if err == nil {
			all = append(all, m)
			continue
		}
		if _, gone := os.Lstat(s.folder(id)); !errors.Is(gone, fs.ErrNotExist) {
			problems = append(problems, Problem{id, err})
		}
	}
	slices.SortFunc(all, func(a, b Manifest) int {
		return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.ID, b.ID))
	})
	return all, problems, nil
}

// Compiled when needed: a supervisor, which starts with every VM, never does.
var (
	imageIn = sync.OnceValue(func() *regexp.Regexp {
		return regexp.MustCompile(`"image_id"\s*:\s*"([a-z0-9][a-z0-9-]{0,62})"`)
	})
	idsIn = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`"[a-z0-9][a-z0-9-]{0,62}"`) })
)

// ImageIDs are the guest images that snapshots need, sorted. Of a manifest
// that is damaged or newer it takes what looks like one: to keep an image too
// many costs less than to remove one that was needed.
func (s *Store) ImageIDs(ctx context.Context) ([]string, error) {
	all, problems, err := s.List(ctx)
	if err != nil {
		return nil, err
	}
	var images []string
	for _, m := range all {
		images = append(images, m.ImageID)
	}
	for _, p := range problems {
		data, err := readSmall(filepath.Join(s.folder(p.ID), manifestName))
		if err != nil {
			continue
		}
		for _, match := range imageIn().FindAllSubmatch(data, -1) {
			images = append(images, string(match[1]))
		}
	}
	slices.Sort(images)
	return slices.Compact(images), nil
}

// neededBy finds the snapshots that need each; of one that cannot be read,
// every id of another that its manifest mentions counts.
func (s *Store) neededBy(all []Manifest, problems []Problem) map[string][]string {
	needed := map[string][]string{}
	for _, m := range all {
		for _, id := range m.Needs() {
			needed[id] = append(needed[id], m.ID)
		}
	}
	for _, p := range problems {
		data, _ := readSmall(filepath.Join(s.folder(p.ID), manifestName))
		seen := map[string]bool{p.ID: true}
		for _, quoted := range idsIn().FindAllString(string(data), -1) {
			if id := strings.Trim(quoted, `"`); !seen[id] {
				seen[id] = true
				needed[id] = append(needed[id], p.ID)
			}
		}
	}
	return needed
}

// neededError says what stands in the way.
func neededError(id string, by []string) error {
	slices.Sort(by)
	more := ""
	if n := len(by) - 3; n > 0 {
		by, more = by[:3], fmt.Sprintf(" and %d more", n)
	}
	return fmt.Errorf("snapshot %s %w by %s%s; delete what needs it first", id, ErrNeeded, strings.Join(by, ", "), more)
}
