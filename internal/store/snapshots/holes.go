package snapshots

import (
	"os"

	"github.com/warren-vm/warren/internal/store/digest"
)

// holeWriter writes a file from its start and leaves holes where whole blocks
// are zero. The file's size is for the caller to set.
type holeWriter struct {
	disk disk
	f    *os.File
	at   int64
}

// holeBlock is what file systems keep or leave out.
const holeBlock = 4 << 10

func (w *holeWriter) write(data []byte) error {
	for len(data) > 0 {
		n, isHole := run(data)
		if !isHole {
			if err := w.disk.writeAt(w.f, data[:n], w.at); err != nil {
				return err
			}
		}
		w.at += int64(n)
		data = data[n:]
	}
	return nil
}

// run is how many of the first bytes are blocks that are all zero, or that
// are all not.
func run(data []byte) (n int, isHole bool) {
	for n < len(data) {
		block := data[n:min(n+holeBlock, len(data))]
		hole := digest.IsZero(block)
		if n > 0 && hole != isHole {
			return n, isHole
		}
		isHole, n = hole, n+len(block)
	}
	return n, isHole
}
