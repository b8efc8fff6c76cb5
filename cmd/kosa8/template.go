package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
)

func newTemplate(s streams) *cobra.Command {
	c := &cobra.Command{
		Use:     "template",
		Aliases: []string{"templates"},
		Short:   "Make and remove the templates that VMs are copies of",
		Long: `A template is a VM that has booted and waits; "kosa8 run" starts copies of it.
There is one for each size of VM, accelerator, guest image and QEMU. It is made
when it is first needed, which takes seconds, or here.

` + doneHelp,
		Example: `  kosa8 template build --cpus 1 --memory 512m
  kosa8 template ls
  kosa8 template rm --stale`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },

		DisableFlagsInUseLine: true,
	}
	c.AddCommand(newTemplateBuild(s), newTemplateLs(s), newTemplateRm(s))
	return c
}

func newTemplateBuild(s streams) *cobra.Command {
	var o machine.Options
	var quiet, asJSON bool
	c := &cobra.Command{
		Use:   "build",
		Short: "Make the template of a size of VM",
		Long: `Make the template of VMs of a size, if there is none that matches. The default
size is that of "kosa8 run".

` + doneHelp,
		Example: `  kosa8 template build --memory 2g`,
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := o.Check(); err != nil {
				return &cli.Exit{Code: cli.ExitUsage, Err: err}
			}
			return templateBuild(c.Context(), s, o, quiet, asJSON)
		},
	}
	f := c.Flags()
	sizeFlags(c, &o)
	f.BoolVarP(&quiet, "quiet", "q", false, "no progress; errors only")
	f.BoolVar(&asJSON, "json", false, "print the template as JSON")
	return c
}

func templateBuild(ctx context.Context, s streams, o machine.Options, quiet, asJSON bool) error {
	home, err := homeOf("")
	if err != nil {
		return err
	}
	defer sweepAside(home)()
	ctx, signals := cli.CatchInterrupts(ctx)
	defer signals.Stop()
	progress := cli.NewProgress(s.err, quiet, cli.PlainLines)
	defer progress.Done()
	o.Home = home.Dir()
	o.Step = func(step string) { progress.Step("%s", step) }
	id, err := machine.Template(ctx, o)
	progress.Done()
	if err != nil {
		return because(ctx, err)
	}
	sh, err := readShelf(ctx)
	if err != nil {
		return err
	}
	m, err := sh.manifest(ctx, id)
	switch {
	case err != nil:
		return err
	case asJSON:
		return cli.PrintJSON(s.out, templateInfo{m.ID, m.Machine.CPUs, m.Machine.MemMB, m.Machine.Accel, m.ImageID, m.Created, sh.size(m.ID), true})
	case quiet:
		return nil
	}
	_, err = fmt.Fprintf(s.out, "template %s is ready (%s, %s)\n", id, size(m.Machine), cli.Clean(m.Machine.Accel))
	return err
}

// templateInfo is a template as the template commands print it with --json.
type templateInfo struct {
	ID      string    `json:"id"`
	CPUs    int       `json:"cpus"`
	MemMB   int       `json:"mem_mb"`
	Accel   string    `json:"accel"`
	ImageID string    `json:"image_id"`
	Created time.Time `json:"created"`
	Bytes   int64     `json:"bytes"`
	// Matches says that it is of the guest image in use, the QEMU that is
	// installed and this processor.
	Matches bool `json:"matches"`
}

