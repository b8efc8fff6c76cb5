package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/guestimage"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
)

type exportOptions struct {
	id, path            string
	bare, force, silent bool
}

func newSnapshotExport(s streams) *cobra.Command {
	var o exportOptions
	c := &cobra.Command{
		Use:   "export ID",
		Short: "Write a snapshot into a file for another machine",
		Long: `Write a snapshot, all that it needs and its guest image as one archive, tar in
zstd. The file holds all of the VM's memory, with whatever secrets were in it;
only its owner can read it. It appears when it is whole. Whoever has the same
guest image already needs none: --without-image.

` + doneHelp,
		Example: `  kosa8 snapshot export s0123456789abcdef
  kosa8 snapshot export s0123456789abcdef -o - | ssh other kosa8 snapshot import -`,
		Args:              oneID,
		ValidArgsFunction: completeSnapshots(false, isSnapshot),
		RunE: func(c *cobra.Command, args []string) error {
			o.id = args[0]
			if o.path == "" {
				o.path = o.id + ".tar.zst"
			}
			return snapshotExport(c.Context(), s, o)
		},
	}
	c.Flags().VarP(text(&o.path, "file", ""), "output", "o", "where to; - is standard output (default: ID.tar.zst)")
	c.Flags().BoolVar(&o.bare, "without-image", false, "leave the guest image out")
	c.Flags().BoolVarP(&o.force, "force", "f", false, "replace a file that is there")
	c.Flags().BoolVarP(&o.silent, "quiet", "q", false, "no progress; errors only")
	return c
}

func snapshotExport(ctx context.Context, s streams, o exportOptions) error {
	if o.path == "-" && cli.IsTerminal(s.out) {
		return cli.Advise(cli.Usagef("an archive is not written to a terminal"), "name a file with -o, or write into a pipe")
	}
	if o.path != "-" {
		switch info, err := os.Lstat(o.path); {
		case err == nil && !info.Mode().IsRegular():
			return cli.Usagef("%s is not a file; use -o - for a pipe", o.path)
		case err == nil && !o.force:
			return cli.Usagef("%s is there already; choose another with -o, or replace it with --force", o.path)
		}
	}
	home, err := homeOf("")
	if err != nil {
		return err
	}
	ctx, signals := cli.CatchInterrupts(ctx)
	defer signals.Stop()
	progress := cli.NewProgress(s.err, o.silent, cli.Silent)
	defer progress.Done()
	progress.Step("looking at snapshot %s", o.id)
	st := snapshots.In(home)
	sn, err := st.Open(ctx, o.id)
	if err != nil {
		return because(ctx, named(ctx, o.id, err))
	}
	defer sn.Close()
	var files []snapshots.ImageFile
	if !o.bare {
		scratch, err := os.MkdirTemp("", "kosa8-export-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(scratch)
		release, packed, err := imageFiles(ctx, home, sn.Manifest().ImageID, scratch)
		if err != nil {
			return because(ctx, err)
		}
		defer release()
		files = packed
	}
	var wrote int64
	write := func(w io.Writer) error {
		wrote = 0
		return st.Export(ctx, &meter{w: w, step: func(n int64) {
			wrote = n
			progress.Step("exporting %s: %s written", o.id, cli.FormatBytes(n>>20<<20))
		}}, sn, snapshots.ExportOptions{Image: files})
	}
	if o.path == "-" {
		err := write(s.out)
		if errors.Is(err, syscall.EPIPE) {
			return &cli.Exit{Code: cli.ExitPipe}
		}
		return because(ctx, err)
	}
	err = writeNew(o.path, o.force, write)
	progress.Done()
	if err != nil {
		return because(ctx, exportAdvice(o.path, err))
	}
	if o.silent {
		return nil
	}
	_, err = fmt.Fprintf(s.out, "snapshot %s is in %s (%s)\n  on the other machine: kosa8 snapshot import %s\n",
		o.id, o.path, cli.FormatBytes(wrote), filepath.Base(o.path))
	return err
}

// imageFiles are the files of a guest image for an archive. They stay until
// release.
func imageFiles(ctx context.Context, home store.Home, id, scratch string) (release func(), files []snapshots.ImageFile, err error) {
	img, err := guestimage.OpenGeneration(ctx, home.Dir(), id)
	if errors.Is(err, guestimage.ErrNotBuilt) {
		return nil, nil, cli.Advise(fmt.Errorf("guest image %s of the snapshot is gone", id), "export without it: --without-image")
	}
	if err != nil {
		return nil, nil, err
	}
	if release, err = img.Hold(); err != nil {
		return nil, nil, err
	}
	carried, err := img.Carry(ctx, scratch)
	if err != nil {
		release()
		return nil, nil, err
	}
	for _, f := range carried {
		files = append(files, snapshots.ImageFile(f))
	}
	return release, files, nil
}

// exportAdvice says what can be done about a folder that takes no archive.
func exportAdvice(path string, err error) error {
	dir := filepath.Dir(path)
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return cli.Advise(err, "free some space in "+dir+", or name a file on another disk with -o")
	case errors.Is(err, syscall.EROFS), errors.Is(err, fs.ErrPermission), errors.Is(err, fs.ErrNotExist):
		return cli.Advise(err, "name a file in a folder that you can write to with -o")
	}
	return err
}

