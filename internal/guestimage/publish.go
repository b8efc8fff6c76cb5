package guestimage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestimage/rootdisk"
)

// lockBuild waits until no other build runs in this home. waiting is called
// once when it has to. The lock goes with the process: a killed build does not
// keep others out.
func lockBuild(ctx context.Context, home string, waiting func()) (release func(), err error) {
	if err := os.MkdirAll(guestDir(home), 0o700); err != nil {
		return nil, fmt.Errorf("guest image: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(guestDir(home), lockName), os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("guest image: %w", err)
	}
	for told := false; ; told = true {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			_ = f.Close()
			return nil, fmt.Errorf("guest image: lock %s: %w", f.Name(), err)
		}
		if !told {
			waiting()
		}
		select {
		case <-ctx.Done():
			_ = f.Close()
			return nil, fmt.Errorf("wait for another build of the guest image: %w", context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// publish flushes the generation in staging, gives it its name and makes it
// the one in use. When it fails the old one stays in use.
func publish(home, staging string, m Manifest) (*Image, error) {
	img, err := place(home, staging, m)
	if err != nil {
		return nil, err
	}
	return img, use(home, m.ImageID)
}

// place flushes the generation in staging and gives it its name.
func place(home, staging string, m Manifest) (*Image, error) {
	if err := flush(staging); err != nil {
		return nil, err
	}
	dir := filepath.Join(guestDir(home), m.ImageID)
	// The same content was published before. It is not trusted: this is also
	// how a damaged generation is repaired.
	if _, err := os.Lstat(dir); err == nil {
		aside, err := os.MkdirTemp(guestDir(home), oldPrefix)
		if err != nil {
			return nil, err
		}
		if err := os.Rename(dir, filepath.Join(aside, "generation")); err != nil {
			return nil, err
		}
	}
	if err := os.Rename(staging, dir); err != nil {
		return nil, fmt.Errorf("publish the guest image: %w", err)
	}
	img := imageIn(dir)
	img.Manifest = m
	return img, syncDir(guestDir(home))
}

// use makes a published generation the one in use.
func use(home, id string) error {
	// The generation's name has to be on the disk before the link that says it.
	if err := syncDir(guestDir(home)); err != nil {
		return err
	}
	fresh := filepath.Join(guestDir(home), buildPrefix+currentName)
	if err := os.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(id, fresh); err != nil {
		return err
	}
	if err := os.Rename(fresh, filepath.Join(guestDir(home), currentName)); err != nil {
		return fmt.Errorf("publish the guest image: %w", err)
	}
	return syncDir(guestDir(home))
}

// flush puts a folder of files on the disk.
func flush(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		f, err := os.Open(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		err = errors.Join(f.Sync(), f.Close())
		if err != nil {
			return fmt.Errorf("write %s: %w", f.Name(), err)
		}
	}
	return syncDir(dir)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// sweep removes what builds left, this one included. The build lock is held,
// so nothing of it is in use. What cannot be removed stays for the next build:
// a tool of a build that was just killed may still be writing.
func sweep(home string) {
	for _, name := range leftovers(home) {
		_ = rootdisk.RemoveAll(filepath.Join(guestDir(home), name))
	}
}

func leftovers(home string) (names []string) {
	entries, _ := os.ReadDir(guestDir(home))
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), buildPrefix) || strings.HasPrefix(e.Name(), oldPrefix) {
			names = append(names, e.Name())
		}
	}
	return names
}

// Leftovers names what builds and installations that were killed left in the
// folder of guest images. While one runs there is none.
func Leftovers(home string) (names []string) {
	whileNoneBuilds(home, func() { names = leftovers(home) })
	return names
}

// Sweep removes the Leftovers. The next build or installation would too.
func Sweep(home string) { whileNoneBuilds(home, func() { sweep(home) }) }

// whileNoneBuilds does nothing in a home that never had an image, or when
// somebody is making one.
func whileNoneBuilds(home string, do func()) {
	f, err := os.OpenFile(filepath.Join(guestDir(home), lockName), os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer f.Close()
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
		do()
	}
}

// prune removes generations that nobody needs: all but the one in use, the
// one built last before it, those that keep names and those that are held.
func prune(ctx context.Context, home string, img *Image, keep func(context.Context) ([]string, error)) error {
	entries, err := os.ReadDir(guestDir(home))
	if err != nil {
		return err
	}
	var old []string
	previous, previousBuilt := "", int64(-1)
	for _, e := range entries {
		id := e.Name()
		if !e.IsDir() || !generationName.MatchString(id) || id == img.Manifest.ImageID {
			continue
		}
		old = append(old, id)
		if b, err := readBuild(filepath.Join(guestDir(home), id)); err == nil && b.BuiltUnix > previousBuilt {
			previous, previousBuilt = id, b.BuiltUnix
		}
	}
	var errs []error
	for _, id := range old {
		if id != previous {
			errs = append(errs, remove(home, id, func() bool { return needed(ctx, id, keep) }))
		}
	}
	return errors.Join(errs...)
}

// needed says whether keep names a generation. What cannot be told is needed.
func needed(ctx context.Context, id string, keep func(context.Context) ([]string, error)) bool {
	if keep == nil {
		return false
	}
	kept, err := keep(ctx)
	return err != nil || slices.Contains(kept, id)
}

// remove removes a generation, unless it is held or needed. That is asked when
// nobody can hold it any more: a VM that had it may have left a snapshot.
func remove(home, id string, needed func() bool) error {
	dir := filepath.Join(guestDir(home), id)
	f, err := os.Open(filepath.Join(dir, lockName))
	if err == nil {
		defer f.Close()
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
			return nil
		}
	}
	if needed() {
		return nil
	}
	// Renamed first: what has a generation's name is whole.
	aside, err := os.MkdirTemp(guestDir(home), oldPrefix)
	if err != nil {
		return err
	}
	if err := os.Rename(dir, filepath.Join(aside, "generation")); err != nil {
		return err
	}
	return rootdisk.RemoveAll(aside)
}
