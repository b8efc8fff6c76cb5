package files

import (
	"io"
	"sync"
)

// copySize is what one read asks for: large, because each costs a system call
// and the guest may run on an emulated processor.
const copySize = 128 << 10

var copyBuffers = sync.Pool{New: func() any { return new([copySize]byte) }}

// Copy is io.Copy with large, shared buffers.
func Copy(w io.Writer, r io.Reader) (int64, error) { return copyBuffered(w, r) }

func copyBuffered(w io.Writer, r io.Reader) (int64, error) {
	buf := copyBuffers.Get().(*[copySize]byte)
	defer copyBuffers.Put(buf)
	// The bare interfaces keep io from choosing a small buffer of its own.
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, buf[:])
}
