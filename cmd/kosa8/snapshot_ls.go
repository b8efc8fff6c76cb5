package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/store/snapshots"
)

// snapshotInfo is a snapshot as the snapshot commands print it with --json.
type snapshotInfo struct {
	ID      string         `json:"id"`
	Kind    snapshots.Kind `json:"kind"`
	Label   string         `json:"label"`
	Created time.Time      `json:"created"`
	Parent  string         `json:"parent"`
	ImageID string         `json:"image_id"`
	CPUs    int            `json:"cpus"`
	MemMB   int            `json:"mem_mb"`
	Accel   string         `json:"accel"`
	// Bytes is what the snapshot itself takes on the disk.
	Bytes    int64    `json:"bytes"`
	NeededBy []string `json:"needed_by"`
	// Flat says that all its memory is in one file, which a restore maps as it
	// is.
	Flat bool `json:"flat"`
}

// snapshotFault is a snapshot that cannot be read.
type snapshotFault struct {
	ID    string `json:"id"`
	Error string `json:"error"`
}

func (sh shelf) info(m snapshots.Manifest) snapshotInfo {
	return snapshotInfo{
		ID: m.ID, Kind: m.Kind, Label: m.Label, Created: m.Created, Parent: m.Parent, ImageID: m.ImageID,
		CPUs: m.Machine.CPUs, MemMB: m.Machine.MemMB, Accel: m.Machine.Accel,
		Bytes: sh.size(m.ID), NeededBy: sh.neededBy(m.ID), Flat: sh.flat(m),
	}
}

func newSnapshotLs(s streams) *cobra.Command {
	var all, tree, asJSON bool
	c := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List the snapshots",
		Long: `List the snapshots, the oldest first. SIZE is what each takes on the disk
itself: what it shares with its parent is not counted again.

` + doneHelp,
		Example: `  kosa8 snapshot ls
  kosa8 snapshot ls --tree --all     with templates and forks, what came from what`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if tree && asJSON {
				return cli.Usagef("the tree is for people; with --json each snapshot names its parent: leave out --tree")
			}
			sh, err := readShelf(c.Context())
			if err != nil {
				return err
			}
			kept := sh.kept(all)
			switch {
			case asJSON:
				err = sh.printJSON(s.out, kept)
			case len(kept) == 0 && len(sh.problems) == 0:
				_, err = fmt.Fprintf(s.out, "no snapshots in %s\n  make one: kosa8 run --save base -- PROGRAM\n", sh.home.SnapshotsDir())
			case len(kept) > 0:
				err = sh.printTable(s.out, kept, all, tree)
			}
			if err != nil {
				return err
			}
			return errors.Join(sh.faults(), sh.unfit())
		},
	}
	c.Flags().BoolVarP(&all, "all", "a", false, "templates and forks too")
	c.Flags().BoolVar(&tree, "tree", false, "show below each what was made from it")
	c.Flags().BoolVar(&asJSON, "json", false, "print as JSON")
	return c
}

// unfit names the snapshots that can be read and yet are of no use.
func (sh shelf) unfit() error {
	damaged, useless := sh.store.Unfit(sh.all, sh.problems)
	var errs []error
	for _, id := range damaged {
		if slices.ContainsFunc(sh.all, func(m snapshots.Manifest) bool { return m.ID == id }) {
			errs = append(errs, fmt.Errorf("snapshot %s lacks a file, or some of one", id))
		}
	}
	for _, id := range useless {
		errs = append(errs, fmt.Errorf("snapshot %s needs one that is damaged or gone", id))
	}
	if n := len(errs); n > 0 {
		errs[n-1] = cli.Advise(errs[n-1], "no VM can go on from those; see `kosa8 snapshot verify`")
	}
	return errors.Join(errs...)
}

func (sh shelf) printJSON(w io.Writer, kept []snapshots.Manifest) error {
	out := struct {
		Snapshots []snapshotInfo  `json:"snapshots"`
		Problems  []snapshotFault `json:"problems"`
	}{[]snapshotInfo{}, []snapshotFault{}}
	for _, m := range kept {
		out.Snapshots = append(out.Snapshots, sh.info(m))
	}
	for _, p := range sh.problems {
		out.Problems = append(out.Problems, snapshotFault{p.ID, p.Err.Error()})
	}
	return cli.PrintJSON(w, out)
}

