package ram

import (
	"fmt"
	"hash/maphash"
	"slices"
)

// Tracker knows what a VM's RAM was at its last snapshot. It keeps a digest of
// each page that was the process's own then, in about 8 bytes.
//
// It belongs to one goroutine at a time, and the VM must be stopped during
// Capture and Settle. It needs the Process open. There is nothing to close,
// but for what Prepare took: see Release.
type Tracker struct {
	process *Process
	// seed makes the digests differ from tracker to tracker, so that nobody
	// can prepare two pages that have the same. A guest that managed it would
	// spoil its own snapshot and no other. By chance it happens once in 2^64.
	seed maphash.Seed
	// table has a chunk for each 2 MiB of RAM in which a page was own. A VM of
	// 64 GiB that changed nothing has one of 256 KiB.
	table []*[chunkPages]uint64
	// captures counts them: the last one is the one that can be committed.
	captures uint64
	ready    []byte // the memory for the next capture, or nil
	lastData int    // bytes of data in the last one
}

const chunkPages = 512

// Values in the table that are no digests.
const (
	notOwn  = 0 // the page is what the flat file holds
	unknown = 1 // nobody knows what the base holds
)

// NewTracker makes a tracker for a VM whose base is the flat file that it
// maps: every page that is its own differs, until Settle or Commit.
func NewTracker(p *Process) *Tracker {
	return &Tracker{
		process: p,
		seed:    maphash.MakeSeed(),
		table:   make([]*[chunkPages]uint64, (p.pages+chunkPages-1)/chunkPages),
	}
}

// Settle makes the RAM as it is now the base, as it has to be after a restore
// when all differences are injected. After an error the base is as it was.
func (t *Tracker) Settle() error {
	c, err := t.look(0)
	if err != nil {
		return fmt.Errorf("settle: %w", err)
	}
	t.Commit(c)
	return nil
}

// Commit makes what c holds the base that the next capture is compared with.
// It may be called after c.Close. Call it when the difference is safe, and
// before the next Capture: a base that a later capture was not compared with
// is no use to it. If that happens, nothing is taken for known any more, and
// the next capture holds every page that is or was the process's own.
func (t *Tracker) Commit(c *Capture) {
	late := c.number != t.captures
	for i := range c.blocks {
		for _, ch := range c.blocks[i].changes {
			t.set(uint64(ch.page), ch.digest)
		}
	}
	if !late {
		return
	}
	for _, chunk := range t.table {
		if chunk != nil {
			for i := range chunk {
				chunk[i] = unknown
			}
		}
	}
}

func (t *Tracker) base(page uint64) uint64 {
	if chunk := t.table[page/chunkPages]; chunk != nil {
		return chunk[page%chunkPages]
	}
	return notOwn
}

func (t *Tracker) set(page, digest uint64) {
	chunk := &t.table[page/chunkPages]
	if *chunk == nil {
		if digest == notOwn {
			return
		}
		*chunk = new([chunkPages]uint64)
	}
	(*chunk)[page%chunkPages] = digest
}

// digest is what the table holds for a page. 4 KiB take 0.4 µs: Go's hash is
// made of AES instructions.
func (t *Tracker) digest(page []byte) uint64 {
	if d := maphash.Bytes(t.seed, page); d > unknown {
		return d
	}
	return unknown + 1
}

// lost are the pages that were the process's own at the base and are not any
// more, because a balloon gave them back: they are what the flat file holds,
// which the base may not be. own are those it has now.
func (t *Tracker) lost(own []Run) (lost []Run) {
	for i, chunk := range t.table {
		if chunk == nil {
			continue
		}
		for j, d := range chunk {
			if d == notOwn {
				continue
			}
			page := uint64(i*chunkPages + j)
			for len(own) > 0 && own[0].First+own[0].Count <= page {
				own = own[1:]
			}
			if len(own) == 0 || page < own[0].First {
				lost = appendRun(lost, Run{page, 1})
			}
		}
	}
	return lost
}

// holds says whether page is in runs, which ascend.
func holds(runs []Run, page uint64) bool {
	i, found := slices.BinarySearchFunc(runs, page, func(r Run, page uint64) int {
		switch {
		case r.First > page:
			return 1
		case r.First+r.Count <= page:
			return -1
		}
		return 0
	})
	return found && i < len(runs)
}

// merge makes one ascending list of two that have no page in common.
func merge(a, b []Run) []Run {
	if len(b) == 0 {
		return a
	}
	var all []Run
	for len(a) > 0 || len(b) > 0 {
		if len(b) == 0 || len(a) > 0 && a[0].First < b[0].First {
			a, b = b, a
		}
		all, b = appendRun(all, b[0]), b[1:]
	}
	return all
}
