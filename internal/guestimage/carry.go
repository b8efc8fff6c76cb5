package guestimage

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// carried are the files of a generation on its way to another machine, in this
// order. The root disk's name does not say for which architecture it is: the
// manifest does. build.json stays: on another machine nobody built anything,
// and what it says would decide what a build there takes over.
const (
	carriedManifest = "manifest.json"
	carriedKernel   = "kernel"
	carriedInitrd   = "initramfs"
	carriedOverlay  = "data.qcow2"
	// carriedData is the data disk as digest.Sparse hashes it, so that its
	// sha256 is the one in the manifest, and 32 GiB of holes are not sent.
	carriedData = "data.sparse"
	carriedDisk = "root.raw"
)

// sparseBlock is the unit of digest.Sparse.
const sparseBlock = 4 << 10

// Carried is one file of a generation on its way.
type Carried struct {
	Name, Path string
}

// Carry gives the files that Install takes, in order. One is made in scratch,
// a folder of the caller's.
func (img *Image) Carry(ctx context.Context, scratch string) ([]Carried, error) {
	sparse := filepath.Join(scratch, carriedData)
	if err := writeSparse(ctx, sparse, img.DataBase); err != nil {
		return nil, fmt.Errorf("pack the data disk of guest image %s: %w", img.Manifest.ImageID, err)
	}
	return []Carried{
		{carriedManifest, img.Disk + manifestSuffix},
		{carriedKernel, img.Kernel},
		{carriedInitrd, img.Initramfs},
		{carriedOverlay, img.DataTemplate},
		{carriedData, sparse},
		{carriedDisk, img.Disk},
	}, nil
}

// writeSparse writes the size of a file and each block of it that is not all
// zero, with its number.
func writeSparse(ctx context.Context, to, from string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	w := bufio.NewWriterSize(out, 1<<20)
	w.Write(binary.BigEndian.AppendUint64(nil, uint64(info.Size())))
	block := make([]byte, sparseBlock)
	for at := int64(0); at < info.Size(); at += sparseBlock {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		data, err := unix.Seek(int(in.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err != nil {
			return err
		}
		at = data - data%sparseBlock
		n, err := in.ReadAt(block, at)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if isZero(block[:n]) {
			continue
		}
		w.Write(binary.BigEndian.AppendUint64(nil, uint64(at/sparseBlock)))
		w.Write(block[:n])
	}
	return w.Flush()
}

// readSparse writes the file that writeSparse read. What it reads may come from
// anyone: blocks only ever go forward, and the file has at most DataSize.
func readSparse(to *os.File, from io.Reader) error {
	r := bufio.NewReaderSize(from, 1<<20)
	number := func() (int64, error) {
		var b [8]byte
		_, err := io.ReadFull(r, b[:])
		n := binary.BigEndian.Uint64(b[:])
		if err == nil && n > DataSize {
			err = fmt.Errorf("%w: the number %d in it is too large", errCarried, n)
		}
		return int64(n), err
	}
	size, err := number()
	if err != nil {
		return err
	}
	block := make([]byte, sparseBlock)
	for last := int64(-1); ; {
		n, err := number()
		if errors.Is(err, io.EOF) {
			return to.Truncate(size)
		}
		if err != nil {
			return err
		}
		at := n * sparseBlock
		if n <= last || at >= size {
			return fmt.Errorf("%w: block %d is out of its place", errCarried, n)
		}
		last = n
		data := block[:min(sparseBlock, size-at)]
		if _, err := io.ReadFull(r, data); err != nil {
			return err
		}
		if _, err := to.WriteAt(data, at); err != nil {
			return err
		}
	}
}

func isZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}
