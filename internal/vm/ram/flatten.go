package ram

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"

	"golang.org/x/sys/unix"
)

// Flatten makes dst the flat file that base and the differences, oldest first,
// come to. dst is a new, empty file open for writing. An
// empty base is a RAM of zeros, of the size that the differences are for; then
// there must be one. Holes stay holes, and zero pages become some.
//
// ctx is looked at every few MiB. Nothing is synced. After an error dst may
// hold anything.
func Flatten(ctx context.Context, dst *os.File, base string, diffs []*Difference) error {
	return flatten(ctx, dst, base, diffs, func(dst, src *os.File) bool {
		return unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())) == nil
	})
}

// flatten is Flatten with a way to clone a file, which says if it could.
func flatten(ctx context.Context, dst *os.File, base string, diffs []*Difference, clone func(dst, src *os.File) bool) error {
	var src *os.File
	var size int64
	switch {
	case base != "":
		var err error
		if src, err = os.Open(base); err != nil {
			return err
		}
		defer src.Close()
		info, err := src.Stat()
		if err != nil {
			return err
		}
		size = info.Size()
	case len(diffs) > 0:
		size = int64(diffs[0].ram) * PageSize
	default:
		return errors.New("flatten: neither a base nor a difference")
	}
	if err := checkSize(size); err != nil {
		return fmt.Errorf("flatten %s: %w", base, err)
	}
	for _, d := range diffs {
		if d.ram != uint64(size)/PageSize {
			return fmt.Errorf("flatten: %s is for a RAM of %d bytes, not %d", d.file.Name(), d.ram*PageSize, size)
		}
	}
	if info, err := dst.Stat(); err != nil {
		return err
	} else if info.Size() != 0 {
		return fmt.Errorf("flatten: %s is not empty", dst.Name())
	}
	cloned := src != nil && clone(dst, src)
	if err := dst.Truncate(size); err != nil {
		return err
	}
	f := &flattening{ctx: ctx, dst: dst, done: make([]uint64, (uint64(size)/PageSize+63)/64)}
	// Newest first: a page that many differences have is written once.
	for i := len(diffs) - 1; i >= 0; i-- {
		if err := f.add(diffs[i], cloned); err != nil {
			return fmt.Errorf("flatten %s: %w", diffs[i].file.Name(), err)
		}
	}
	if src != nil && !cloned {
		if err := f.fill(src, size); err != nil {
			return fmt.Errorf("flatten %s: %w", base, err)
		}
	}
	return nil
}

// flattening is a flat file in the making.
type flattening struct {
	ctx  context.Context
	dst  *os.File
	done []uint64 // a bit for each page that has its content
}

// add writes the pages of d that are not done. Where something may be below
// them, zero pages have to be cut out of it.
func (f *flattening) add(d *Difference, below bool) error {
	at := uint64(0) // among the data pages
	for _, e := range d.table {
		for r := range f.todo(Run{e.first, uint64(e.count)}) {
			off, n := int64(r.First)*PageSize, int64(r.Count)*PageSize
			var err error
			switch {
			case e.kind == data:
				err = d.copyTo(f.ctx, f.dst, off, at+r.First-e.first, n)
			case below:
				err = clearRange(f.ctx, f.dst, off, n)
			}
			if err != nil {
				return err
			}
		}
		if e.kind == data {
			at += uint64(e.count)
		}
	}
	return nil
}

// fill writes the pages of src that are not done, without its holes.
func (f *flattening) fill(src *os.File, size int64) error {
	for at := int64(0); at < size; {
		from, to, err := extent(src, at)
		if errors.Is(err, unix.ENXIO) { // nothing but hole from here on
			return nil
		}
		if err != nil {
			return fmt.Errorf("find the holes: %w", err)
		}
		// A file system with smaller blocks has holes within pages.
		first := uint64(from) / PageSize
		end := (uint64(min(to, size)) + PageSize - 1) / PageSize
		for r := range f.todo(Run{first, end - first}) {
			off := int64(r.First) * PageSize
			if err := copyRange(f.ctx, f.dst, off, src, off, int64(r.Count)*PageSize); err != nil {
				return err
			}
		}
		at = to
	}
	return nil
}

// todo gives the parts of r that are not done, and takes them for done.
func (f *flattening) todo(r Run) iter.Seq[Run] {
	return func(yield func(Run) bool) {
		var part Run
		for page := r.First; page < r.First+r.Count; page++ {
			word, bit := &f.done[page/64], uint64(1)<<(page%64)
			switch {
			case *word&bit == 0:
				*word |= bit
				if part.Count == 0 {
					part.First = page
				}
				part.Count++
			case part.Count > 0:
				if !yield(part) {
					return
				}
				part.Count = 0
			}
		}
		if part.Count > 0 {
			yield(part)
		}
	}
}
