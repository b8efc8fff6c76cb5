package ram

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

const testPages = 64

// written is a difference file for a RAM of testPages pages, right but for
// what the arguments make wrong. Each data page holds its number.
func written(entries []entry, change func(*header), patch func(b []byte)) []byte {
	h := &header{ram: testPages, entries: uint64(len(entries))}
	var table, pages []byte
	for _, e := range entries {
		table = e.append(table)
		for page := e.first; e.kind == data && page < min(e.end(), 2*testPages); page++ {
			pages = append(pages, bytes.Repeat([]byte{byte(page)}, PageSize)...)
			h.data++
		}
	}
	h.tableSum = crc32.Checksum(table, castagnoli)
	if change != nil {
		change(h)
	}
	b := append(append(h.bytes(), pages...), table...)
	if patch != nil {
		patch(b)
		binary.LittleEndian.PutUint32(b[60:], crc32.Checksum(b[:60], castagnoli))
	}
	return b
}

var goodEntries = []entry{{0, 2, data}, {2, 3, zero}, {10, 1, zero}, {12, 1, data}, {63, 1, data}}

func TestADifferenceIsWhatTheFormatSays(t *testing.T) {
	b := written([]entry{{1, 1, data}, {2, 3, zero}}, nil, nil)
	want := "WARRNRAM" + "\x01\x00\x00\x00" + "\x00\x10\x00\x00" + "\x40\x00\x00\x00\x00\x00\x00\x00" +
		"\x01\x00\x00\x00\x00\x00\x00\x00" + "\x02\x00\x00\x00\x00\x00\x00\x00" + "\x00\x20\x00\x00\x00\x00\x00\x00"
	if string(b[:48]) != want {
		t.Errorf("header %x, want %x", b[:48], want)
	}
	table := "\x01\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00" +
		"\x02\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x01\x00\x00\x00"
	if string(b[8192:]) != table {
		t.Errorf("table %x, want %x", b[8192:], table)
	}
}

func TestOnlyWholeDifferencesAreOpened(t *testing.T) {
	good := written(goodEntries, nil, nil)
	le := binary.LittleEndian
	tests := []struct {
		name string
		file []byte
		want string // "" when it is good
	}{
		{"good", good, ""},
		{"nothing changed", written(nil, nil, nil), ""},
		{"all of it", written([]entry{{0, testPages, data}}, nil, nil), ""},
		{"empty", nil, "does not start with"},
		{"foreign", append([]byte("\x7fELF"), good...), "does not start with"},
		{"ends after the magic", good[:10], "ends within the header"},
		{"ends in the header", good[:3000], "ends within the header"},
		{"ends in the data", good[:9000], "instead of"},
		{"ends in the table", good[:len(good)-1], "instead of"},
		{"goes on", append(bytes.Clone(good), 0), "instead of"},
		{"format 0", written(goodEntries, nil, func(b []byte) { b[8] = 0 }), "no format 0"},
		{"page size", written(goodEntries, nil, func(b []byte) { b[13] = 0x40 }), "pages have 16384 bytes"},
		{"another RAM", written(goodEntries, func(h *header) { h.ram = 65 }, nil), "for a RAM of 65 pages, not 64"},
		{"a flipped bit of the header", flip(good, 20), "checksum of the header"},
		{"something behind the header", flip(good, 4000), "not zero from byte 64"},
		{"a flipped bit of the table", flip(good, len(good)-16), "checksum of the table"},
		{"too much data", written(goodEntries, nil, func(b []byte) { le.PutUint64(b[24:], 1<<52) }), "too many"},
		{"too many entries", written(goodEntries, nil, func(b []byte) { le.PutUint64(b[32:], 1<<60) }), "too many"},
		{"the table elsewhere", written(goodEntries, nil, func(b []byte) { le.PutUint64(b[40:], 4096) }), "does not start behind"},
		{"overlap", written([]entry{{0, 4, data}, {3, 2, zero}}, nil, nil), "overlap or descend at page 3"},
		{"descending", written([]entry{{9, 1, zero}, {3, 2, zero}}, nil, nil), "overlap or descend at page 3"},
		{"two that are one", written([]entry{{0, 4, zero}, {4, 2, zero}}, nil, nil), "are one at page 4"},
		{"an empty run", written([]entry{{5, 0, zero}}, nil, nil), "empty run at page 5"},
		{"a kind 2", written([]entry{{5, 1, 2}}, nil, nil), "a kind 2"},
		{"beyond the RAM", written([]entry{{63, 2, zero}}, nil, nil), "not in a RAM of 64"},
		{"far beyond the RAM", written([]entry{{1<<64 - 1, 2, zero}}, nil, nil), "not in a RAM of 64"},
		{"a count that is too large", written([]entry{{1, 1<<32 - 1, zero}}, nil, nil), "not in a RAM of 64"},
		{"data for another table", moveData(), "the table has 1 data pages, the header 2"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "difference")
			if err := os.WriteFile(path, tt.file, 0o600); err != nil {
				t.Fatal(err)
			}
			d, err := OpenDifference(path, testPages*PageSize)
			switch {
			case err == nil:
				d.Close()
				if tt.want != "" {
					t.Errorf("opened; want an error with %q", tt.want)
				}
			case tt.want == "" || !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), tt.want):
				t.Errorf("%v; want %q", err, tt.want)
			}
		})
	}
}

