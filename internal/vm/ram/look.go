package ram

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
)

// Capture finds what differs from the base and copies it: the guest waits for
// this call. What does not fit in 64 MiB of memory is written to spill at once,
// where Finish writes the rest; spill is an empty file open for writing,
// and stays the caller's.
//
// The base stays what it was until Commit, so a snapshot that fails loses
// nothing. The caller calls Close on the capture. After an error there is none,
// and spill may hold anything.
func (t *Tracker) Capture(spill *os.File) (*Capture, error) {
	return t.capture(spill, keepBytes)
}

func (t *Tracker) capture(spill *os.File, keep int) (*Capture, error) {
	c, err := t.look(keep)
	if err == nil {
		c.spill = spill
		if err = c.overflow(t.process); err != nil {
			c.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	return c, nil
}

// change is a page that differs from the base.
type change struct {
	digest uint64 // for the table, which has notOwn for a page that is lost
	page   uint32
	zero   bool
}

// block is a part of the RAM that one goroutine looks at.
type block struct {
	pages   []Run
	changes []change
	data    int // those of changes that are not zero
	before  int // data pages in the blocks before
	kept    int // where in Capture.pages its data is, in pages, or nowhere
}

const nowhere = -1

// look makes a capture that has copied up to keep bytes of its data.
func (t *Tracker) look(keep int) (*Capture, error) {
	own, err := t.process.Own()
	if err != nil {
		return nil, err
	}
	l := &look{Tracker: t, lost: t.lost(own)}
	all := merge(own, l.lost)
	c := &Capture{ram: t.process.pages, number: t.captures + 1}
	for pages := range blocks(slices.Values(all)) {
		c.blocks = append(c.blocks, block{pages: slices.Clone(pages)})
	}
	if c.pages, err = t.memory(min(keep, int(countPages(all))*PageSize)); err != nil {
		return nil, err
	}
	l.into = c.pages
	err = parallel(len(c.blocks), func(i int, buf []byte) error { return l.block(&c.blocks[i], buf) })
	if err == nil {
		err = t.process.alive()
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	for i := range c.blocks {
		c.blocks[i].before = c.data
		c.data += c.blocks[i].data
		c.zero += len(c.blocks[i].changes) - c.blocks[i].data
	}
	t.captures++
	if keep > 0 {
		t.lastData = c.data * PageSize
	}
	return c, nil
}

// look is one look at the RAM.
type look struct {
	*Tracker
	lost []Run
	into []byte
	used atomic.Int64 // pages of into that are given away
}

var zeros [PageSize]byte

// block finds the changes in b and copies their data, if there is room.
func (l *look) block(b *block, buf []byte) error {
	if err := l.process.read(b.pages, buf); err != nil {
		return err
	}
	var (
		changes [blockPages]change
		from    [blockPages]int // of the data, in buf
		n, at   int
	)
	for _, r := range b.pages {
		for page := r.First; page < r.First+r.Count; page++ {
			content := buf[at : at+PageSize]
			at += PageSize
			d := l.digest(content)
			if len(l.lost) > 0 && holds(l.lost, page) {
				d = notOwn
			} else if d == l.base(page) {
				continue
			}
			changes[n] = change{digest: d, page: uint32(page), zero: bytes.Equal(content, zeros[:])}
			if !changes[n].zero {
				from[b.data] = at - PageSize
				b.data++
			}
			n++
		}
	}
	b.changes = slices.Clone(changes[:n])
	b.kept = nowhere
	if b.data == 0 {
		return nil
	}
	end := int(l.used.Add(int64(b.data)))
	if end*PageSize > len(l.into) {
		return nil
	}
	b.kept = end - b.data
	for i, at := range from[:b.data] {
		copy(l.into[(b.kept+i)*PageSize:], buf[at:at+PageSize])
	}
	return nil
}
