package snapshots

import (
	"context"
	"fmt"
	"os"
	"slices"

	"github.com/warren-vm/warren/internal/store"
)

// Overlays are the paths of the frozen disk overlays, oldest first. Those that
// the cache has merged stand in for what they were made of. All stay until
// Close.
func (sn *Snapshot) Overlays() []string {
	disks := sn.n.m.Disks
	for i := len(disks); i > 0; i-- {
		n := sn.c.byID[disks[i-1]]
		// The merged overlays are those of the snapshot that froze the last.
		if !slices.Equal(n.m.Disks, disks[:i]) {
			continue
		}
		if path, ok := sn.cached(diskCache, n); ok {
			return append([]string{path}, sn.overlaysOf(disks[i:])...)
		}
	}
	return sn.overlaysOf(disks)
}

// overlaysOf are the overlays that these snapshots froze.
func (sn *Snapshot) overlaysOf(disks []string) (paths []string) {
	for _, id := range disks {
		n := sn.c.byID[id]
		for _, name := range n.m.overlays() {
			paths = append(paths, n.path(name))
		}
	}
	return paths
}

// MergeOverlays puts the disk's overlays, as Overlays gives them, together into
// one in the cache: merge writes it to the empty file dst. Two processes make
// it once. When MergeOverlays fails nothing is left, and Overlays is what it was.
func (sn *Snapshot) MergeOverlays(ctx context.Context, merge func(dst *os.File, overlays []string) error) error {
	overlays := sn.Overlays()
	if len(overlays) < 2 {
		return nil
	}
	last := sn.c.byID[sn.n.m.Disks[len(sn.n.m.Disks)-1]]
	_, err := sn.fill(ctx, diskCache, last, func(dst *os.File) error { return merge(dst, overlays) })
	if err != nil {
		return fmt.Errorf("merge the disk overlays of snapshot %s: %w", sn.n.m.ID, store.WithRemedy(err))
	}
	return nil
}
