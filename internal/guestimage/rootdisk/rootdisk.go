// Package rootdisk makes the read-only root disk of a guest: packages put
// together by mmdebstrap, cleaned, and written as an uncompressed squashfs.
//
// Three steps, because each is checked on its own: mmdebstrap gives a tar,
// Clean turns it into another with nothing in it that differs from one build
// to the next, and sqfstar writes the disk. Not compressed: a guest without
// hardware virtualization pays ten times for each byte it unpacks, the host
// keeps the disk in its page cache anyway.
package rootdisk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestimage/debian"
	"github.com/warren-vm/warren/internal/guestimage/kernel"
	"github.com/warren-vm/warren/internal/guestimage/tool"
)

// exclude keeps what no program reads from being unpacked at all; licences
// stay.
var exclude = []string{
	"path-exclude=/usr/share/doc/*",
	"path-include=/usr/share/doc/*/copyright",
	"path-exclude=/usr/share/man/*",
	"path-exclude=/usr/share/info/*",
	"path-exclude=/usr/share/locale/*",
	"path-exclude=/usr/share/lintian/*",
	"path-exclude=/usr/share/bug/*",
}

// Bootstrap writes the installed packages as a tar to target. scratch is an
// empty folder of its own.
func Bootstrap(ctx context.Context, run *tool.Runner, apt *debian.Apt, packages []string, scratch, target string) error {
	sources, err := apt.Sources(ctx)
	if err != nil {
		return err
	}
	settings, err := apt.Settings(ctx)
	if err != nil {
		return err
	}
	list, conf := filepath.Join(scratch, "sources.list"), filepath.Join(scratch, "apt.conf")
	err = errors.Join(
		os.WriteFile(list, []byte(strings.Join(sources, "\n")+"\n"), 0o600),
		os.WriteFile(conf, []byte(settings), 0o600))
	if err != nil {
		return err
	}
	args := []string{
		// Without it mmdebstrap draws a progress bar with one whole CPU.
		"--verbose",
		"--mode=" + mode(ctx, run), "--variant=apt", "--format=tar",
		"--include=" + strings.Join(packages, ","),
		// The tree is thrown away once it is packed.
		"--dpkgopt=force-unsafe-io",
		// The lists are the ones the kernel comes from, fetched once.
		"--skip=update,check/signed-by",
		"--setup-hook=sync-in " + quote(apt.Lists()) + " /var/lib/apt/lists",
		"--setup-hook=cat " + quote(conf) + ` >> "$MMDEBSTRAP_APT_CONFIG"`,
	}
	for _, e := range exclude {
		args = append(args, "--dpkgopt="+e)
	}
	// An empty suite: the packages of all sources count, whatever their suites
	// are called.
	return run.Run(ctx, tool.Command{Name: "mmdebstrap", Args: append(args, "", target, list), Dir: scratch})
}

// mode is how mmdebstrap becomes root in its chroot. All of them give the same
// bytes. Root gets a mount namespace of its own; others get fakechroot, which
// needs no entry in /etc/subuid and leaves only files the user can remove.
func mode(ctx context.Context, run *tool.Runner) string {
	if os.Geteuid() == 0 && run.Run(ctx, tool.Command{Name: "unshare", Args: []string{"--mount", "true"}}) == nil {
		return "unshare"
	}
	return "fakechroot"
}

// quote quotes for a POSIX shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// Write cleans the tar at from, adds modules, and writes the disk to target.
func Write(ctx context.Context, run *tool.Runner, from, target, kernelVersion string, modules []kernel.Module) (Contents, error) {
	in, err := os.Open(from)
	if err != nil {
		return Contents{}, err
	}
	defer in.Close()
	contents, err := Examine(in)
	if err != nil {
		return contents, fmt.Errorf("read what mmdebstrap made: %w", err)
	}
	if _, err := in.Seek(0, io.SeekStart); err != nil {
		return contents, err
	}
	r, w := io.Pipe()
	cleaned := make(chan error, 1)
	go func() {
		err := Clean(w, in, contents.Newest, kernelVersion, modules)
		w.CloseWithError(err)
		cleaned <- err
	}()
	err = squash(ctx, run, r, target, contents.Newest)
	_ = r.Close() // Clean ends even when sqfstar ended early
	if cleanErr := <-cleaned; cleanErr != nil && !errors.Is(cleanErr, io.ErrClosedPipe) {
		return contents, fmt.Errorf("clean the root disk: %w", cleanErr)
	}
	return contents, err
}

// RemoveAll removes a folder that an ended build left, whatever the modes of
// the folders in it.
func RemoveAll(dir string) error {
	err := os.RemoveAll(dir)
	if err == nil || !errors.Is(err, unix.EACCES) {
		return err
	}
	_ = filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if d != nil && d.IsDir() {
			_ = os.Chmod(p, 0o700)
		}
		return nil
	})
	return os.RemoveAll(dir)
}
