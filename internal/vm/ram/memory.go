package ram

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// keepBytes is how much of a capture stays in memory until the VM runs again.
const keepBytes = 64 << 20

// readyBytes is the least that Prepare takes: a quiet guest changes less
// between two snapshots.
const readyBytes = 8 << 20

// Prepare takes the memory that the next Capture is likely to need, so that
// the guest does not wait for it. Call it before the VM is stopped; Capture
// works without, a little slower. When no Capture follows, Release gives the
// memory back; the collector does not.
func (t *Tracker) Prepare() error {
	t.Release()
	size := min(max(readyBytes, 2*t.lastData), keepBytes, int(t.process.pages)*PageSize)
	m, err := mapMemory(min(keepBytes, int(t.process.pages)*PageSize))
	if err != nil {
		return fmt.Errorf("prepare a capture: %w", err)
	}
	t.ready = m
	// Where the kernel (before 5.14) cannot, the pages come one by one.
	_ = unix.Madvise(m[:size], unix.MADV_POPULATE_WRITE)
	for range workers() - len(buffers) {
		b := new(buffer)
		clear(b[:]) // now it is there
		b.giveBack()
	}
	return nil
}

// Release gives back what Prepare took, if anything.
func (t *Tracker) Release() {
	if t.ready != nil {
		_ = unix.Munmap(t.ready) // fails for memory that is not mapped alone
		t.ready = nil
	}
}

// memory is where a capture keeps up to size bytes.
func (t *Tracker) memory(size int) ([]byte, error) {
	if size == 0 {
		return nil, nil
	}
	if m := t.ready; len(m) >= size {
		t.ready = nil
		return m, nil
	}
	return mapMemory(size)
}

// mapMemory takes memory that is outside the Go heap, where it would make the
// collector run, and that exists only as it is used.
func mapMemory(size int) ([]byte, error) {
	m, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("memory for %d bytes of a capture: %w", size, err)
	}
	// A page fault takes up to 12 µs where the host is a VM itself: 4 MiB in
	// small pages cost 12 ms, in huge ones under 1 ms.
	_ = unix.Madvise(m, unix.MADV_HUGEPAGE)
	return m, nil
}