// writeNew writes a file that only its owner can read and that has its name
// when it is whole and on the disk. Killed before that it leaves nothing, where
// the file system has files without a name.
func writeNew(path string, replace bool, write func(io.Writer) error) error {
	dir := filepath.Dir(path)
	fd, err := unix.Open(dir, unix.O_WRONLY|unix.O_TMPFILE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return writeBeside(path, write)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if err := write(f); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	name := path
	if replace { // a link replaces nothing
		name = filepath.Join(dir, "."+snapshots.NewID())
	}
	// Not by the descriptor itself: that takes a capability.
	if err := unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd), unix.AT_FDCWD, name, unix.AT_SYMLINK_FOLLOW); err != nil {
		return &os.PathError{Op: "create", Path: path, Err: err}
	}
	if replace {
		if err := os.Rename(name, path); err != nil {
			return errors.Join(&os.PathError{Op: "replace", Path: path, Err: errors.Unwrap(err)}, os.Remove(name))
		}
	}
	return store.SyncDir(dir)
}

// writeBeside is writeNew for file systems that know no files without a name.
func writeBeside(path string, write func(io.Writer) error) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		cause := err
		if e := (*os.PathError)(nil); errors.As(err, &e) {
			cause = e.Err // its name is ours, not the user's
		}
		return &os.PathError{Op: "create", Path: path, Err: cause}
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	if err := write(f); err != nil {
		return err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return store.SyncDir(filepath.Dir(path))
}

// meter counts what passes through it.
type meter struct {
	w    io.Writer
	r    io.Reader
	n    int64
	step func(n int64)
}

func (m *meter) Write(p []byte) (int, error) {
	n, err := m.w.Write(p)
	m.n += int64(n)
	m.step(m.n)
	return n, err
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.r.Read(p)
	m.n += int64(n)
	m.step(m.n)
	return n, err
}

// patient reads from a pipe, which keeps its reader waiting, until ctx ends.
func patient(ctx context.Context, from io.Reader) io.Reader {
	r, w := io.Pipe()
	context.AfterFunc(ctx, func() { r.CloseWithError(context.Cause(ctx)) })
	go func() {
		_, err := io.Copy(w, from)
		w.CloseWithError(err)
	}()
	return r
}

type importOptions struct {
	path           string
	maxMB          int
	silent, asJSON bool
}

func newSnapshotImport(s streams) *cobra.Command {
	var o importOptions
	c := &cobra.Command{
		Use:   "import FILE",
		Short: "Take in a snapshot that was exported",
		Long: `Take in a snapshot from an archive of "kosa8 snapshot export"; - is standard
input. Everything in it is verified first, and nothing stays of an archive that
is cut short or wrong. The guest image in it is taken in if this home does not
have it. Digests prove that an archive is whole, not where it comes from.

` + doneHelp,
		Example: `  kosa8 snapshot import s0123456789abcdef.tar.zst
  ssh other kosa8 snapshot export -o - s0123456789abcdef | kosa8 snapshot import -`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("%s takes one file, or - for standard input", c.CommandPath())
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			o.path = args[0]
			return snapshotImport(c.Context(), s, o)
		},
	}
	c.Flags().Var(&value{kind: "size", text: "64g", set: func(text string) (err error) {
		o.maxMB, err = cli.ParseMemMB(text)
		if err == nil && o.maxMB == 0 {
			err = errors.New("too little; leave it out for 64g")
		}
		return err
	}}, "max-size", "refuse what unpacks to more")
	c.Flags().BoolVarP(&o.silent, "quiet", "q", false, "no progress; print the id alone")
	c.Flags().BoolVar(&o.asJSON, "json", false, "print the snapshot as JSON")
	return c
}

