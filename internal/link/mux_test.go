package link

import "encoding/binary"

// mux is a yamux header.
func mux(kind byte, flags uint16, id, length uint32) []byte {
	b := []byte{0, kind}
	b = binary.BigEndian.AppendUint16(b, flags)
	b = binary.BigEndian.AppendUint32(b, id)
	return binary.BigEndian.AppendUint32(b, length)
}
