package server

import (
	"regexp"
	"strings"
	"sync"

	"github.com/warren-vm/warren/internal/guestapi"
)

// tail keeps the last bytes of the guest's console.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

// Bounds of what an error quotes of the console.
const (
	tailBytes = 16 << 10
	tailLines = 12
	tailWidth = 200
)

func newTail() *tail { return &tail{buf: make([]byte, 0, 2*tailBytes)} }

// Write never fails.
func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(p)
	if len(p) > tailBytes {
		p = p[len(p)-tailBytes:]
	}
	if len(t.buf)+len(p) > cap(t.buf) {
		kept := copy(t.buf, t.buf[len(t.buf)-tailBytes:])
		t.buf = t.buf[:kept]
	}
	t.buf = append(t.buf, p...)
	return n, nil
}

// escapes are the sequences that kernels, boot loaders and programs colour
// and place text with. What is left of others CleanText takes the sting from.
//
// It is compiled when it is needed: few VMs have anything to show.
var escapes = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[ -/]*[0-~])`)
})

// Lines are the last tailLines lines, without escape sequences, clean, none
// longer than tailWidth.
func (t *tail) Lines() []string {
	lines := t.all()
	return lines[max(0, len(lines)-tailLines):]
}

// all are the lines of everything that is kept.
func (t *tail) all() []string {
	t.mu.Lock()
	text := string(t.buf)
	t.mu.Unlock()
	text = escapes().ReplaceAllString(text, "")
	text = guestapi.CleanText(strings.ReplaceAll(text, "\r", "\n"))
	var lines []string
	for line := range strings.SplitSeq(text, "\n") {
		if line = strings.TrimRight(line, " "); line != "" {
			lines = append(lines, shorten(line, tailWidth))
		}
	}
	return lines
}

// Panic is the kernel's line when it panicked, or "". A long trace follows it.
func (t *tail) Panic() string {
	for _, line := range t.all() {
		if at := strings.Index(line, "Kernel panic - not syncing"); at >= 0 {
			return line[at:]
		}
	}
	return ""
}

// shorten cuts clean text to n bytes, between characters.
func shorten(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}

// oneLine makes guest text fit for the inside of a sentence.
func oneLine(s string, n int) string {
	return shorten(strings.ReplaceAll(guestapi.CleanText(s), "\n", " | "), n)
}
