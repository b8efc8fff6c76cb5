package files

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// Owner is whom new files belong to.
type Owner struct{ UID, GID int }

// Open opens a regular file for reading, at an offset. A file that is none
// is refused: reading a pipe or a device could wait for ever.
func Open(path string, offset int64) (*os.File, error) {
	if err := check(path); err != nil {
		return nil, err
	}
	// Without O_NONBLOCK opening a pipe waits for its writer.
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = &BadPathError{path, "is no file but a " + kind(info.Mode())}
	}
	if err == nil && offset != 0 {
		_, err = file.Seek(offset, io.SeekStart)
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// WriteOptions say what a written file is like.
type WriteOptions struct {
	// Mode is the permission bits; nil keeps those of a file that is
	// replaced, or is 0644.
	Mode *uint32
	// Owner nil keeps the owner of a file that is replaced, or is the agent.
	Owner *Owner
}

// Write makes path a file with r's content, whole or not at all: other
// readers see the old file or the new one. A link is followed, its target is
// replaced. After an error the old file is there as it was and nothing else.
//
// The data is not forced to the disk: a guest's disk and memory are saved
// together or lost together.
func Write(path string, r io.Reader, opt WriteOptions) (err error) {
	if err := check(path); err != nil {
		return err
	}
	target, old, err := resolve(path)
	if err != nil {
		return err
	}
	mode, owner := uint32(0o644), opt.Owner
	if old != nil {
		if !old.Mode().IsRegular() {
			return &BadPathError{path, "is no file but a " + kind(old.Mode())}
		}
		st := old.Sys().(*syscall.Stat_t)
		mode = st.Mode & 0o7777
		if owner == nil {
			owner = &Owner{int(st.Uid), int(st.Gid)}
		}
	}
	if opt.Mode != nil {
		mode = *opt.Mode & 0o7777
	}
	file, err := temporary(filepath.Dir(target))
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			file.Close()
			os.Remove(file.Name())
		}
	}()
	if _, err := copyBuffered(file, r); err != nil {
		return err
	}
	if owner != nil && (owner.UID != os.Geteuid() || owner.GID != os.Getegid()) {
		if err := file.Chown(owner.UID, owner.GID); err != nil {
			return err
		}
	}
	// After chown, which takes setuid bits away.
	if err := syscall.Fchmod(int(file.Fd()), mode); err != nil {
		return &os.PathError{Op: "chmod", Path: path, Err: err}
	}
	if err := file.Close(); err != nil {
		return err
	}
	return os.Rename(file.Name(), target)
}

// resolve follows path to the name that a write has to replace, and returns
// what is there now, or nil.
func resolve(path string) (string, fs.FileInfo, error) {
	for range 40 { // as many links as the kernel follows
		info, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) {
			return path, nil, nil
		}
		if err != nil || info.Mode()&fs.ModeSymlink == 0 {
			return path, info, err
		}
		link, err := os.Readlink(path)
		if err != nil {
			return "", nil, err
		}
		if !filepath.IsAbs(link) {
			// The folder may itself be reached through a link, so ".." in
			// link is the real folder's parent.
			dir, err := filepath.EvalSymlinks(filepath.Dir(path))
			if err != nil {
				return "", nil, err
			}
			link = filepath.Join(dir, link)
		}
		path = link
	}
	return "", nil, &os.PathError{Op: "open", Path: path, Err: syscall.ELOOP}
}

func temporary(dir string) (*os.File, error) {
	return os.OpenFile(filepath.Join(dir, temporaryName()), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
}

func temporaryName() string {
	var b [8]byte
	rand.Read(b[:])
	return fmt.Sprintf(".warren-%x", b)
}
