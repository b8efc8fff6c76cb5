package bench

import (
	"encoding/json"
	"fmt"
	"io"
)

// Report is the outcome of a run. As JSON it is what `kosa8 bench --json`
// prints; the field names are a promise to scripts.
type Report struct {
	Machine    Machine  `json:"machine"`
	Benchmarks []Result `json:"benchmarks"`
}

// Result holds the figures of one benchmark, rounded to three digits after
// the point.
type Result struct {
	Name string `json:"name"`
	// N is how many samples were counted.
	N    int  `json:"n"`
	Unit Unit `json:"unit"`
	// P50 and P99 are nearest-rank percentiles of Samples, counted from the
	// best to the worst: of a throughput, P99 is a low figure.
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	// FloorP50 is the median of the floor in the same run and unit.
	FloorP50 float64 `json:"floor_p50"`
	// Ratio is P50 / FloorP50. Smaller is better, except in MiB/s, where
	// larger is. 0 when there is no floor.
	Ratio float64 `json:"ratio"`
	// Phases holds the median of each part of a sample, in ms, or in MiB when
	// the name ends in _mib. Of a peak it is the largest.
	Phases map[string]float64 `json:"phases"`
	// Samples are the subject's, in the order they were taken.
	Samples []float64 `json:"samples"`
}

// WriteJSON writes the report as one indented JSON document and a newline.
func (r Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(r)
}

// Bar is a promise about one figure of a Result. Exactly one of AtMost and
// AtLeast is set.
type Bar struct {
	// Of is "ratio", "p50", "p99" or the name of a phase.
	Of      string
	AtMost  float64
	AtLeast float64
}

// Verdict is how a Bar was kept.
type Verdict struct {
	Bar
	Value float64
	// Measured is false when the result lacks the figure; then Met is too.
	Measured, Met bool
}

// String says the bar and how it was kept: "ratio 1.21, bar ≤ 1.3: met".
func (v Verdict) String() string {
	sign, limit := "≤", v.AtMost
	if v.AtLeast > 0 {
		sign, limit = "≥", v.AtLeast
	}
	what := phaseLabel(v.Of)
	if !v.Measured {
		return fmt.Sprintf("%s not measured, bar %s %g: missed", what, sign, limit)
	}
	word := "missed"
	if v.Met {
		word = "met"
	}
	return fmt.Sprintf("%s %.2f, bar %s %g: %s", what, v.Value, sign, limit, word)
}

// Verdicts holds the result against the bars of its benchmark.
func (r Result) Verdicts() []Verdict {
	b, _ := Lookup(r.Name)
	return r.against(b.Bars)
}

// Missed returns the bars of all results that were not met.
func (r Report) Missed() []Verdict {
	var missed []Verdict
	for _, res := range r.Benchmarks {
		for _, v := range res.Verdicts() {
			if !v.Met {
				missed = append(missed, v)
			}
		}
	}
	return missed
}

func (r Result) against(bars []Bar) []Verdict {
	var out []Verdict
	for _, bar := range bars {
		v := Verdict{Bar: bar}
		v.Value, v.Measured = r.figure(bar.Of)
		v.Met = v.Measured && (bar.AtMost == 0 || v.Value <= bar.AtMost) && v.Value >= bar.AtLeast
		out = append(out, v)
	}
	return out
}

func (r Result) figure(of string) (float64, bool) {
	switch of {
	case "ratio":
		return r.Ratio, r.Ratio > 0
	case "p50":
		return r.P50, r.N > 0
	case "p99":
		return r.P99, r.N > 0
	}
	v, ok := r.Phases[of]
	return v, ok
}
