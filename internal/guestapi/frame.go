package guestapi

import (
	"encoding/binary"
	"fmt"
	"io"
)

// FrameKind says what a frame of an exec conversation carries.
type FrameKind byte

// The kinds. The host sends the first two, the guest the others. Exit is
// the last frame and holds an ExitStatus as JSON.
const (
	FrameStdin    FrameKind = 0x01
	FrameStdinEnd FrameKind = 0x02 // no payload
	FrameStdout   FrameKind = 0x11
	FrameStderr   FrameKind = 0x12
	FrameExit     FrameKind = 0x1f
)

// FrameHeader is the length of a frame's header: the kind and the length of
// the payload, big-endian.
const FrameHeader = 5

// PutFrameHeader writes the header of a frame with n bytes of payload to b,
// which has room for FrameHeader bytes, so that a caller can keep header and
// payload in one buffer and hand them to the stream in one write.
func PutFrameHeader(b []byte, kind FrameKind, n int) {
	b[0] = byte(kind)
	binary.BigEndian.PutUint32(b[1:FrameHeader], uint32(n))
}

// ReadFrame reads one frame into buf, which has room for MaxFrame bytes, and
// returns its kind and payload (a part of buf). A length over MaxFrame is an
// error before anything is read; a stream that ends between two frames gives
// io.EOF, one that ends inside a frame io.ErrUnexpectedEOF.
func ReadFrame(r io.Reader, buf []byte) (FrameKind, []byte, error) {
	var h [FrameHeader]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(h[1:])
	if n > MaxFrame || int(n) > len(buf) {
		return 0, nil, fmt.Errorf("exec frame of %d bytes, more than %d", n, min(MaxFrame, len(buf)))
	}
	if _, err := io.ReadFull(r, buf[:n]); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	return FrameKind(h[0]), buf[:n], nil
}
