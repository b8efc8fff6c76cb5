package ram

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/klauspost/compress/s2"
)

var (
	// ErrFormat is in the error for a file that is no difference, or a damaged
	// one.
	ErrFormat = errors.New("damaged, or no RAM difference")
	// ErrVersion is in the error for a difference in a format that this Warren
	// does not know yet.
	ErrVersion = errors.New("made by a newer Warren")
)

const (
	magic      = "WARRNRAM"
	version    = 1
	headerSize = 4096
	headerUsed = 64 // bytes, the rest is zero
	entrySize  = 16
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// header is the first page of a difference; doc.go has it byte by byte.
type header struct {
	ram, data, entries uint64
	packed             uint64 // length of the data when it is packed, else 0
	tableSum           uint32
}

// maxPacked is how many data pages are packed at most, all of which have to
// fit into memory to be unpacked. It makes a snapshot of an idle guest a
// quarter of the size; where much has changed the time counts for more.
const maxPacked = 512

// table is where the table starts, length where the file ends.
func (h *header) table() int64 {
	if h.packed > 0 {
		return headerSize + int64(h.packed)
	}
	return headerSize + int64(h.data)*PageSize
}
func (h *header) length() int64 { return h.table() + int64(h.entries)*entrySize }

func (h *header) bytes() []byte {
	b := append(make([]byte, 0, headerSize), magic...)
	b = binary.LittleEndian.AppendUint32(b, version)
	b = binary.LittleEndian.AppendUint32(b, PageSize)
	b = binary.LittleEndian.AppendUint64(b, h.ram)
	b = binary.LittleEndian.AppendUint64(b, h.data)
	b = binary.LittleEndian.AppendUint64(b, h.entries)
	b = binary.LittleEndian.AppendUint64(b, uint64(h.table()))
	b = binary.LittleEndian.AppendUint64(b, h.packed)
	b = binary.LittleEndian.AppendUint32(b, h.tableSum)
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	return b[:headerSize]
}

// parseHeader reads the header of a file of length bytes that is to hold a
// difference of a RAM of ram pages. What it accepts is bounded by both.
func parseHeader(b []byte, length int64, ram uint64) (*header, error) {
	if !bytes.HasPrefix(b, []byte(magic)) {
		return nil, wrong("it does not start with %s", magic)
	}
	if len(b) < 12 {
		return nil, wrong("it ends within the header")
	}
	le := binary.LittleEndian
	switch v := le.Uint32(b[8:]); {
	case v > version:
		return nil, fmt.Errorf("%w (format %d, this one knows %d); update Warren to use it", ErrVersion, v, version)
	case v == 0:
		return nil, wrong("there is no format 0")
	}
	if len(b) < headerSize {
		return nil, wrong("it ends within the header")
	}
	if le.Uint32(b[60:]) != crc32.Checksum(b[:60], castagnoli) {
		return nil, wrong("the checksum of the header is not right")
	}
	if !bytes.Equal(b[headerUsed:], zeros[headerUsed:]) {
		return nil, wrong("the header is not zero from byte %d on", headerUsed)
	}
	if n := le.Uint32(b[12:]); n != PageSize {
		return nil, wrong("its pages have %d bytes, not %d", n, PageSize)
	}
	h := &header{ram: le.Uint64(b[16:]), data: le.Uint64(b[24:]), entries: le.Uint64(b[32:]), packed: le.Uint64(b[48:]), tableSum: le.Uint32(b[56:])}
	// The bounds come in an order in which no sum can overflow.
	switch {
	case h.ram != ram:
		return nil, wrong("it is for a RAM of %d pages, not %d", h.ram, ram)
	case h.data > ram || h.entries > ram:
		return nil, wrong("%d data pages and %d entries are too many for a RAM of %d pages", h.data, h.entries, ram)
	case h.packed > 0 && (h.data > maxPacked || h.packed >= h.data*PageSize):
		return nil, wrong("%d data pages are not packed into %d bytes", h.data, h.packed)
	case le.Uint64(b[40:]) != uint64(h.table()):
		return nil, wrong("the table does not start behind the data")
	case length != h.length():
		return nil, wrong("it has %d bytes instead of %d", length, h.length())
	}
	return h, nil
}

// unpack reads packed data. The header has bounded both lengths.
func unpack(r io.ReaderAt, h *header) ([]byte, error) {
	packed := make([]byte, h.packed)
	if _, err := r.ReadAt(packed, headerSize); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if n, err := s2.DecodedLen(packed); err != nil || uint64(n) != h.data*PageSize {
		return nil, wrong("the data is not %d packed pages", h.data)
	}
	pages, err := s2.Decode(nil, packed)
	if err != nil {
		return nil, wrong("the packed data: %v", err)
	}
	return pages, nil
}

// kind says what an entry of the table is about.
type kind uint32

const (
	data kind = 0 // the pages are in the file
	zero kind = 1 // the pages are zero
)

// entry is an entry of the table.
type entry struct {
	first uint64
	count uint32
	kind  kind
}

func (e entry) end() uint64 { return e.first + uint64(e.count) }

func (e entry) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, e.first)
	b = binary.LittleEndian.AppendUint32(b, e.count)
	return binary.LittleEndian.AppendUint32(b, uint32(e.kind))
}

// parseEntry reads the entry that follows last in the table of a RAM of ram
// pages; the first one follows the zero entry.
func parseEntry(b []byte, last entry, ram uint64) (entry, error) {
	le := binary.LittleEndian
	e := entry{first: le.Uint64(b), count: le.Uint32(b[8:]), kind: kind(le.Uint32(b[12:]))}
	switch {
	case e.kind != data && e.kind != zero:
		return e, wrong("the table has a kind %d", e.kind)
	case e.count == 0:
		return e, wrong("the table has an empty run at page %d", e.first)
	case e.first >= ram || uint64(e.count) > ram-e.first:
		return e, wrong("%d pages from page %d are not in a RAM of %d", e.count, e.first, ram)
	case e.first < last.end():
		return e, wrong("the runs of the table overlap or descend at page %d", e.first)
	case last.count > 0 && e.first == last.end() && e.kind == last.kind:
		return e, wrong("two runs of the table are one at page %d", e.first)
	}
	return e, nil
}

// wrong is an ErrFormat that says what is wrong.
func wrong(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrFormat, fmt.Sprintf(format, args...))
}
