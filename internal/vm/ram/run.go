package ram

import (
	"iter"
	"runtime"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
)

// PageSize is the unit that RAM is looked at in, in bytes.
const PageSize = 4096

// maxPages keeps page numbers and counts within 32 bits: 16 TiB of RAM.
const maxPages = 1<<32 - 1

// blockPages are read, looked at and copied at once. A capture of 32 MiB took
// 8.4 ms in blocks of 64 KiB, 7.4 in 128, 6.9 in 256 and 7.3 in 512 (best of
// 100 on a busy 2-core AMD EPYC): small ones cost system calls, large ones
// leave the L2 cache before they are digested.
const blockPages = 64

// Run is a run of pages: the number of the first, and how many.
type Run struct{ First, Count uint64 }

// appendRun adds r, which does not start before the end of the last run, and
// makes one run of two that touch.
func appendRun(runs []Run, r Run) []Run {
	if n := len(runs); n > 0 && runs[n-1].First+runs[n-1].Count == r.First {
		runs[n-1].Count += r.Count
		return runs
	}
	return append(runs, r)
}

// countPages is the number of pages in runs.
func countPages(runs []Run) (n uint64) {
	for _, r := range runs {
		n += r.Count
	}
	return n
}

// blocks cuts runs into groups of blockPages pages, the last one shorter.
// A group is valid until the next one.
func blocks(runs iter.Seq[Run]) iter.Seq[[]Run] {
	return func(yield func([]Run) bool) {
		var block []Run
		room := uint64(blockPages)
		for r := range runs {
			for r.Count > 0 {
				n := min(r.Count, room)
				block = append(block, Run{r.First, n})
				r.First, r.Count, room = r.First+n, r.Count-n, room-n
				if room > 0 {
					continue
				}
				if !yield(block) {
					return
				}
				block, room = block[:0], blockPages
			}
		}
		if len(block) > 0 {
			yield(block)
		}
	}
}

// maxWorkers bounds the goroutines that look at one RAM.
const maxWorkers = 4

func workers() int { return min(runtime.NumCPU(), maxWorkers) }

// buffer is memory for a block.
type buffer [blockPages * PageSize]byte

// buffers keeps a few for the next call. A sync.Pool loses them to the
// collector, and new memory costs a page fault per page while a guest waits.
var buffers = make(chan *buffer, maxWorkers)

func takeBuffer() *buffer {
	select {
	case b := <-buffers:
		return b
	default:
		return new(buffer)
	}
}

func (b *buffer) giveBack() {
	select {
	case buffers <- b:
	default:
	}
}

// parallel calls do for 0 to n-1, each time with memory for a block, from as
// many goroutines as help, and returns the first error.
func parallel(n int, do func(i int, buf []byte) error) error {
	var (
		next  atomic.Int64
		group errgroup.Group
		wrong atomic.Bool
	)
	workers := min(workers(), n)
	// In a row, they share a page table with the other goroutines less often.
	share := max(1, min(8, n/(4*max(workers, 1))))
	for range workers {
		group.Go(func() error {
			buf := takeBuffer()
			defer buf.giveBack()
			for {
				end := int(next.Add(int64(share)))
				for i := end - share; i < end; i++ {
					if i >= n || wrong.Load() {
						return nil
					}
					if err := do(i, buf[:]); err != nil {
						wrong.Store(true)
						return err
					}
				}
			}
		})
	}
	return group.Wait()
}
