package bench

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files anew")

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (go test -update writes it anew):\n%s", path, diff)
	}
}

// sampleReport has a met bar, a missed one, a throughput and a benchmark
// that the registry does not know.
func sampleReport() Report {
	return Report{
		Machine: Machine{
			CPU: "Example CPU @ 3.00GHz", Cores: 2, MemoryMiB: 8192, Arch: "amd64", Kernel: "6.1.0-30-amd64",
			QEMU: "7.2.22", Accel: "tcg", GuestCPUs: 2, GuestMemoryMiB: 1024, GuestImage: "3f2a9c51",
			Load: 0.12, Date: "2026-11-30T12:00:00Z",
		},
		Benchmarks: []Result{
			{
				Name: "boot", N: 3, Unit: Milliseconds, P50: 2412.5, P99: 2598.25, FloorP50: 2010.125, Ratio: 1.2,
				Phases:  map[string]float64{"spawn": 12.5, "boot": 1990, "prepare": 150.2},
				Samples: []float64{2412.5, 2598.25, 2300},
			},
			{
				Name: "exec", N: 2, Unit: Milliseconds, P50: 9.5, P99: 12.125, FloorP50: 5.25, Ratio: 1.81,
				Phases: map[string]float64{}, Samples: []float64{9.5, 12.125},
			},
			{
				Name: "stdio", N: 1, Unit: MiBPerSecond, P50: 41.25, P99: 41.25, FloorP50: 62.5, Ratio: 0.66,
				Phases: map[string]float64{"supervisor_peak_mib": 31.5}, Samples: []float64{41.25},
			},
			{Name: "other", N: 1, Unit: MiB, P50: 3, P99: 3, FloorP50: 2, Ratio: 1.5, Samples: []float64{3}},
		},
	}
}

func TestJSONIsTheDocumentScriptsRead(t *testing.T) {
	var b bytes.Buffer
	r := sampleReport()
	r.Benchmarks = r.Benchmarks[:3]
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	golden(t, "report.json", b.Bytes())
}

func TestTableShowsFiguresBarsAndPromises(t *testing.T) {
	var b bytes.Buffer
	if err := sampleReport().WriteTable(&b); err != nil {
		t.Fatal(err)
	}
	golden(t, "report.txt", b.Bytes())
	for line := range strings.Lines(b.String()) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 100 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}

func TestAPromiseIsMissedWhenItsFigureIsMissing(t *testing.T) {
	r := Result{Name: "x", N: 1, P50: 4, P99: 4, Ratio: 1.5, Phases: map[string]float64{"pause": 10}}
	for _, tt := range []struct {
		bar  Bar
		want string
	}{
		{Bar{Of: "ratio", AtMost: 1.5}, "ratio 1.50, bar ≤ 1.5: met"},
		{Bar{Of: "ratio", AtMost: 1.4}, "ratio 1.50, bar ≤ 1.4: missed"},
		{Bar{Of: "ratio", AtLeast: 1.6}, "ratio 1.50, bar ≥ 1.6: missed"},
		{Bar{Of: "pause", AtMost: 15}, "pause 10.00, bar ≤ 15: met"},
		{Bar{Of: "supervisor_peak_mib", AtMost: 64}, "supervisor peak not measured, bar ≤ 64: missed"},
		{Bar{Of: "p99", AtLeast: 4}, "p99 4.00, bar ≥ 4: met"},
	} {
		if got := r.against([]Bar{tt.bar})[0].String(); got != tt.want {
			t.Errorf("got %q, want %q", got, tt.want)
		}
	}
	if missed := sampleReport().Missed(); len(missed) != 1 || missed[0].Of != "ratio" || missed[0].Value != 1.81 {
		t.Errorf("missed %v, want exec's ratio alone", missed)
	}
}

func TestDrawnBarsKeepTheirScale(t *testing.T) {
	for _, tt := range []struct {
		v, top float64
		want   string
	}{
		{0, 0, ""}, {1, 0, ""}, {0, 5, ""},
		{5, 5, strings.Repeat("█", barWidth)},
		{2.5, 5, strings.Repeat("█", barWidth/2)},
		{0.0001, 5, "▏"},
		{5.0 / barWidth * 1.5, 5, "█▌"},
	} {
		if got := drawn(tt.v, tt.top); got != tt.want {
			t.Errorf("drawn(%v, %v) = %q, want %q", tt.v, tt.top, got, tt.want)
		}
	}
}

func TestTheMachineIsDescribedWithoutSayingWhoseItIs(t *testing.T) {
	m := describeHost(sampleTime)
	if m.Cores < 1 || m.MemoryMiB < 1 || m.Kernel == "unknown" || m.Date != "2026-11-30T12:00:00Z" {
		t.Errorf("%+v", m)
	}
	host, err := os.Hostname()
	if err == nil && len(host) > 3 && strings.Contains(m.String(), host) {
		t.Errorf("names the host %q: %s", host, m)
	}
}
