package bench

import (
	"strings"
	"time"
)

// parseTimings reads the chart of `kosa8 run --timings`: a line per phase,
// its name, its length, a bar. What is no such line, and the total, is passed
// over.
func parseTimings(lines []string) map[string]float64 {
	phases := map[string]float64{}
	for _, line := range lines {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] == "total" {
			continue
		}
		took, err := time.ParseDuration(fields[1])
		if err != nil {
			continue
		}
		phases[fields[0]] += milliseconds(took)
	}
	return phases
}
