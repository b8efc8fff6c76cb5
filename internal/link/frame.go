package link

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"syscall"
)

// A frame on the port:
//
//	magic 3 | kind 1 | generation 8 | length 4 | CRC-32C of these 16 | payload | tail 4
//
// Numbers are big-endian. The tail is a constant: a frame that a restore cut
// off is filled up by the padding of the next hello, which is zeros, so a
// frame with a wrong tail is one whose end never came. Without it the zeros
// would reach a stream of the old session as data.
const (
	headerSize = 20
	tailSize   = 4
	overhead   = headerSize + tailSize

	// maxHostFrame bounds a whole frame from the host and thereby the padding
	// a hello needs. A guest reads 4 KiB at a time, so larger frames save it
	// nothing.
	maxHostFrame = 16 << 10
	// maxGuestFrame is what the guest's driver takes in one write.
	maxGuestFrame = 32 << 10
)

type kind byte

const (
	kindHello  kind = 'H' // host: a new session begins; no payload
	kindAnswer kind = 'A' // guest: the session has begun; no payload
	kindData   kind = 'D' // both: bytes of the session
	kindBye    kind = 'B' // guest: the session has ended on its side; no payload
)

var (
	magic    = []byte("WL1")
	tail     = []byte("\xa5WL\x5a")
	crcTable = crc32.MakeTable(crc32.Castagnoli)
)

// errDesync says that what stands next is no frame.
var errDesync = errors.New("bytes that are no frame")

type header struct {
	kind       kind
	generation uint64
	length     int // of the payload
}

// frame is a header with its payload, which lies in the decoder's buffer and
// is valid until the decoder is used again.
type frame struct {
	header
	payload []byte
}

// appendFrame appends a frame whose payload is a followed by b.
func appendFrame(dst []byte, k kind, generation uint64, a, b []byte) []byte {
	start := len(dst)
	dst = append(dst, magic...)
	dst = append(dst, byte(k))
	dst = binary.BigEndian.AppendUint64(dst, generation)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(a)+len(b)))
	dst = binary.BigEndian.AppendUint32(dst, crc32.Checksum(dst[start:], crcTable))
	dst = append(dst, a...)
	dst = append(dst, b...)
	return append(dst, tail...)
}

// appendHello appends what the host opens a session with.
func appendHello(dst []byte, generation uint64) []byte {
	// The guest may wait for the rest of a frame that the previous host did
	// not finish; as many zeros as a frame can have end that wait for certain.
	dst = append(dst, make([]byte, maxHostFrame)...)
	return appendFrame(dst, kindHello, generation, nil, nil)
}

// parseHeader reads a header from b, which holds at least headerSize bytes.
// max bounds the whole frame.
func parseHeader(b []byte, max int) (header, bool) {
	if !bytes.HasPrefix(b, magic) {
		return header{}, false
	}
	if binary.BigEndian.Uint32(b[16:]) != crc32.Checksum(b[:16], crcTable) {
		return header{}, false
	}
	length := binary.BigEndian.Uint32(b[12:])
	if uint64(length) > uint64(max-overhead) {
		return header{}, false
	}
	return header{kind(b[3]), binary.BigEndian.Uint64(b[4:]), int(length)}, true
}

// decoder finds frames in the bytes of a port. It keeps its place when a read
// fails, so reading can go on after a deadline or a disconnect. Its memory is
// its buffer. It is not safe for concurrent use.
type decoder struct {
	r      io.Reader
	max    int // of a whole frame
	buf    []byte
	lo, hi int // unread bytes are buf[lo:hi]
}

func newDecoder(r io.Reader, max int) *decoder {
	// Twice the largest frame: the rest of a read then seldom has to move.
	return &decoder{r: r, max: max, buf: make([]byte, 2*max)}
}

// need reads until at least n bytes (at most max) are there.
func (d *decoder) need(n int) error {
	for d.hi-d.lo < n {
		if d.lo == d.hi {
			d.lo, d.hi = 0, 0
		}
		if d.lo > len(d.buf)-d.max {
			d.hi = copy(d.buf, d.buf[d.lo:d.hi])
			d.lo = 0
		}
		m, err := d.r.Read(d.buf[d.hi:])
		d.hi += m
		if m > 0 {
			continue
		}
		switch {
		case err == nil:
			return io.ErrNoProgress
		case errors.Is(err, syscall.ECONNRESET): // a socket's other end closed with bytes unread
			return io.EOF
		}
		return err
	}
	return nil
}

// next returns the frame that stands next. With errDesync nothing is taken,
// and hunt goes on from there.
func (d *decoder) next() (frame, error) {
	if err := d.need(headerSize); err != nil {
		return frame{}, err
	}
	h, ok := parseHeader(d.buf[d.lo:d.hi], d.max)
	if !ok {
		return frame{}, errDesync
	}
	return d.whole(h)
}

// back puts the frame that next has just returned back.
func (d *decoder) back(f frame) { d.lo -= overhead + f.length }

// whole completes the frame whose header stands at lo.
func (d *decoder) whole(h header) (frame, error) {
	size := overhead + h.length
	if err := d.need(size); err != nil {
		return frame{}, err
	}
	end := d.lo + size
	if !bytes.Equal(d.buf[end-tailSize:end], tail) {
		return frame{}, errDesync
	}
	payload := d.buf[d.lo+headerSize : end-tailSize : end-tailSize]
	d.lo = end
	return frame{h, payload}, nil
}

// hunt drops bytes until a frame without payload stands next that want
// accepts, and returns its header without taking it. It looks into every
// byte, also into what claims to be the payload of another frame: after a
// restart such a claim is worth nothing.
func (d *decoder) hunt(want func(header) bool) (header, error) {
	for {
		if err := d.need(overhead); err != nil {
			return header{}, err
		}
		i := bytes.Index(d.buf[d.lo:d.hi], magic)
		if i < 0 {
			d.lo = d.hi - (len(magic) - 1) // may be the beginning of one
			continue
		}
		d.lo += i
		if err := d.need(overhead); err != nil {
			return header{}, err
		}
		b := d.buf[d.lo:d.hi]
		h, ok := parseHeader(b, d.max)
		if ok && h.length == 0 && want(h) && bytes.Equal(b[headerSize:overhead], tail) {
			return h, nil
		}
		d.lo++
	}
}
