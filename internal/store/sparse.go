package store

import (
	"errors"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/store/digest"
)

// CopySparse copies a file to a new one, private to the user: as a reflink
// where the file system has them, else the blocks that are not all zero. It
// is for small files; one that cannot be written whole is removed again.
func CopySparse(from, to string) (err error) {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, dst.Close()); err != nil {
			os.Remove(to)
		}
	}()
	if unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())) == nil {
		return nil
	}
	buf := make([]byte, 256<<10)
	size := int64(0)
	for {
		n, err := io.ReadFull(src, buf)
		for at := 0; at < n; at += sparseBlock {
			block := buf[at:min(at+sparseBlock, n)]
			if digest.IsZero(block) {
				continue
			}
			if _, err := dst.WriteAt(block, size+int64(at)); err != nil {
				return err
			}
		}
		size += int64(n)
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return dst.Truncate(size)
		case err != nil:
			return err
		}
	}
}

// sparseBlock is what file systems keep or leave out.
const sparseBlock = 4 << 10

// Allocated is what an open file takes on its disk, in bytes.
func Allocated(f *os.File) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, &os.PathError{Op: "stat", Path: f.Name(), Err: err}
	}
	return st.Blocks * 512, nil
}

// HomeOf is the home that a VM's folder is in.
func HomeOf(vmDir string) Home { return Home(filepath.Dir(filepath.Dir(vmDir))) }
