package ram

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// chunk is copied at once; between two of them a context is looked at.
const chunk = 4 << 20

// Trim makes holes of the pages of f that are all zero, and of nothing else:
// what f holds stays the same, and it takes less of the disk. f is open for
// reading and writing. On a file system without holes f stays as it is. After
// an error some holes may be there; nothing is lost.
func Trim(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	for at := int64(0); at < info.Size(); {
		from, to, err := extent(f, at)
		if errors.Is(err, unix.ENXIO) { // nothing but hole from here on
			return nil
		}
		if err == nil {
			err = trimExtent(f, (from+PageSize-1)/PageSize*PageSize, min(to, info.Size()))
		}
		if errors.Is(err, unix.EOPNOTSUPP) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("trim %s: %w", f.Name(), err)
		}
		at = to
	}
	return nil
}

// trimExtent makes the holes between two offsets, the first at a page's start.
func trimExtent(f *os.File, from, to int64) error {
	buf := make([]byte, 1<<20)
	hole := from // zero from here on
	for at := from; to-at >= PageSize; {
		part := buf[:min(int64(len(buf)), (to-at)/PageSize*PageSize)]
		if _, err := f.ReadAt(part, at); err != nil {
			return err
		}
		for ; len(part) > 0; part = part[PageSize:] {
			if !bytes.Equal(part[:PageSize], zeros[:]) {
				if err := punch(f, hole, at-hole); err != nil {
					return err
				}
				hole = at + PageSize
			}
			at += PageSize
		}
	}
	return punch(f, hole, (to-hole)/PageSize*PageSize)
}

// extent is the next run of data at or after at.
func extent(f *os.File, at int64) (from, to int64, err error) {
	if from, err = unix.Seek(int(f.Fd()), at, unix.SEEK_DATA); err != nil {
		return 0, 0, err
	}
	to, err = unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE)
	return from, to, err
}

// punch makes a hole of n bytes in f, whose size stays.
func punch(f *os.File, off, n int64) error {
	if n <= 0 {
		return nil
	}
	for {
		err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// clearRange makes n bytes of f zero: a hole, or zeros where there are none.
func clearRange(ctx context.Context, f *os.File, off, n int64) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	err := punch(f, off, n)
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	return pump(ctx, f, off, io.LimitReader(nothing{}, n), n)
}

// copyRange copies n bytes from src to dst, within the kernel where it can.
func copyRange(ctx context.Context, dst *os.File, dstOff int64, src *os.File, srcOff, n int64) error {
	for n > 0 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		moved, err := unix.CopyFileRange(int(src.Fd()), &srcOff, int(dst.Fd()), &dstOff, int(min(n, chunk)), 0)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, unix.EIO):
			return err
		case err != nil || moved == 0:
			// Another file system, or one that cannot; if it is anything
			// worse, reading and writing tells.
			return pump(ctx, dst, dstOff, io.NewSectionReader(src, srcOff, n), n)
		default:
			n -= int64(moved)
		}
	}
	return nil
}

// pump writes the n bytes of r to dst.
func pump(ctx context.Context, dst *os.File, off int64, r io.Reader, n int64) error {
	buf := make([]byte, min(n, 1<<20))
	for n > 0 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		part := buf[:min(n, int64(len(buf)))]
		if _, err := io.ReadFull(r, part); err != nil {
			return err
		}
		if _, err := dst.WriteAt(part, off); err != nil {
			return err
		}
		n, off = n-int64(len(part)), off+int64(len(part))
	}
	return nil
}

// nothing reads as zeros without an end.
type nothing struct{}

func (nothing) Read(b []byte) (int, error) { clear(b); return len(b), nil }
