package ram

import (
	"bufio"
	"fmt"
	"hash/crc32"
	"io"
	"iter"
	"os"

	"github.com/klauspost/compress/s2"
	"golang.org/x/sys/unix"
)

// Capture is what differed from the base when the VM was stopped. It needs the
// VM no more. It belongs to one goroutine at a time.
type Capture struct {
	ram        uint64 // pages of the RAM
	number     uint64 // of the tracker's captures
	blocks     []block
	data, zero int
	pages      []byte // outside the Go heap: the collector need not walk around it
	spill      *os.File
}

// Pages counts the pages that differ: those with data, and those all zero.
func (c *Capture) Pages() (data, zero uint64) { return uint64(c.data), uint64(c.zero) }

// Finish makes the spill file a valid difference. It is called once, before
// Close, and may take its time: the VM can run. It does not sync. After an
// error the file is no difference, and cannot be taken for one.
func (c *Capture) Finish() error {
	if err := c.finish(); err != nil {
		return fmt.Errorf("write RAM difference: %w", err)
	}
	return nil
}

func (c *Capture) finish() error {
	h := header{ram: c.ram, data: uint64(c.data)}
	if packed := c.pack(); packed != nil {
		h.packed = uint64(len(packed))
		if _, err := c.spill.WriteAt(packed, headerSize); err != nil {
			return err
		}
	} else if err := c.writePages(); err != nil {
		return err
	}
	var table []byte
	var last entry
	for e := range c.entries() {
		if e.first < last.end() { // nobody could restore it
			return fmt.Errorf("page %d comes after page %d", e.first, last.end())
		}
		last = e
		h.entries++
	}
	sum := crc32.New(castagnoli)
	out := bufio.NewWriterSize(io.MultiWriter(io.NewOffsetWriter(c.spill, h.table()), sum), 64<<10)
	for e := range c.entries() {
		table = e.append(table[:0])
		if _, err := out.Write(table); err != nil {
			return err
		}
	}
	if err := out.Flush(); err != nil {
		return err
	}
	if err := c.spill.Truncate(h.length()); err != nil {
		return err
	}
	// The header comes last: a file without it is no difference.
	h.tableSum = sum.Sum32()
	_, err := c.spill.WriteAt(h.bytes(), 0)
	return err
}

// writePages writes the data that is kept in memory.
func (c *Capture) writePages() error {
	for i := range c.blocks {
		b := &c.blocks[i]
		if b.data == 0 || b.kept == nowhere {
			continue
		}
		if _, err := c.spill.WriteAt(c.pages[b.kept*PageSize:][:b.data*PageSize], b.offset()); err != nil {
			return err
		}
	}
	return nil
}

// pack packs the data, or returns nil when that is not worth it or some is in
// the file already.
func (c *Capture) pack() []byte {
	if c.data == 0 || c.data > maxPacked {
		return nil
	}
	pages := make([]byte, 0, c.data*PageSize)
	for i := range c.blocks {
		b := &c.blocks[i]
		if b.data > 0 && b.kept == nowhere {
			return nil
		}
		if b.data > 0 {
			pages = append(pages, c.pages[b.kept*PageSize:][:b.data*PageSize]...)
		}
	}
	packed := s2.EncodeBetter(nil, pages)
	if len(packed) > len(pages)/8*7 {
		return nil
	}
	return packed
}

// Close gives the memory back. What was written stays.
func (c *Capture) Close() {
	if c.pages != nil {
		_ = unix.Munmap(c.pages) // fails for memory that is not mapped alone
		c.pages = nil
	}
}

// entries gives the table of the difference.
func (c *Capture) entries() iter.Seq[entry] {
	return func(yield func(entry) bool) {
		var last entry
		for i := range c.blocks {
			for _, ch := range c.blocks[i].changes {
				k := data
				if ch.zero {
					k = zero
				}
				if last.count > 0 && last.end() == uint64(ch.page) && last.kind == k {
					last.count++
					continue
				}
				if last.count > 0 && !yield(last) {
					return
				}
				last = entry{first: uint64(ch.page), count: 1, kind: k}
			}
		}
		if last.count > 0 {
			yield(last)
		}
	}
}

// overflow writes the data that found no room in memory to the spill file, by
// reading it once more: the VM is stopped still.
func (c *Capture) overflow(p *Process) error {
	var todo []*block
	for i := range c.blocks {
		if b := &c.blocks[i]; b.data > 0 && b.kept == nowhere {
			todo = append(todo, b)
		}
	}
	if len(todo) == 0 {
		return nil
	}
	err := parallel(len(todo), func(i int, buf []byte) error {
		b := todo[i]
		var runs []Run
		for _, ch := range b.changes {
			if !ch.zero {
				runs = appendRun(runs, Run{uint64(ch.page), 1})
			}
		}
		if err := p.read(runs, buf); err != nil {
			return err
		}
		_, err := c.spill.WriteAt(buf[:b.data*PageSize], b.offset())
		return err
	})
	if err != nil {
		return err
	}
	return p.alive()
}

// offset is where the data of the block is in the difference.
func (b *block) offset() int64 { return headerSize + int64(b.before)*PageSize }
