package bench

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestTimingsAreReadAsKosa8DrawsThem(t *testing.T) {
	// As package cli draws them; internal/bench stands below it.
	chart := `kosa8: a remark
spawn      850µs  ▏
boot       1.02s  ████████████
prepare     12ms              ▏
total      1.05s
`
	want := map[string]float64{"spawn": 0.85, "boot": 1020, "prepare": 12}
	if diff := cmp.Diff(want, parseTimings(strings.Split(chart, "\n"))); diff != "" {
		t.Error(diff)
	}
	if got := milliseconds(1500 * time.Microsecond); got != 1.5 {
		t.Errorf("1.5 ms is %v", got)
	}
}
