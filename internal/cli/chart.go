package cli

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// Phase is a named stretch of time.
type Phase struct {
	Name string
	Took time.Duration
}

// chartWidth is how many columns the whole of a chart's time takes.
const chartWidth = 48

// WriteChart draws phases that followed one another as bars on one time line,
// with the sum below.
//
//	spawn       12ms  |
//	kernel    1.02s   ████████████
//	total     1.05s
func WriteChart(w io.Writer, phases []Phase) error {
	var total time.Duration
	names := len("total")
	for _, p := range phases {
		total += p.Took
		names = max(names, len(p.Name))
	}
	var b strings.Builder
	var at time.Duration
	for _, p := range phases {
		from, to := column(at, total), column(at+p.Took, total)
		bar := strings.Repeat("█", to-from)
		if bar == "" {
			bar = "▏" // too short for a column, but it was there
		}
		line := fmt.Sprintf("%-*s %8s  %s%s", names, p.Name, Short(p.Took), strings.Repeat(" ", from), bar)
		b.WriteString(line + "\n")
		at += p.Took
	}
	fmt.Fprintf(&b, "%-*s %8s\n", names, "total", Short(total))
	_, err := io.WriteString(w, b.String())
	return err
}

func column(at, total time.Duration) int {
	if total <= 0 {
		return 0
	}
	return int((at*chartWidth + total/2) / total)
}

// Short is d with three digits at most, as people read times: 850µs, 12ms,
// 1.02s, 3m20s.
func Short(d time.Duration) string {
	switch {
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < 10*time.Second:
		return fmt.Sprintf("%.2fs", d.Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%.1fs", d.Seconds())
	default:
		return d.Round(time.Second).String()
	}
}
