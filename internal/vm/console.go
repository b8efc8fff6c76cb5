package vm

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// MinLog is the least that BoundedLog can be bounded to, in bytes.
const MinLog = 4 << 10

// boundedLog is a file that is readable at any time: its first quarter is
// what was written first, then a line that says how much is missing, then the
// newest part. When the file is full the older half of the newest part goes.
type boundedLog struct {
	mu      sync.Mutex
	file    *os.File
	head    int64 // bytes that stay
	max     int64
	size    int64
	missing int64 // bytes left out after head
	mark    int64 // length of the line that says so
	closed  bool
}

// BoundedLog creates path (0600; a file that is there is emptied, a link is
// refused) and keeps in it the first and the newest of what is written, never
// more than max bytes (at least MinLog).
//
// Writes always take everything: a fault of the disk is returned, and what
// could not be written is lost, but the next Write tries again. They may come
// from any goroutine.
func BoundedLog(path string, max int64) (io.WriteCloser, error) {
	if max < MinLog {
		return nil, fmt.Errorf("log %s: at least %d bytes are needed, not %d", path, MinLog, max)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	return &boundedLog{file: f, head: max / 4, max: max}, nil
}

func (l *boundedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return 0, os.ErrClosed
	}
	for rest := p; len(rest) > 0; {
		if l.size == l.max {
			if err := l.compact(); err != nil {
				return len(p), err
			}
		}
		part := rest[:min(int64(len(rest)), l.max-l.size)]
		n, err := l.file.WriteAt(part, l.size)
		l.size += int64(n)
		if err != nil {
			return len(p), err
		}
		rest = rest[n:]
	}
	return len(p), nil
}

// compact makes room by dropping the older half of what follows the head.
func (l *boundedLog) compact() error {
	begin := l.head + l.mark // of the newest part
	keep := make([]byte, (l.max-begin)/2)
	if _, err := l.file.ReadAt(keep, l.size-int64(len(keep))); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	l.missing += l.size - begin - int64(len(keep))
	mark := fmt.Appendf(nil, "\n[… %d bytes left out …]\n", l.missing)
	if _, err := l.file.WriteAt(append(mark, keep...), l.head); err != nil {
		return err
	}
	l.mark = int64(len(mark))
	l.size = l.head + l.mark + int64(len(keep))
	return l.file.Truncate(l.size)
}

// Close closes the file; what was written stays.
func (l *boundedLog) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	return l.file.Close()
}

// drain copies from r to w until r ends. A w that fails does not stop it: a
// console that nobody empties would make the guest wait for its own output.
func drain(w io.Writer, r io.Reader) {
	buf := make([]byte, 16<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 && w != nil {
			w.Write(buf[:n])
		}
		if err != nil {
			return
		}
	}
}

// tail keeps the newest bytes written to it, at least keep and at most twice
// that many.
type tail struct {
	mu   sync.Mutex
	keep int
	buf  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(p)
	switch {
	case n >= t.keep: // what came before does not join on to the rest of p
		t.buf, p = t.buf[:0], p[n-t.keep:]
	case len(t.buf)+n > 2*t.keep:
		t.buf = append(t.buf[:0], t.buf[len(t.buf)-min(len(t.buf), t.keep):]...)
	}
	t.buf = append(t.buf, p...)
	return n, nil
}

func (t *tail) bytes() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]byte(nil), t.buf...)
}
