// Package digest computes the digests that files are known by: those of guest
// images and of snapshots.
package digest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// chunk is read at once; between two of them a context is looked at.
const chunk = 1 << 20

// block is the unit of a sparse digest.
const block = 4 << 10

// File is the sha256 of a file's bytes, in lower-case hex.
func File(ctx context.Context, path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	buf := make([]byte, chunk)
	for {
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		n, err := f.Read(buf)
		h.Write(buf[:n])
		if errors.Is(err, io.EOF) {
			return sum(h), nil
		}
		if err != nil {
			return "", err
		}
	}
}

// Sparse is the digest of a file that is mostly zero, in lower-case hex: the
// sha256 of the file's size and then, for each 4 KiB block that is not all
// zero, the block's number and its bytes (numbers are 64 bits, big-endian; the
// last block may be short).
//
// Where the holes are does not matter: a copy that lost them, or gained some,
// has the same digest. A file of 32 GiB that holds 1 MiB takes milliseconds.
func Sparse(ctx context.Context, path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	number(h, info.Size())
	for at := int64(0); at < info.Size(); {
		from, to, err := extent(f, at)
		if errors.Is(err, unix.ENXIO) { // nothing but hole from here on
			break
		}
		if err != nil {
			return "", fmt.Errorf("find the holes of %s: %w", path, err)
		}
		from -= from % block
		if to, err = blocks(ctx, h, f, from, to); err != nil {
			return "", err
		}
		at = to
	}
	return sum(h), nil
}

// extent is the next run of data at or after at.
func extent(f *os.File, at int64) (from, to int64, err error) {
	if from, err = unix.Seek(int(f.Fd()), at, unix.SEEK_DATA); err != nil {
		return 0, 0, err
	}
	to, err = unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE)
	return from, to, err
}

// blocks hashes the blocks from from, on a block's edge, up to the one that
// holds the byte before to, and returns where it stopped.
func blocks(ctx context.Context, h hash.Hash, f *os.File, from, to int64) (int64, error) {
	buf := make([]byte, chunk)
	for from < to {
		if ctx.Err() != nil {
			return from, context.Cause(ctx)
		}
		want := min(int64(chunk), (to-from+block-1)/block*block)
		n, err := f.ReadAt(buf[:want], from)
		if err != nil && !errors.Is(err, io.EOF) {
			return from, err
		}
		for i := 0; i < n; i += block {
			if b := buf[i:min(i+block, n)]; !IsZero(b) {
				number(h, (from+int64(i))/block)
				h.Write(b)
			}
		}
		from += int64(n)
		if int64(n) < want {
			return max(from, to), nil // the end of the file
		}
	}
	return from, nil
}

// IsZero says whether all bytes are zero. It compares with itself, shifted by
// one: the comparison takes many bytes at a time.
func IsZero(b []byte) bool {
	return len(b) == 0 || b[0] == 0 && bytes.Equal(b[1:], b[:len(b)-1])
}

func number(h hash.Hash, n int64) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(n))
	h.Write(b[:])
}

func sum(h hash.Hash) string { return hex.EncodeToString(h.Sum(nil)) }
