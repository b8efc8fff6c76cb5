package ram

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Own gives the runs of pages that are the process's own, ascending, no two
// touching: those it has written to since it mapped the file, in memory or
// swapped out. All others are what the file holds.
func (p *Process) Own() ([]Run, error) {
	runs, err := p.scan()
	// A kernel before 6.7 does not know the call.
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EOPNOTSUPP) {
		runs, err = p.walk()
	}
	if err != nil {
		return nil, fmt.Errorf("find the pages of process %d: %w", p.pid, err)
	}
	return runs, nil
}

// From linux/fs.h.
const (
	pagemapScan = 0xC0606610 // PAGEMAP_SCAN

	pageIsFile    = 1 << 2
	pageIsPresent = 1 << 3
	pageIsSwapped = 1 << 4
)

// scanArg is struct pm_scan_arg.
type scanArg struct {
	size, flags        uint64
	start, end         uint64
	walkEnd            uint64
	vec, vecLen        uint64
	maxPages           uint64
	inverted           uint64
	mask, anyOf, shown uint64
}

// pageRegion is struct page_region.
type pageRegion struct{ start, end, categories uint64 }

// scan is Own by PAGEMAP_SCAN, which skips what is not there: 0.13 ms where
// walk takes 0.25 ms, for 32 MiB of own pages in 256 MiB.
func (p *Process) scan() ([]Run, error) {
	var (
		runs  []Run
		vec   = make([]pageRegion, 1024)
		pin   runtime.Pinner
		start = p.start
		end   = p.start + p.pages*PageSize
	)
	defer pin.Unpin()
	pin.Pin(&vec[0])
	for start < end {
		arg := scanArg{
			start: start, end: end,
			vec: uint64(uintptr(unsafe.Pointer(&vec[0]))), vecLen: uint64(len(vec)),
			inverted: pageIsFile, mask: pageIsFile,
			anyOf: pageIsPresent | pageIsSwapped,
		}
		arg.size = uint64(unsafe.Sizeof(arg))
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, p.pagemap.Fd(), pagemapScan, uintptr(unsafe.Pointer(&arg)))
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return nil, errno
		}
		if n > uintptr(len(vec)) || arg.walkEnd <= start {
			return nil, fmt.Errorf("the scan stands still at %#x", arg.walkEnd)
		}
		next := arg.walkEnd
		for _, r := range vec[:n] {
			runs = appendRun(runs, Run{(r.start - p.start) / PageSize, (r.end - r.start) / PageSize})
			// The kernel (seen with 6.18) gives regions in groups of 512 and
			// says of a walk that it finished where the group before the last
			// one ended: to go on there would give the last ones twice.
			next = max(next, r.end)
		}
		start = next
	}
	return runs, nil
}

// Bits of an entry of /proc/PID/pagemap.
const (
	entryFile    = 1 << 61
	entrySwapped = 1 << 62
	entryPresent = 1 << 63
)

// walk is Own by reading an entry for every page of the RAM.
func (p *Process) walk() ([]Run, error) {
	var runs []Run
	buf := make([]byte, 64<<10)
	for page := uint64(0); page < p.pages; {
		part := buf[:min(uint64(len(buf)), (p.pages-page)*8)]
		if _, err := p.pagemap.ReadAt(part, int64((p.start/PageSize+page)*8)); err != nil {
			return nil, err
		}
		for ; len(part) > 0; part = part[8:] {
			entry := binary.LittleEndian.Uint64(part)
			if entry&(entryPresent|entrySwapped) != 0 && entry&entryFile == 0 {
				runs = appendRun(runs, Run{page, 1})
			}
			page++
		}
	}
	return runs, nil
}