func newTemplateLs(s streams) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List the templates",
		Long: `List the templates, the oldest first. One that is stale was made of another
guest image, QEMU or processor than there is now; it goes by itself when nothing
needs it. One whose name ends in -idle is what the other of that name was made
from.

` + doneHelp,
		Example: `  kosa8 template ls --json`,
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			sh, err := readShelf(c.Context())
			if err != nil {
				return err
			}
			keep := sh.keepTemplate(c.Context())
			infos := []templateInfo{}
			t := cli.Table{Right: []int{4}}
			t.Row("ID", "MEMORY/CPUS", "ACCEL", "CREATED", "SIZE", "STATE")
			for _, m := range sh.all {
				if !isTemplate(m) {
					continue
				}
				i := templateInfo{m.ID, m.Machine.CPUs, m.Machine.MemMB, m.Machine.Accel, m.ImageID, m.Created, sh.size(m.ID), keep(m)}
				infos = append(infos, i)
				state := "matches"
				if !i.Matches {
					state = "stale"
				}
				t.Row(m.ID, size(m.Machine), cli.Clean(m.Machine.Accel), when(m.Created), cli.FormatBytes(i.Bytes), state)
			}
			switch {
			case asJSON:
				return cli.PrintJSON(s.out, map[string][]templateInfo{"templates": infos})
			case len(infos) == 0:
				_, err := fmt.Fprintf(s.out, "no templates in %s\n  make one: kosa8 template build\n", sh.home.SnapshotsDir())
				return err
			}
			return t.Write(s.out)
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print as JSON")
	return c
}

func newTemplateRm(s streams) *cobra.Command {
	var stale, quiet bool
	c := &cobra.Command{
		Use:     "rm [flags] [ID...]",
		Aliases: []string{"remove", "delete"},
		Short:   "Remove templates that nothing needs",
		Long: `Remove templates. One that a snapshot or a running VM needs is not removed, and
what needs it is named. With --stale those go that no longer match this machine
and that nothing needs.

` + doneHelp,
		Example: `  kosa8 template rm --stale`,
		Args: func(c *cobra.Command, ids []string) error {
			if stale == (len(ids) > 0) {
				return fmt.Errorf("%s takes template ids or --stale; list them: kosa8 template ls", c.CommandPath())
			}
			return checkIDs(c.Context(), ids)
		},
		ValidArgsFunction: completeSnapshots(true, isTemplate),
		RunE: func(c *cobra.Command, ids []string) error {
			sh, err := readShelf(c.Context())
			if err != nil {
				return err
			}
			if stale {
				return sh.removeStale(c.Context(), s, quiet)
			}
			var errs []error
			for _, id := range ids {
				m, err := sh.manifest(c.Context(), id)
				if err == nil && !isTemplate(m) {
					errs = append(errs, fmt.Errorf("%s is no template but a %s; remove it with `kosa8 snapshot rm`", id, m.Kind))
				} else if errors.Is(err, snapshots.ErrNotFound) {
					errs = append(errs, fmt.Errorf("no template %.80q; list them: kosa8 template ls", id))
				}
			}
			if len(errs) > 0 {
				return errors.Join(errs...)
			}
			return sh.remove(c.Context(), s.out, ids, quiet)
		},
	}
	c.Flags().BoolVar(&stale, "stale", false, "those that no longer match and that nothing needs")
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "errors only")
	return c
}

func (sh shelf) removeStale(ctx context.Context, s streams, quiet bool) error {
	ctx, signals := cli.CatchInterrupts(ctx)
	defer signals.Stop()
	done, err := sh.store.Collect(ctx, sh.keepTemplate(ctx))
	if n := len(done.Unreadable); err == nil && n > 0 {
		err = cli.Advise(fmt.Errorf("%s cannot be read, and what they need is not known: no template was removed", cli.Count(n, "snapshot")),
			"see `kosa8 snapshot ls`")
	}
	if quiet {
		return err
	}
	said := false
	for _, m := range sh.all {
		for _, id := range done.Removed {
			if m.ID == id && isTemplate(m) {
				said = true
				if _, err := fmt.Fprintf(s.out, "removed %s\n", id); err != nil {
					return err
				}
			}
		}
	}
	if !said && err == nil {
		_, err = fmt.Fprintln(s.out, "no stale template that nothing needs")
	}
	return err
}

// keepTemplate is machine.KeepTemplate, which asks QEMU and remembers what it
// said, for a home that may have no templates and then stays untouched.
func (sh shelf) keepTemplate(ctx context.Context) func(snapshots.Manifest) bool {
	if !slices.ContainsFunc(sh.all, isTemplate) {
		return func(snapshots.Manifest) bool { return true }
	}
	return machine.KeepTemplate(ctx, sh.home)
}

// keepImages names the guest images that snapshots of a home need.
func keepImages(home store.Home) func(context.Context) ([]string, error) {
	return snapshots.In(home).ImageIDs
}
