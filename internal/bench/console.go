package bench

import (
	"bytes"
	"io"
	"strings"
	"sync"

	"github.com/warren-vm/warren/internal/guestapi"
)

// initLine is what the agent says on the console as its very first act.
const initLine = "warren: init"

// maxLine bounds a console line that is waited for; a longer one is looked
// at in pieces.
const maxLine = 4 << 10

// awaitLine reads r until a line that ends in want is complete, with or
// without the kernel's time stamp before it. It reads what has arrived and no
// further, so its return marks the arrival. Everything read goes to seen. The
// end of r is io.EOF.
func awaitLine(r io.Reader, want string, seen *tail) error {
	buf := make([]byte, maxLine)
	var line []byte
	for {
		n, err := r.Read(buf)
		_, _ = seen.Write(buf[:n])
		for chunk := buf[:n]; len(chunk) > 0; {
			before, after, ended := bytes.Cut(chunk, []byte{'\n'})
			line = append(line, before...)
			if ended && isLine(line, want) {
				return nil
			}
			if ended || len(line) > maxLine {
				line = line[:0]
			}
			chunk = after
		}
		if err != nil {
			return err
		}
	}
}

// isLine says whether a console line reads want, apart from a time stamp.
func isLine(line []byte, want string) bool {
	s := strings.TrimSpace(string(line))
	if rest, ok := strings.CutPrefix(s, "["); ok {
		if _, after, ok := strings.Cut(rest, "]"); ok {
			s = strings.TrimSpace(after)
		}
	}
	return s == want
}

// tail keeps the last max bytes written to it. It may be used from several
// goroutines.
type tail struct {
	max int
	mu  sync.Mutex
	buf []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if over := len(t.buf) - t.max; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
	}
	return len(p), nil
}

// lines is what was kept, safe to show: a guest's console may hold anything.
func (t *tail) lines() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Split(strings.TrimSpace(guestapi.CleanText(string(t.buf))), "\n")
}

// String is the last lines as one.
func (t *tail) String() string {
	lines := t.lines()
	return strings.Join(lines[max(0, len(lines)-5):], " | ")
}
