package cli

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/term"
)

// Progress tells on a stream what is being done right now, for whatever may
// take more than a second. On a terminal it is one line that is drawn over
// and gone at the end; elsewhere it is a plain line per step, or nothing.
//
// All methods may be called from any goroutine, and on a nil *Progress, which
// shows nothing.
type Progress struct {
	w     io.Writer
	fancy bool
	plain bool
	delay time.Duration

	mu    sync.Mutex
	step  string
	since time.Time
	stop  chan struct{} // closed by Done; nil when no line is drawn
	ended chan struct{}
}

// How a Progress behaves where it cannot draw.
const (
	// PlainLines writes each step as a line.
	PlainLines = true
	// Silent writes nothing: the stream belongs to someone else's output.
	Silent = false
)

// NewProgress tells on w. With quiet it tells nothing at all. Where w is no
// terminal, plain decides between PlainLines and Silent.
func NewProgress(w io.Writer, quiet, plain bool) *Progress {
	if quiet {
		return nil
	}
	p := &Progress{w: w, fancy: IsTerminal(w) && os.Getenv("TERM") != "dumb", plain: plain, delay: 700 * time.Millisecond}
	if !p.fancy && !p.plain {
		return nil
	}
	return p
}

// Step says what begins now; it ends what was before.
func (p *Progress) Step(format string, args ...any) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	step := Clean(fmt.Sprintf(format, args...))
	if step == p.step {
		return
	}
	p.step = step
	if !p.fancy {
		fmt.Fprintln(p.w, step)
		return
	}
	if p.stop == nil {
		p.since = time.Now()
		p.stop, p.ended = make(chan struct{}), make(chan struct{})
		go p.spin(p.stop, p.ended)
	}
}

// Done takes the line away. When it returns nothing more is written until
// the next Step.
func (p *Progress) Done() {
	if p == nil {
		return
	}
	p.mu.Lock()
	stop, ended := p.stop, p.ended
	p.stop, p.step = nil, ""
	p.mu.Unlock()
	if stop != nil {
		close(stop)
		<-ended
	}
}

// spin draws the line, first after a moment, so that what is quick shows
// nothing.
func (p *Progress) spin(stop, ended chan struct{}) {
	defer close(ended)
	select {
	case <-stop:
		return
	case <-time.After(p.delay):
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for frame := 0; ; frame++ {
		p.draw(frame)
		select {
		case <-stop:
			io.WriteString(p.w, "\r\x1b[K")
			return
		case <-tick.C:
		}
	}
}

func (p *Progress) draw(frame int) {
	p.mu.Lock()
	step, took := p.step, time.Since(p.since)
	p.mu.Unlock()
	if step == "" {
		return
	}
	line := fmt.Sprintf("%c %s (%.0fs)", []rune("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")[frame%10], step, took.Seconds())
	if f, ok := p.w.(interface{ Fd() uintptr }); ok {
		// A line that wraps cannot be drawn over.
		if columns, _, err := term.GetSize(int(f.Fd())); err == nil && columns > 1 {
			line = clip(line, columns-1)
		}
	}
	io.WriteString(p.w, "\r"+line+"\x1b[K")
}

func clip(s string, columns int) string {
	if r := []rune(s); len(r) > columns {
		return string(r[:columns])
	}
	return s
}
