package bench

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
)

// measured is what one benchmark's run gave, before it is summed up.
type measured struct {
	subject []sample
	floor   []float64
}

// alternate measures both sides of p by turns until each has n samples. One
// turn of each goes before and is not counted. step is called before the
// first counted sample and after each turn of both.
func alternate(ctx context.Context, p pair, n, batch int, step func(done int)) (measured, error) {
	var m measured
	batch = max(1, min(batch, n))
	if _, _, err := turn(ctx, p, 1); err != nil {
		return m, fmt.Errorf("warm-up: %w", err)
	}
	step(0)
	for done := 0; done < n; {
		count := min(batch, n-done)
		s, f, err := turn(ctx, p, count)
		if err != nil {
			return m, err
		}
		m.subject = append(m.subject, s...)
		m.floor = append(m.floor, f...)
		done += count
		step(done)
	}
	return m, nil
}

// turn takes count samples of the subject, then as many of the floor.
func turn(ctx context.Context, p pair, count int) ([]sample, []float64, error) {
	s, err := p.subject(ctx, count)
	if err != nil {
		return nil, nil, reason(ctx, err)
	}
	f, err := p.floor(ctx, count)
	if err != nil {
		return nil, nil, fmt.Errorf("the floor: %w", reason(ctx, err))
	}
	if len(s) != count || len(f) != count {
		return nil, nil, fmt.Errorf("%d and %d samples instead of %d", len(s), len(f), count)
	}
	return s, f, nil
}

// reason prefers the end of ctx as the explanation of err: what a killed
// process says about its death is no news to the one who had it killed.
func reason(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// percentile returns the nearest-rank percentile p (0 < p ≤ 100) of values,
// counted from the best value to the worst; 0 when there are none.
func percentile(values []float64, p float64, moreIsBetter bool) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Clone(values)
	slices.Sort(sorted)
	if moreIsBetter {
		slices.Reverse(sorted)
	}
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// summarize turns what was measured into a Result. A phase is the median of
// the samples that have it, a peak the largest.
func summarize(b Benchmark, m measured) Result {
	more := b.Unit.moreIsBetter()
	r := Result{Name: b.Name, N: len(m.subject), Unit: b.Unit, Phases: map[string]float64{}}
	phases := map[string][]float64{}
	values := make([]float64, 0, len(m.subject))
	r.Samples = make([]float64, 0, len(m.subject))
	for _, s := range m.subject {
		values = append(values, s.value)
		r.Samples = append(r.Samples, round(s.value))
		for name, v := range s.phases {
			phases[name] = append(phases[name], v)
		}
	}
	for name, v := range phases {
		p := 50.0
		if strings.Contains(name, "peak") {
			p = 100
		}
		r.Phases[name] = round(percentile(v, p, false))
	}
	p50, floor := percentile(values, 50, more), percentile(m.floor, 50, more)
	r.P50, r.P99, r.FloorP50 = round(p50), round(percentile(values, 99, more)), round(floor)
	if floor > 0 {
		r.Ratio = round(p50 / floor)
	}
	return r
}

// round keeps three digits after the point: a microsecond, about a KiB.
func round(v float64) float64 { return math.Round(v*1000) / 1000 }
