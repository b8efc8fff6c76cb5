package store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Swept is what a Sweep did.
type Swept struct {
	// Removed are the ids of VMs whose folders were removed; a folder that
	// was never finished, or half removed before, is not among them.
	Removed []string
	// Killed are the processes that had outlived their supervisor.
	Killed []int
}

// Sweep removes what VMs without a living supervisor left: their processes,
// their sockets, their files. It never touches a VM whose lock is held, and
// any number of sweeps and creations may run at once, in any processes. It
// goes on after a folder it cannot remove and reports all such in the error.
func (h Home) Sweep(ctx context.Context) (Swept, error) {
	return h.sweep(ctx, func(string) bool { return true })
}

// Reap is a Sweep of one VM folder. A folder that is held or gone is no
// error.
func Reap(ctx context.Context, path string) (Swept, error) {
	id := filepath.Base(path)
	return Home(filepath.Dir(filepath.Dir(path))).sweep(ctx, func(name string) bool { return name == id })
}

func (h Home) sweep(ctx context.Context, wanted func(name string) bool) (Swept, error) {
	var swept Swept
	dead, err := h.bury(ctx, wanted, &swept)
	defer func() {
		for _, d := range dead {
			d.release()
		}
	}()
	if err != nil {
		return swept, fmt.Errorf("sweep %s: %w", h.VMsDir(), err)
	}
	var errs []error
	for _, d := range dead {
		if err := d.finish(ctx, &swept); err != nil {
			errs = append(errs, fmt.Errorf("sweep %s: %w", d.path, err))
		}
	}
	return swept, errors.Join(errs...)
}

// A corpse is a folder that no one else sees or holds any more.
type corpse struct {
	path string
	lock *os.File // nil when the folder had none
}

func (c corpse) release() {
	if c.lock != nil {
		c.lock.Close()
	}
}

// bury renames the folders of dead VMs out of the way. It alone runs with
// the gate closed to creators and other sweeps, so that a folder without a
// lock file is known to be left over and not one being made; the slow work
// comes after.
func (h Home) bury(ctx context.Context, wanted func(name string) bool, swept *Swept) ([]corpse, error) {
	gate, err := h.enter(ctx, LockAlone)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // no home, no VMs
	}
	if err != nil {
		return nil, err
	}
	defer gate.Close()
	entries, err := os.ReadDir(h.VMsDir())
	if err != nil {
		return nil, err
	}
	var dead []corpse
	for _, e := range entries {
		if !e.IsDir() || !wanted(e.Name()) {
			continue
		}
		path := h.VMDir(e.Name())
		lock, free := claim(path)
		if !free {
			continue
		}
		if !strings.HasPrefix(e.Name(), ".") {
			buried := deadPath(path)
			if err := os.Rename(path, buried); err != nil {
				corpse{path, lock}.release()
				if errors.Is(err, fs.ErrNotExist) {
					continue // its own supervisor was faster
				}
				return dead, err
			}
			swept.Removed = append(swept.Removed, e.Name())
			path = buried
		}
		dead = append(dead, corpse{path, lock})
	}
	return dead, nil
}

// claim takes the lock of a folder if nobody has it.
func claim(path string) (lock *os.File, free bool) {
	lock, err := os.OpenFile(filepath.Join(path, lockName), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, true
	}
	if err != nil {
		return nil, false
	}
	if TryLock(lock, LockAlone) != nil || !lockIsIn(lock, path) {
		lock.Close()
		return nil, false
	}
	return lock, true
}

// finish kills what the dead VM left running and removes its files. Another
// sweep cannot be at it: it has the lock, or there was nothing to lock.
func (c corpse) finish(ctx context.Context, swept *Swept) error {
	if r, err := ReadRecord(c.path); err == nil {
		for _, p := range []Process{r.Supervisor, r.QEMU} {
			if p.PID == os.Getpid() {
				continue // a supervisor within this process, in tests
			}
			killed, err := p.Kill(ctx)
			if killed {
				swept.Killed = append(swept.Killed, p.PID)
			}
			if err != nil {
				return err // the files stay: they may still be in use
			}
		}
	}
	return removeAll(c.path)
}

// removeDir takes a VM folder out of sight in one step and then removes it,
// so that a removal cut short does not leave half a VM under its name.
func removeDir(path string) error {
	buried := deadPath(path)
	if err := os.Rename(path, buried); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	return removeAll(buried)
}

// removeAll removes a folder, its lock last: as long as there is anything
// else in it the lock says that someone is at work.
func removeAll(path string) error {
	entries, err := os.ReadDir(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() == lockName {
			continue
		}
		if err := os.RemoveAll(filepath.Join(path, e.Name())); err != nil {
			return err
		}
	}
	return os.RemoveAll(path)
}

func deadPath(path string) string {
	var b [4]byte
	rand.Read(b[:])
	dir, id := filepath.Split(path)
	return filepath.Join(dir, fmt.Sprintf("%s%s-%x", deadPrefix, id, b))
}

// enter takes the lock of the vms folder; closing the file gives it up.
func (h Home) enter(ctx context.Context, mode LockMode) (*os.File, error) {
	gate, err := os.OpenFile(filepath.Join(h.VMsDir(), ".lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := Lock(ctx, gate, mode); err != nil {
		gate.Close()
		return nil, err
	}
	return gate, nil
}
