package ram

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapping is one line of /proc/PID/maps.
type mapping struct {
	start, end, offset uint64
	private            bool
	file               string // device and inode, as the kernel writes them
}

// findRAM is where in the process the file is mapped. The kernel splits a
// mapping when parts of it are treated differently, so several lines in a row
// may be one mapping.
func findRAM(pid int, file string, size int64) (start uint64, err error) {
	want, err := identity(file)
	if err != nil {
		return 0, err
	}
	var whole []mapping // lines that continue each other count as one
	err = eachMapping(fmt.Sprintf("/proc/%d/maps", pid), func(m mapping) {
		if m.file != want {
			return
		}
		if n := len(whole); n > 0 {
			last := &whole[n-1]
			if last.end == m.start && last.offset+(last.end-last.start) == m.offset && last.private == m.private {
				last.end = m.end
				return
			}
		}
		whole = append(whole, m)
	})
	if err != nil {
		return 0, err
	}
	switch {
	case len(whole) == 0:
		return 0, fmt.Errorf("%s is not mapped there; start the VM with it as its memory", file)
	case len(whole) > 1:
		return 0, fmt.Errorf("%s is mapped there in %d places instead of one", file, len(whole))
	}
	m := whole[0]
	switch {
	case !m.private:
		return 0, fmt.Errorf("%s is mapped shared, so the guest changes the file itself; map it privately (share=off)", file)
	case m.offset != 0 || m.end-m.start != uint64(size):
		return 0, fmt.Errorf("%d bytes of %s are mapped from offset %d, not %d from its start", m.end-m.start, file, m.offset, size)
	}
	return m.start, nil
}

// identity is the device and inode of a file as /proc/PID/maps shows them.
// They are not those of stat on btrfs, whose subvolumes have devices of their
// own, so the file is mapped here for a moment, and looked up.
func identity(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	m, err := unix.Mmap(int(f.Fd()), 0, PageSize, unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return "", fmt.Errorf("map %s: %w", file, err)
	}
	defer unix.Munmap(m)
	at := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(m))))
	var id string
	err = eachMapping("/proc/self/maps", func(m mapping) {
		if m.start <= at && at < m.end {
			id = m.file
		}
	})
	if err == nil && id == "" {
		err = fmt.Errorf("map %s: no such mapping in /proc/self/maps", file)
	}
	return id, err
}

// eachMapping calls do for the lines of a maps file that map a file.
func eachMapping(path string, do func(mapping)) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		m, err := parseMapping(lines.Text())
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if !strings.HasSuffix(m.file, " 0") { // inode 0 is no file
			do(m)
		}
	}
	return lines.Err()
}

// parseMapping reads a line such as
//
//	7f0000000000-7f0040000000 rw-p 00000000 fe:00 4242   /path, with spaces
func parseMapping(line string) (m mapping, err error) {
	bad := fmt.Errorf("%.80q is no line of a maps file", line)
	fields := strings.SplitN(line, " ", 6)
	if len(fields) < 5 || len(fields[1]) != 4 {
		return m, bad
	}
	from, to, _ := strings.Cut(fields[0], "-")
	for _, number := range []struct {
		hex string
		to  *uint64
	}{{from, &m.start}, {to, &m.end}, {fields[2], &m.offset}} {
		if *number.to, err = strconv.ParseUint(number.hex, 16, 64); err != nil {
			return m, bad
		}
	}
	if m.end <= m.start {
		return m, bad
	}
	m.private = fields[1][3] == 'p'
	m.file = fields[3] + " " + fields[4]
	return m, nil
}
