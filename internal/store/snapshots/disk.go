package snapshots

import (
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/store"
)

// Op names a kind of write to the disk.
type Op string

// All writes that a new snapshot or a new flat file takes.
const (
	OpMkdir  Op = "mkdir"
	OpCreate Op = "create"
	OpWrite  Op = "write"
	OpChmod  Op = "chmod"
	OpSync   Op = "sync"
	OpRename Op = "rename"
)

// disk is the one way to write; tests let the n-th write fail.
type disk struct {
	fault func(op Op, path string) error // nil: none
}

func (d disk) allowed(op Op, path string) error {
	if d.fault == nil {
		return nil
	}
	if err := d.fault(op, path); err != nil {
		return &fs.PathError{Op: string(op), Path: path, Err: err}
	}
	return nil
}

func (d disk) mkdir(path string) error {
	if err := d.allowed(OpMkdir, path); err != nil {
		return err
	}
	return os.Mkdir(path, 0o700)
}

func (d disk) mkdirAll(path string) error {
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	if err := d.allowed(OpMkdir, path); err != nil {
		return err
	}
	return os.MkdirAll(path, 0o700)
}

// create makes a new file, open to read and write whatever perm says.
func (d disk) create(path string, perm fs.FileMode) (*os.File, error) {
	if err := d.allowed(OpCreate, path); err != nil {
		return nil, err
	}
	return os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, perm)
}

func (d disk) writeAt(f *os.File, data []byte, at int64) error {
	if err := d.allowed(OpWrite, f.Name()); err != nil {
		return err
	}
	_, err := f.WriteAt(data, at)
	return err
}

func (d disk) truncate(f *os.File, size int64) error {
	if err := d.allowed(OpWrite, f.Name()); err != nil {
		return err
	}
	return f.Truncate(size)
}

func (d disk) chmod(f *os.File, perm fs.FileMode) error {
	if err := d.allowed(OpChmod, f.Name()); err != nil {
		return err
	}
	return f.Chmod(perm)
}

func (d disk) sync(f *os.File) error {
	if err := d.allowed(OpSync, f.Name()); err != nil {
		return err
	}
	return f.Sync()
}

func (d disk) syncDir(path string) error {
	if err := d.allowed(OpSync, path); err != nil {
		return err
	}
	return store.SyncDir(path)
}

func (d disk) rename(from, to string) error {
	if err := d.allowed(OpRename, to); err != nil {
		return err
	}
	return os.Rename(from, to)
}

// write makes path hold data, now and after a power cut. It replaces an older
// file and is not atomic: the folder must not be published yet.
func (d disk) write(path string, data []byte, perm fs.FileMode) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := d.create(path, perm)
	if err != nil {
		return err
	}
	err = d.writeAt(f, data, 0)
	if err == nil {
		err = d.sync(f)
	}
	return errors.Join(err, f.Close())
}
