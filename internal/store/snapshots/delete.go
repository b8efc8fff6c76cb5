package snapshots

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/store"
)

// corpse is a folder that no one else sees or holds any more.
type corpse struct {
	path string
	lock *os.File // alone; nil when the folder had none
}

func (c corpse) release() {
	if c.lock != nil {
		c.lock.Close()
	}
}

// remove removes the files and says how much they took.
func (c corpse) remove() (int64, error) {
	bytes := usage(c.path)
	return bytes, store.RemoveLocked(c.path)
}

// Delete removes a snapshot of any kind, damaged or not. It refuses, with
// ErrNeeded, one that another needs or that a process holds. Once it returns
// nil the snapshot is gone for good; the forks it needed go at the next
// Collect.
func (s *Store) Delete(ctx context.Context, id string) error {
	if err := CheckID(id); err != nil {
		return err
	}
	c, err := s.bury(ctx, id)
	if err != nil {
		return err
	}
	defer c.release()
	if _, err := c.remove(); err != nil {
		return fmt.Errorf("delete snapshot %s: it is gone, but not all its files: %w", id, err)
	}
	for _, kind := range []cache{ramCache, diskCache} {
		if dir, err := s.cacheDir(kind); err == nil {
			_ = s.collectFlat(filepath.Join(dir, id), true, &Collected{}) // Collect tries again
		}
	}
	return nil
}

// bury takes the snapshot's name away. A lock that is held is asked for a few
// times: a process that is just being started has a copy of all its parent's
// open files until it is its own program.
func (s *Store) bury(ctx context.Context, id string) (corpse, error) {
	for try := 0; ; try++ {
		c, err := s.buryOnce(ctx, id)
		if !errors.Is(err, store.ErrHeld) {
			return c, err
		}
		if try == 5 {
			return c, fmt.Errorf("snapshot %s %w by a running VM or another process; stop that first", id, ErrNeeded)
		}
		select {
		case <-ctx.Done():
			return c, context.Cause(ctx)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (s *Store) buryOnce(ctx context.Context, id string) (corpse, error) {
	gate, err := s.gate(ctx, store.LockAlone)
	if errors.Is(err, fs.ErrNotExist) {
		return corpse{}, s.notFound(id)
	}
	if err != nil {
		return corpse{}, fmt.Errorf("delete snapshot %s: %w", id, store.WithRemedy(err))
	}
	defer gate.Close()
	if _, err := os.Lstat(s.folder(id)); errors.Is(err, fs.ErrNotExist) {
		return corpse{}, s.notFound(id)
	}
	all, problems, err := s.List(ctx)
	if err != nil {
		return corpse{}, err
	}
	if by := s.neededBy(all, problems)[id]; len(by) > 0 {
		return corpse{}, neededError(id, by)
	}
	c, err := s.rename(id)
	if err != nil {
		return c, fmt.Errorf("delete snapshot %s: %w", id, store.WithRemedy(err))
	}
	// The name has to be gone before the files are: a power cut between the
	// two must not bring half a snapshot back.
	if err := store.SyncDir(s.dir()); err != nil {
		c.release()
		return corpse{}, fmt.Errorf("delete snapshot %s: %w", id, store.WithRemedy(err))
	}
	return c, nil
}

// rename takes a snapshot out of sight, with its lock. The gate is closed.
func (s *Store) rename(id string) (corpse, error) {
	lock, err := claim(s.folder(id))
	if err != nil {
		return corpse{}, err
	}
	c := corpse{s.temporary(deadPrefix, id), lock}
	if err := os.Rename(s.folder(id), c.path); err != nil {
		c.release()
		return corpse{}, err
	}
	return c, nil
}

// claim takes the lock of a folder; nil if it has none. ErrHeld says that
// somebody else has it.
func claim(dir string) (*os.File, error) {
	path := filepath.Join(dir, lockName)
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ELOOP) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := store.TryLock(f, store.LockAlone); err != nil {
		f.Close()
		return nil, err
	}
	if !store.IsAt(f, path) {
		f.Close()
		return nil, store.ErrHeld
	}
	return f, nil
}