// moveData is a difference with a data page more than the table knows.
func moveData() []byte {
	b := written([]entry{{1, 1, data}}, func(h *header) { h.data = 2 }, nil)
	return append(b[:headerSize+PageSize], append(make([]byte, PageSize), b[headerSize+PageSize:]...)...)
}

func flip(b []byte, at int) []byte {
	b = bytes.Clone(b)
	b[at] ^= 4
	return b
}

func TestANewerFormatIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "difference")
	// Whatever a newer format looks like behind the version.
	if err := os.WriteFile(path, []byte("WARRNRAM\x02\x00\x00\x00something else"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := OpenDifference(path, testPages*PageSize)
	if !errors.Is(err, ErrVersion) || errors.Is(err, ErrFormat) {
		t.Error(err)
	}
	want := "open " + path + ": made by a newer Warren (format 2, this one knows 1); update Warren to use it"
	if err.Error() != want {
		t.Errorf("%v\nwant %s", err, want)
	}
}

func TestAPipeIsNoDifference(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenDifference(path, testPages*PageSize); !errors.Is(err, ErrFormat) {
		t.Error(err)
	}
}

// FuzzDifference takes a file without what would make it long: the zeros of
// the header, and the data pages, which nobody looks at. Whole files are so
// long that the fuzzer spends its time on making them shorter.
func FuzzDifference(f *testing.F) {
	le := binary.LittleEndian
	for _, entries := range [][]entry{
		goodEntries,
		nil,
		{{0, 4, data}, {3, 2, zero}},
		{{1<<64 - 1, 1<<32 - 1, zero}},
	} {
		b := written(entries, nil, nil)
		table := le.Uint64(b[40:])
		f.Add(append(bytes.Clone(b[:headerUsed]), b[table:]...), int64(len(b)))
		f.Add(b[:headerUsed], int64(len(b)))
	}
	f.Add([]byte("WARRNRAM\x02\x00\x00\x00"), int64(12))
	f.Fuzz(func(t *testing.T, b []byte, length int64) {
		file := shortened{head: b}
		if len(b) >= headerUsed {
			// Without right checksums next to nothing would be looked at.
			le.PutUint32(b[48:], crc32.Checksum(b[headerUsed:], castagnoli))
			le.PutUint32(b[60:], crc32.Checksum(b[:60], castagnoli))
			file.head = append(bytes.Clone(b[:headerUsed]), zeros[headerUsed:]...)
			file.table, file.at = b[headerUsed:], int64(le.Uint64(b[40:]))
		}
		d, err := parseDifference(file, length, testPages)
		if err != nil {
			if !errors.Is(err, ErrFormat) && !errors.Is(err, ErrVersion) && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("an error of no kind: %v", err)
			}
			return
		}
		// What is accepted can be written in one way only.
		h := &header{ram: d.ram, data: d.data, entries: uint64(len(d.table)), tableSum: le.Uint32(b[48:])}
		var table []byte
		for _, e := range d.table {
			table = e.append(table)
		}
		if !bytes.Equal(file.head, h.bytes()) || !bytes.Equal(file.table, table) || length != h.length() {
			t.Error("accepted another way to write the same")
		}
		if d.data+d.zero > testPages {
			t.Errorf("%d data and %d zero pages in a RAM of %d", d.data, d.zero, testPages)
		}
	})
}

// shortened is a file with nothing between its header and its table.
type shortened struct {
	head, table []byte
	at          int64
}

func (s shortened) ReadAt(b []byte, off int64) (int, error) {
	if off < headerSize {
		return bytes.NewReader(s.head).ReadAt(b, off)
	}
	return bytes.NewReader(s.table).ReadAt(b, off-s.at)
}