func (sh shelf) printTable(w io.Writer, kept []snapshots.Manifest, all, tree bool) error {
	t := cli.Table{Right: []int{3}}
	head := []string{"ID", "LABEL", "CREATED", "SIZE", "MEMORY/CPUS", "PARENT"}
	if all {
		head = append(head, "KIND")
	}
	t.Row(head...)
	row := func(m snapshots.Manifest, branch string) {
		cells := []string{branch + m.ID, short(m.Label), when(m.Created), cli.FormatBytes(sh.size(m.ID)), size(m.Machine), m.Parent}
		if all {
			cells = append(cells, string(m.Kind))
		}
		t.Row(cells...)
	}
	if !tree {
		for _, m := range kept {
			row(m, "")
		}
		return t.Write(w)
	}
	below := sh.children(kept)
	var draw func(id, indent string)
	draw = func(id, indent string) {
		for i, m := range below[id] {
			branch, next := "├─ ", "│  "
			if i == len(below[id])-1 {
				branch, next = "└─ ", "   "
			}
			if id == "" {
				branch, next = "", ""
			}
			row(m, indent+branch)
			draw(m.ID, indent+next)
		}
	}
	draw("", "")
	return t.Write(w)
}

// children are the snapshots below each that is kept; "" has those below none.
func (sh shelf) children(kept []snapshots.Manifest) map[string][]snapshots.Manifest {
	shown, parent := map[string]bool{}, map[string]string{}
	for _, m := range kept {
		shown[m.ID] = true
	}
	for _, m := range sh.all {
		parent[m.ID] = m.Parent
	}
	below := map[string][]snapshots.Manifest{}
	for _, m := range kept {
		up := m.Parent
		for steps := 0; up != "" && !shown[up]; steps++ {
			if up = parent[up]; steps > len(sh.all) {
				up = "" // manifests that name each other
			}
		}
		below[up] = append(below[up], m)
	}
	return below
}

func newSnapshotShow(s streams) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "show ID",
		Short: "Show all about one snapshot",
		Long: `Show what a snapshot is, what it needs, what needs it, and its files. Its files
are not read: "kosa8 snapshot verify" does that.

` + doneHelp,
		Example:           `  kosa8 snapshot show s0123456789abcdef --json`,
		Args:              oneID,
		ValidArgsFunction: completeSnapshots(false, func(snapshots.Manifest) bool { return true }),
		RunE: func(c *cobra.Command, args []string) error {
			sh, err := readShelf(c.Context())
			if err != nil {
				return err
			}
			m, err := sh.manifest(c.Context(), args[0])
			if err != nil {
				return err
			}
			if asJSON {
				return cli.PrintJSON(s.out, struct {
					snapshotInfo
					Manifest snapshots.Manifest `json:"manifest"`
				}{sh.info(m), m})
			}
			return sh.show(s.out, m)
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print as JSON, with the whole manifest")
	return c
}

func (sh shelf) show(w io.Writer, m snapshots.Manifest) error {
	or := func(text, empty string) string {
		if text == "" {
			return empty
		}
		return text
	}
	memory := "all of it in its own file"
	if m.Memory.Kind == snapshots.MemoryDifference {
		memory = fmt.Sprintf("%s changed since %s", cli.FormatBytes(m.Memory.Bytes), m.Parent)
		if sh.flat(m) {
			memory += "; all of it is in the cache"
		} else {
			memory += "; not in the cache"
		}
	}
	var t cli.Table
	for _, row := range [][2]string{
		{"id", m.ID},
		{"kind", string(m.Kind)},
		{"label", or(cli.Clean(m.Label), "none")},
		{"created", whenExactly(m.Created)},
		{"machine", size(m.Machine) + ", " + cli.Clean(m.Machine.Accel)},
		{"made by", "QEMU " + cli.Clean(m.Machine.QEMU) + " on " + cli.Clean(m.Machine.CPUModel)},
		{"guest image", m.ImageID},
		{"memory", memory},
		{"parent", or(m.Parent, "none")},
		{"needs", or(list(m.Needs()), "none")},
		{"needed by", or(list(sh.neededBy(m.ID)), "none")},
		{"on disk", cli.FormatBytes(sh.size(m.ID))},
	} {
		t.Row(row[0], row[1])
	}
	if err := t.Write(w); err != nil {
		return err
	}
	files := cli.Table{Right: []int{1}}
	files.Row("FILE", "BYTES", "SHA256")
	for _, f := range m.Files {
		files.Row(f.Name, fmt.Sprint(f.Size), f.SHA256)
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return files.Write(w)
}