func snapshotImport(ctx context.Context, s streams, o importOptions) error {
	sh, err := readShelf(ctx)
	if err != nil {
		return err
	}
	if o.path == "-" && cli.IsTerminal(s.in) {
		return cli.Advise(cli.Usagef("an archive is not read from a terminal"), "name a file, or read from a pipe")
	}
	ctx, signals := cli.CatchInterrupts(ctx)
	defer signals.Stop()
	var in io.Reader
	if o.path == "-" {
		in = patient(ctx, s.in)
	} else {
		f, err := os.Open(o.path)
		if err != nil {
			return err
		}
		defer f.Close()
		in = f
	}
	progress := cli.NewProgress(s.err, o.silent, cli.Silent)
	defer progress.Done()
	image, err := guestimage.Install(ctx, sh.home.Dir(), func() { progress.Step("waiting for a build of the guest image to end") })
	if err != nil {
		return because(ctx, store.WithRemedy(err))
	}
	defer image.Close()
	m, err := sh.store.Import(ctx, &meter{r: in, step: func(n int64) {
		progress.Step("importing: %s read", cli.FormatBytes(n>>20<<20))
	}}, snapshots.ImportOptions{MaxBytes: int64(o.maxMB) << 20, Image: image.Take})
	if err != nil {
		return because(ctx, importAdvice(err))
	}
	installed := false
	if image.Begun() {
		progress.Step("putting the guest image on the disk")
		if installed, err = image.Publish(m.ImageID); err != nil {
			return errors.Join(fmt.Errorf("import: %w", store.WithRemedy(err)), sh.undo(ctx, m.ID))
		}
	}
	progress.Done()
	return sh.imported(ctx, s, o, m, installed)
}

// undo removes a snapshot that was imported, and what it needs, but for what
// was there when sh was read.
func (sh shelf) undo(ctx context.Context, id string) error {
	ctx = context.WithoutCancel(ctx)
	was := sh.all
	var err error
	if sh.all, _, err = sh.store.List(ctx); err != nil {
		return err
	}
	var errs []error
	fresh := slices.DeleteFunc(sh.closure(id), func(m snapshots.Manifest) bool {
		return slices.ContainsFunc(was, func(o snapshots.Manifest) bool { return o.ID == m.ID })
	})
	for tries := len(fresh); tries > 0 && len(fresh) > 0; tries-- {
		errs = nil
		fresh = slices.DeleteFunc(fresh, func(m snapshots.Manifest) bool {
			err := sh.store.Delete(ctx, m.ID)
			errs = append(errs, err)
			return err == nil || errors.Is(err, snapshots.ErrNotFound)
		})
	}
	return errors.Join(errs...)
}

func importAdvice(err error) error {
	switch {
	case errors.Is(err, snapshots.ErrTooLarge):
		return cli.Advise(err, "allow more with --max-size, or do not import it")
	case errors.Is(err, snapshots.ErrArchive):
		return cli.Advise(err, "copy it again from where it was exported, or export it again")
	}
	return err
}

func (sh shelf) imported(ctx context.Context, s streams, o importOptions, m snapshots.Manifest, installed bool) error {
	did := "imported snapshot"
	if slices.ContainsFunc(sh.all, func(o snapshots.Manifest) bool { return o.ID == m.ID }) {
		did = "all of it is here already: snapshot"
	}
	_, err := os.Stat(filepath.Join(sh.home.Guest(), m.ImageID))
	lacksImage := errors.Is(err, fs.ErrNotExist)
	switch {
	case o.asJSON:
		if sh.all, sh.problems, err = sh.store.List(ctx); err != nil {
			return err
		}
		err = cli.PrintJSON(s.out, sh.info(m))
	case o.silent:
		_, err = fmt.Fprintln(s.out, m.ID)
	default:
		text := fmt.Sprintf("%s %s%s\n", did, m.ID, labelled(m.Label))
		if installed {
			text += fmt.Sprintf("  with its guest image %s\n", m.ImageID)
		}
		if !lacksImage {
			text += fmt.Sprintf("  run in a copy of it: kosa8 run --from %s base -- PROGRAM\n", m.ID)
		}
		_, err = io.WriteString(s.out, text)
	}
	if err != nil || !lacksImage {
		return err
	}
	return cli.Advise(fmt.Errorf("guest image %s, which snapshot %s needs, is neither here nor in the archive", m.ImageID, m.ID),
		"export the snapshot with its image (without --without-image), and import that")
}

// labelled is a label for the end of an id.
func labelled(label string) string {
	if label == "" {
		return ""
	}
	return " (" + cli.Clean(label) + ")"
}
