package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/vm"
)

const doneHelp = `Exit codes:
    0  done
    1  it could not be done, or not all of it (lines that start with "kosa8: "
       say why)
    2  the command line is wrong; nothing was started`

func newSnapshot(s streams) *cobra.Command {
	c := &cobra.Command{
		Use:     "snapshot",
		Aliases: []string{"snapshots"},
		Short:   "List, verify, move and remove snapshots",
		Long: `A snapshot is a VM as it was at one instant: its memory, its devices and its
disk. It is made with "kosa8 run --save" and stays until it is removed. Any
number of VMs can go on from it with "kosa8 run --from".

` + doneHelp,
		Example: `  kosa8 run --save=ready base -- sh -c 'make deps > /root/log'
  kosa8 snapshot ls
  kosa8 run --from s0123456789abcdef base -- cat /root/log
  kosa8 snapshot export s0123456789abcdef -o ready.tar.zst
  kosa8 snapshot rm s0123456789abcdef`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },

		DisableFlagsInUseLine: true,
	}
	c.AddCommand(newSnapshotLs(s), newSnapshotShow(s), newSnapshotRm(s), newSnapshotVerify(s),
		newSnapshotExport(s), newSnapshotImport(s))
	return c
}

// shelf is the snapshots of a home as they were when it was read.
type shelf struct {
	home     store.Home
	store    *snapshots.Store
	all      []snapshots.Manifest // oldest first
	problems []snapshots.Problem
}

func readShelf(ctx context.Context) (shelf, error) {
	home, err := homeOf("")
	if err != nil {
		return shelf{}, err
	}
	sh := shelf{home: home, store: snapshots.In(home, snapshots.WithOwner(vm.Own))}
	sh.all, sh.problems, err = sh.store.List(ctx)
	return sh, err
}

// manifest finds a snapshot; the error of one that is not there names those
// that are.
func (sh shelf) manifest(ctx context.Context, id string) (snapshots.Manifest, error) {
	for _, m := range sh.all {
		if m.ID == id {
			return m, nil
		}
	}
	for _, p := range sh.problems {
		if p.ID == id {
			return snapshots.Manifest{}, p.Err
		}
	}
	sn, err := sh.store.Open(ctx, id) // for its error
	if err != nil {
		return snapshots.Manifest{}, named(ctx, id, err)
	}
	defer sn.Close()
	return sn.Manifest(), nil
}

// neededBy are the snapshots that need the one of that id, sorted.
func (sh shelf) neededBy(id string) []string {
	ids := []string{}
	for _, m := range sh.all {
		if slices.Contains(m.Needs(), id) {
			ids = append(ids, m.ID)
		}
	}
	slices.Sort(ids)
	return ids
}

// closure is a snapshot and all that it needs, as far as it is there.
func (sh shelf) closure(id string) []snapshots.Manifest {
	var found []snapshots.Manifest
	seen := map[string]bool{}
	for todo := []string{id}; len(todo) > 0; todo = todo[1:] {
		if seen[todo[0]] {
			continue
		}
		seen[todo[0]] = true
		for _, m := range sh.all {
			if m.ID == todo[0] {
				found = append(found, m)
				todo = append(todo, m.Needs()...)
			}
		}
	}
	return found
}

// size is what a snapshot itself takes on the disk, in bytes.
func (sh shelf) size(id string) int64 { return sh.store.Usage(id) }

// flat says whether all of a snapshot's memory is in one file: its own, or one
// in the cache.
func (sh shelf) flat(m snapshots.Manifest) bool {
	if m.Memory.Kind == snapshots.MemoryFlat {
		return true
	}
	boot, err := store.BootID()
	if err != nil {
		return false
	}
	_, err = os.Lstat(filepath.Join(sh.home.Cache(), "ram", boot, m.ID))
	return err == nil
}

// kept are the snapshots that ls shows.
func (sh shelf) kept(all bool) []snapshots.Manifest {
	var kept []snapshots.Manifest
	for _, m := range sh.all {
		if all || m.Kind == snapshots.KindSnapshot {
			kept = append(kept, m)
		}
	}
	return kept
}

func (sh shelf) faults() error {
	var errs []error
	for _, p := range sh.problems {
		errs = append(errs, p.Err)
	}
	return errors.Join(errs...)
}

// when is a time as people read it.
func when(t time.Time) string { return t.Local().Format("2006-01-02 15:04:05") }

// whenExactly is when, with the zone.
func whenExactly(t time.Time) string { return t.Local().Format("2006-01-02 15:04:05 -0700") }

// maxLabel is how much of a label a table shows, in runes.
const maxLabel = 40

// short is a label for a table.
func short(label string) string {
	runes := []rune(cli.Clean(label))
	if len(runes) <= maxLabel {
		return string(runes)
	}
	return string(runes[:maxLabel-1]) + "…"
}

func size(m snapshots.Machine) string {
	return fmt.Sprintf("%s, %s", cli.FormatMB(int64(m.MemMB)), cli.Count(m.CPUs, "CPU"))
}

// completeSnapshots offers the ids of snapshots to the shell, their labels
// beside them.
func completeSnapshots(many bool, wanted func(snapshots.Manifest) bool) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 && !many {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		sh, err := readShelf(c.Context())
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var ids []string
		for _, m := range slices.Backward(sh.all) {
			if wanted(m) && !slices.Contains(args, m.ID) {
				ids = append(ids, cobra.CompletionWithDesc(m.ID, strings.TrimSpace(when(m.Created)+" "+cli.Clean(m.Label))))
			}
		}
		return ids, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
	}
}

func isSnapshot(m snapshots.Manifest) bool { return m.Kind == snapshots.KindSnapshot }
func isTemplate(m snapshots.Manifest) bool { return m.Kind == snapshots.KindTemplate }

// oneID is for a command that takes exactly one.
func oneID(c *cobra.Command, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("%s takes one snapshot id, got %d; list them: kosa8 snapshot ls", c.CommandPath(), len(args))
	}
	return checkIDs(c.Context(), args)
}
