package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/warren-vm/warren/internal/cli"
)

func newSnapshotRm(s streams) *cobra.Command {
	var quiet bool
	c := &cobra.Command{
		Use:     "rm ID...",
		Aliases: []string{"remove", "delete"},
		Short:   "Remove snapshots",
		Long: `Remove snapshots for good, also damaged ones. One that another snapshot or a
running VM needs is not removed, and what needs it is named.

` + doneHelp,
		Example: `  kosa8 snapshot rm s0123456789abcdef sfedcba9876543210`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return fmt.Errorf("%s takes snapshot ids; list them: kosa8 snapshot ls", c.CommandPath())
			}
			return checkIDs(c.Context(), args)
		},
		ValidArgsFunction: completeSnapshots(true, isSnapshot),
		RunE: func(c *cobra.Command, ids []string) error {
			sh, err := readShelf(c.Context())
			if err != nil {
				return err
			}
			return sh.remove(c.Context(), s.out, ids, quiet)
		},
	}
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "errors only")
	return c
}

// remove removes snapshots in whatever order they can be, says so, and reports
// all that cannot. Forks that only they needed go with them.
func (sh shelf) remove(ctx context.Context, out io.Writer, ids []string, quiet bool) error {
	ctx, signals := cli.CatchInterrupts(ctx)
	defer signals.Stop()
	var todo []string
	for _, id := range ids {
		if !slices.Contains(todo, id) {
			todo = append(todo, id)
		}
	}
	faults := map[string]error{}
	keep := sh.keepTemplate(ctx)
	for again := true; again && len(todo) > 0; {
		again = false
		for _, id := range slices.Clone(todo) {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			err := sh.store.Delete(ctx, id)
			if faults[id] = named(ctx, id, err); err != nil {
				continue
			}
			todo = slices.DeleteFunc(todo, func(o string) bool { return o == id })
			again = true
			if !quiet {
				if _, err := fmt.Fprintf(out, "removed %s\n", id); err != nil {
					return err
				}
			}
		}
		// Forks that nothing needs any more go, and what is left gets another
		// chance. What could not go `kosa8 doctor` names.
		collected, _ := sh.store.Collect(ctx, keep)
		again = again || len(collected.Removed) > 0
	}
	var errs []error
	for _, id := range todo {
		errs = append(errs, faults[id])
	}
	return errors.Join(errs...)
}

func newSnapshotVerify(s streams) *cobra.Command {
	var quiet, asJSON bool
	c := &cobra.Command{
		Use:   "verify [ID...]",
		Short: "Compute the digests of snapshots anew",
		Long: `Read all files of the given snapshots, and of what they need, and compare their
digests with those that were recorded when they were made. Without ids all are
read, templates and forks too.

` + doneHelp,
		Example:           `  kosa8 snapshot verify`,
		Args:              func(c *cobra.Command, args []string) error { return checkIDs(c.Context(), args) },
		ValidArgsFunction: completeSnapshots(true, isSnapshot),
		RunE: func(c *cobra.Command, ids []string) error {
			return snapshotVerify(c.Context(), s, ids, quiet, asJSON)
		},
	}
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "no progress; errors only")
	c.Flags().BoolVar(&asJSON, "json", false, "print as JSON")
	return c
}

// verified is what verify prints of one snapshot with --json.
type verified struct {
	ID    string `json:"id"`
	Whole bool   `json:"whole"`
	Error string `json:"error,omitempty"`
}

func snapshotVerify(ctx context.Context, s streams, ids []string, quiet, asJSON bool) error {
	sh, err := readShelf(ctx)
	if err != nil {
		return err
	}
	if len(ids) == 0 {
		// The newest first: what one needs is read with it, and not again.
		for _, m := range slices.Backward(sh.all) {
			ids = append(ids, m.ID)
		}
		for _, p := range sh.problems {
			ids = append(ids, p.ID)
		}
	}
	ctx, signals := cli.CatchInterrupts(ctx)
	defer signals.Stop()
	progress := cli.NewProgress(s.err, quiet, cli.Silent)
	defer progress.Done()
	results := []verified{}
	var errs []error
	whole := map[string]bool{}
	for i, id := range ids {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		err := error(nil)
		if !whole[id] {
			err = sh.store.Verify(ctx, id, func(step string) { progress.Step("%s (%d of %d)", step, i+1, len(ids)) })
		}
		r := verified{ID: id, Whole: err == nil}
		if err != nil {
			err = named(ctx, id, err)
			r.Error = err.Error()
			errs = append(errs, because(ctx, err))
		} else {
			for _, m := range sh.closure(id) {
				whole[m.ID] = true
			}
		}
		results = append(results, r)
		if err == nil && !asJSON && !quiet {
			progress.Done()
			if _, err := fmt.Fprintf(s.out, "%s is whole\n", id); err != nil {
				return err
			}
		}
	}
	progress.Done()
	switch {
	case asJSON:
		err = cli.PrintJSON(s.out, map[string][]verified{"snapshots": results})
	case len(ids) == 0 && !quiet:
		_, err = fmt.Fprintf(s.out, "no snapshots in %s\n", sh.home.SnapshotsDir())
	}
	return errors.Join(append(errs, err)...)
}

// list names ids in one line.
func list(ids []string) string { return strings.Join(ids, ", ") }
