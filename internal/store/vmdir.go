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
	"time"
)

// VMDir is the folder of one VM, held by the lock in it. While a VMDir is
// open, no Sweep in any process touches the folder.
type VMDir struct {
	// ID is the VM's name; Path the folder.
	ID   string
	Path string
	lock *os.File
}

// ErrExists says that a VM of that id exists; ErrHeld that another process
// holds it.
var (
	ErrExists = errors.New("exists already")
	ErrHeld   = errors.New("is held by another process")
)

// createWait bounds how long CreateVM waits for a sweep, which holds its lock
// only while it renames.
const createWait = 30 * time.Second

// CheckID says what is wrong with a VM's id.
func CheckID(id string) error {
	const letters = "abcdefghijklmnopqrstuvwxyz0123456789"
	if id == "" || len(id) > 63 || id[0] == '-' || strings.Trim(id, letters+"-") != "" {
		return fmt.Errorf("VM id %q; use 1 to 63 of a-z, 0-9 and -, starting with a letter or digit", id)
	}
	return nil
}

// NewID is a fresh random VM id.
func NewID() string {
	var b [8]byte
	rand.Read(b[:])
	return fmt.Sprintf("v%x", b)
}

// CreateVM makes the folder of a new VM, private and held by the caller until
// Close, Remove or a hand-over with LockFile. When it fails nothing is left.
func (h Home) CreateVM(id string) (*VMDir, error) {
	if err := CheckID(id); err != nil {
		return nil, err
	}
	if err := h.Make(); err != nil {
		return nil, fmt.Errorf("create VM %s: %w", id, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), createWait)
	defer cancel()
	gate, err := h.enter(ctx, LockShared)
	if err != nil {
		return nil, fmt.Errorf("create VM %s: %w", id, WithRemedy(err))
	}
	defer gate.Close()
	d, err := h.create(id)
	if err != nil {
		return nil, fmt.Errorf("create VM %s: %w", id, WithRemedy(err))
	}
	return d, nil
}

// create runs with the gate shared, so no sweep sees the folder without its
// lock.
func (h Home) create(id string) (_ *VMDir, err error) {
	tmp, err := os.MkdirTemp(h.VMsDir(), newPrefix+id+"-")
	if err != nil {
		return nil, err
	}
	var lock *os.File
	defer func() {
		if err != nil {
			lock.Close() // nil is fine
			os.RemoveAll(tmp)
		}
	}()
	if lock, err = os.OpenFile(filepath.Join(tmp, lockName), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return nil, err
	}
	if err = TryLock(lock, LockAlone); err != nil {
		return nil, err
	}
	// A rename never replaces a folder that has something in it, and every
	// VM folder has its lock in it.
	if err = os.Rename(tmp, h.VMDir(id)); err != nil {
		if errors.Is(err, fs.ErrExist) {
			err = ErrExists
		}
		return nil, err
	}
	return &VMDir{ID: id, Path: h.VMDir(id), lock: lock}, nil
}

// AdoptVM goes on with a VM folder whose lock came as an open file from the
// process that created it. On success the VMDir owns lock.
func AdoptVM(path string, lock *os.File) (*VMDir, error) {
	// With an inherited lock this succeeds at once; with any other file it
	// finds out now rather than when a sweep removes the folder.
	if err := TryLock(lock, LockAlone); err != nil {
		return nil, fmt.Errorf("open VM %s: %w", path, err)
	}
	if !lockIsIn(lock, path) {
		return nil, fmt.Errorf("open VM %s: the lock is that of another folder", path)
	}
	return &VMDir{ID: filepath.Base(path), Path: path, lock: lock}, nil
}

// LockFile is the held lock, for a child process to inherit; the VMDir keeps
// owning it. Close it after the child started: the child then is the holder.
func (d *VMDir) LockFile() *os.File { return d.lock }

// Close gives the lock up and leaves the folder. A process that inherited
// LockFile holds it from then on; without one, the next sweep removes it.
func (d *VMDir) Close() error { return d.lock.Close() }

// Remove removes the folder and gives the lock up.
func (d *VMDir) Remove() error {
	err := removeDir(d.Path)
	return errors.Join(err, d.lock.Close())
}

// The files of a VM.
func (d *VMDir) Control() string { return filepath.Join(d.Path, ControlName) }
func (d *VMDir) Console() string { return filepath.Join(d.Path, ConsoleName) }
func (d *VMDir) Log() string     { return filepath.Join(d.Path, LogName) }
func (d *VMDir) Data() string    { return filepath.Join(d.Path, "data.qcow2") }

// Names of files in a VM's folder that are used without a VMDir.
const (
	ControlName = "control.sock"
	ConsoleName = "console.log"
	LogName     = "vmm.log"

	lockName   = "lock"
	recordName = "vm.json"
	newPrefix  = ".new-"
	deadPrefix = ".dead-"
)
