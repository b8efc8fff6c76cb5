package ram

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"iter"
	"os"
	"syscall"
)

// Difference is an open difference file: the pages by which a RAM differs from
// the one it was before. Its methods may be called from any goroutine, but not
// during or after Close.
type Difference struct {
	file       *os.File
	ram        uint64 // pages of the RAM
	data, zero uint64
	table      []entry
	unpacked   []byte // the data pages, if the file has them packed
}

// OpenDifference opens the difference at path, which is one for a RAM of size
// bytes. The file is not trusted: header and table are checked to the last
// bit, and memory is taken within the bounds of size alone. The data pages are
// not looked at, unless they are packed. The error wraps ErrFormat or ErrVersion when the file is at
// fault. The caller calls Close.
func OpenDifference(path string, size int64) (*Difference, error) {
	if err := checkSize(size); err != nil {
		return nil, err
	}
	// A pipe in its place must not block.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	d, err := func() (*Difference, error) {
		info, err := f.Stat()
		if err != nil {
			return nil, err
		}
		if !info.Mode().IsRegular() {
			return nil, wrong("it is no file")
		}
		return parseDifference(f, info.Size(), uint64(size)/PageSize)
	}()
	if err != nil {
		f.Close()
		if errors.Is(err, ErrFormat) {
			err = fmt.Errorf("%w; use another snapshot", err)
		}
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	d.file = f
	return d, nil
}

// parseDifference reads all but the data pages.
func parseDifference(r io.ReaderAt, length int64, ram uint64) (*Difference, error) {
	buf := make([]byte, headerSize)
	n, err := r.ReadAt(buf, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	h, err := parseHeader(buf[:n], length, ram)
	if err != nil {
		return nil, err
	}
	d := &Difference{ram: h.ram, data: h.data, table: make([]entry, 0, h.entries)}
	if h.packed > 0 {
		if d.unpacked, err = unpack(r, h); err != nil {
			return nil, err
		}
	}
	sum := crc32.New(castagnoli)
	in := bufio.NewReaderSize(io.TeeReader(io.NewSectionReader(r, h.table(), length-h.table()), sum), 64<<10)
	var last entry
	var found uint64
	for range h.entries {
		b := buf[:entrySize]
		if _, err := io.ReadFull(in, b); err != nil {
			return nil, err
		}
		if last, err = parseEntry(b, last, ram); err != nil {
			return nil, err
		}
		if last.kind == zero {
			d.zero += uint64(last.count)
		} else {
			found += uint64(last.count)
		}
		d.table = append(d.table, last)
	}
	switch {
	case sum.Sum32() != h.tableSum:
		return nil, wrong("the checksum of the table is not right")
	case found != h.data:
		return nil, wrong("the table has %d data pages, the header %d", found, h.data)
	}
	return d, nil
}

// Close closes the file.
func (d *Difference) Close() error { return d.file.Close() }

// Pages counts the pages that differ: those with data, and those all zero.
func (d *Difference) Pages() (data, zero uint64) { return d.data, d.zero }

// Bytes is the size of the data pages together.
func (d *Difference) Bytes() int64 { return int64(d.data) * PageSize }

// runs gives the runs of one kind.
func (d *Difference) runs(k kind) iter.Seq[Run] {
	return func(yield func(Run) bool) {
		for _, e := range d.table {
			if e.kind == k && !yield(Run{e.first, uint64(e.count)}) {
				return
			}
		}
	}
}

// copyTo writes n bytes of data pages, at being the number among them of the
// first, to dst at off.
func (d *Difference) copyTo(ctx context.Context, dst *os.File, off int64, at uint64, n int64) error {
	if d.unpacked != nil {
		_, err := dst.WriteAt(d.unpacked[at*PageSize:][:n], off)
		return err
	}
	return copyRange(ctx, dst, off, d.file, headerSize+int64(at)*PageSize, n)
}

// readAt fills buf with data pages, at being the number among them of the
// first.
func (d *Difference) readAt(buf []byte, at uint64) error {
	if d.unpacked != nil {
		copy(buf, d.unpacked[at*PageSize:])
		return nil
	}
	_, err := d.file.ReadAt(buf, headerSize+int64(at)*PageSize)
	if errors.Is(err, io.EOF) {
		err = wrong("it became shorter while it was read")
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", d.file.Name(), err)
	}
	return nil
}
