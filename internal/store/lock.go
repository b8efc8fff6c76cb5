package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// LockMode says whether others may have a lock too.
type LockMode int

// LockShared is had by any number of holders, LockAlone by one.
const (
	LockShared LockMode = unix.LOCK_SH
	LockAlone  LockMode = unix.LOCK_EX
)

// Lock takes the flock of an open file and waits for it until ctx ends; a
// blocking flock could not be given up. Closing the file gives it up.
//
// A file that has the lock in another mode changes it, but not in one step:
// for a moment it has none.
func Lock(ctx context.Context, f *os.File, mode LockMode) error {
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		err := TryLock(f, mode)
		if err == nil {
			return nil
		}
		if !errors.Is(err, ErrHeld) && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("lock %s: %w", f.Name(), err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("lock %s: another process has it: %w", f.Name(), context.Cause(ctx))
		case <-time.After(wait):
		}
	}
}

// TryLock is Lock without the wait: ErrHeld says that another has it.
func TryLock(f *os.File, mode LockMode) error {
	err := unix.Flock(int(f.Fd()), int(mode)|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return ErrHeld
	}
	return err
}

// IsAt is false when what path names was removed or replaced after f was
// opened. A lock file that can be removed protects nothing before this was
// asked.
func IsAt(f *os.File, path string) bool {
	held, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Lstat(path)
	return err == nil && os.SameFile(held, there)
}

// RemoveLocked removes a folder, the file "lock" in it last: as long as there
// is anything else in it the lock says that someone is at work.
func RemoveLocked(path string) error { return removeAll(path) }

// lockIsIn is false when the folder was removed or replaced after its lock
// file was opened.
func lockIsIn(lock *os.File, path string) bool {
	return IsAt(lock, filepath.Join(path, lockName))
}
