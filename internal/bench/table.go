package bench

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// barWidth is how many columns the longer of a pair of drawn bars has.
const barWidth = 32

// WriteTable writes the report for people: the machine, and per benchmark
// two bars drawn to the same scale, the percentiles, the phases and how each
// promise was kept. Lines stay under 80 columns unless a phase name is long.
func (r Report) WriteTable(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", r.Machine)
	for _, res := range r.Benchmarks {
		b.WriteByte('\n')
		res.table(&b)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (r Result) table(b *strings.Builder) {
	bench, known := Lookup(r.Name)
	if !known {
		bench = Benchmark{Name: r.Name, Floor: "floor"}
	}
	fmt.Fprintf(b, "%-20s %s; n %d\n", r.Name, bench.Title, r.N)
	top := max(r.P50, r.FloorP50)
	row := func(label string, v float64, rest string) {
		line := fmt.Sprintf("  %-28s %10s  %s", label, quantity(v, r.Unit), padded(drawn(v, top), barWidth))
		b.WriteString(strings.TrimRight(line+rest, " ") + "\n")
	}
	row("Warren", r.P50, "  p99 "+quantity(r.P99, r.Unit))
	if r.FloorP50 > 0 {
		row(bench.Floor, r.FloorP50, "")
	}
	if len(r.Phases) > 0 {
		fmt.Fprintf(b, "  phases      %s\n", phases(r.Phases))
	}
	verdicts := r.Verdicts()
	for _, v := range verdicts {
		fmt.Fprintf(b, "  %s\n", v)
	}
	if len(verdicts) == 0 && r.Ratio > 0 {
		fmt.Fprintf(b, "  ratio %.2f\n", r.Ratio)
	}
}

// drawn is v as a bar, barWidth columns at top, in steps of an eighth.
func drawn(v, top float64) string {
	if top <= 0 || v <= 0 {
		return ""
	}
	eighths := max(1, int(v/top*barWidth*8+0.5))
	bar := strings.Repeat("█", eighths/8)
	if part := eighths % 8; part > 0 {
		bar += string([]rune("▏▎▍▌▋▊▉")[part-1])
	}
	return bar
}

// padded fills s up to width columns; fmt's own padding counts bytes.
func padded(s string, width int) string {
	return s + strings.Repeat(" ", max(0, width-len([]rune(s))))
}

// quantity is v with its unit and about three digits that say something.
func quantity(v float64, u Unit) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f %s", v, u)
	case v >= 10:
		return fmt.Sprintf("%.1f %s", v, u)
	default:
		return fmt.Sprintf("%.2f %s", v, u)
	}
}

// phases lists the parts from the longest to the shortest.
func phases(p map[string]float64) string {
	names := slices.Sorted(maps.Keys(p))
	slices.SortStableFunc(names, func(a, b string) int {
		switch {
		case p[a] > p[b]:
			return -1
		case p[a] < p[b]:
			return 1
		}
		return 0
	})
	var parts []string
	for _, n := range names {
		parts = append(parts, phaseLabel(n)+" "+quantity(p[n], phaseUnit(n)))
	}
	return strings.Join(parts, " · ")
}

// phaseUnit reads a phase's unit from its name.
func phaseUnit(name string) Unit {
	if strings.HasSuffix(name, "_mib") {
		return MiB
	}
	return Milliseconds
}

// phaseLabel is a phase's name as people read it.
func phaseLabel(name string) string {
	return strings.ReplaceAll(strings.TrimSuffix(name, "_mib"), "_", " ")
}
