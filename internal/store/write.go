package store

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// WriteFile makes path hold data, or leaves it as it was: the content goes to
// a temporary file beside it, is synced, and renamed over it. When it returns
// nil the file survives a power cut.
func WriteFile(path string, data []byte, perm fs.FileMode) error {
	return WriteStream(path, bytes.NewReader(data), perm)
}

// WriteStream is WriteFile for content that need not fit in memory.
func WriteStream(path string, r io.Reader, perm fs.FileMode) error {
	return replace(path, perm, true, func(f *os.File) error {
		_, err := io.Copy(f, r)
		return err
	})
}

// WriteVolatile is WriteFile without the wait for the disk, for state that
// means nothing after a reboot: a reader sees the old or the new content,
// but after a power cut perhaps an empty file.
func WriteVolatile(path string, data []byte, perm fs.FileMode) error {
	return replace(path, perm, false, func(f *os.File) error {
		_, err := f.Write(data)
		return err
	})
}

func replace(path string, perm fs.FileMode, durable bool, fill func(*os.File) error) (err error) {
	dir, name := filepath.Split(path)
	f, err := os.CreateTemp(dir, "."+name+".*")
	if err != nil {
		return WithRemedy(err)
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
			err = WithRemedy(err)
		}
	}()
	if err = fill(f); err != nil {
		return err
	}
	if err = f.Chmod(perm); err != nil {
		return err
	}
	if durable {
		if err = f.Sync(); err != nil {
			return err
		}
	}
	if err = f.Close(); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return err
	}
	if durable {
		return SyncDir(filepath.Dir(path))
	}
	return nil
}

// SyncDir makes the names in dir durable, after a rename or a creation.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// WithRemedy adds what the user can do to the errors of the file system that
// a user can do something about; any other comes back as it is.
func WithRemedy(err error) error {
	var told *remedied
	switch {
	case err == nil, errors.As(err, &told):
		return err
	case errors.Is(err, syscall.ENOSPC):
		return &remedied{err, "free some space, or set WARREN_HOME to a folder on a larger disk"}
	case errors.Is(err, syscall.EDQUOT):
		return &remedied{err, "your disk quota is used up: free some space, or set WARREN_HOME to a folder on another disk"}
	case errors.Is(err, syscall.EROFS):
		return &remedied{err, "set WARREN_HOME to a folder on a disk that can be written"}
	case errors.Is(err, syscall.ENOTDIR):
		return &remedied{err, "set WARREN_HOME to a folder"}
	case errors.Is(err, fs.ErrPermission):
		return &remedied{err, "make the folder yours, or set WARREN_HOME to one that is"}
	}
	return err
}

type remedied struct {
	err    error
	remedy string
}

func (r *remedied) Error() string { return fmt.Sprintf("%v; %s", r.err, r.remedy) }
func (r *remedied) Unwrap() error { return r.err }
