package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPercentileIsASampleByNearestRank(t *testing.T) {
	upTo := func(n int) []float64 {
		v := make([]float64, n)
		for i := range v {
			v[i] = float64(n - i) // worst order for a function that forgets to sort
		}
		return v
	}
	for _, tt := range []struct {
		name   string
		values []float64
		p      float64
		more   bool
		want   float64
	}{
		{"nothing measured", nil, 50, false, 0},
		{"one sample is every percentile", []float64{7}, 99, false, 7},
		{"median of two is the first", []float64{2, 1}, 50, false, 1},
		{"median of three", []float64{9, 1, 5}, 50, false, 5},
		{"p99 of 100 is the 99th", upTo(100), 99, false, 99},
		{"p99 of 20 is the last", upTo(20), 99, false, 20},
		{"p50 of 20 is the 10th", upTo(20), 50, false, 10},
		{"p99 of 200 is the 198th", upTo(200), 99, false, 198},
		{"p99 of a throughput is a low one", upTo(100), 99, true, 2},
		{"median of a throughput counts from above", upTo(4), 50, true, 3},
		{"p100 is the worst", upTo(5), 100, true, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := slices.Clone(tt.values)
			if got := percentile(tt.values, tt.p, tt.more); got != tt.want {
				t.Errorf("got %v, want %v", got, tt.want)
			}
			if !slices.Equal(before, tt.values) {
				t.Error("the samples were put in another order")
			}
		})
	}
}

// fakePair counts turns and measures nothing.
type fakePair struct {
	turns    []string
	failAt   string
	subjects float64
	closed   bool
}

var errFake = errors.New("fake trouble")

func (f *fakePair) subject(_ context.Context, count int) ([]sample, error) {
	f.turns = append(f.turns, fmt.Sprintf("A%d", count))
	if f.failAt == "A" {
		return nil, errFake
	}
	out := make([]sample, count)
	for i := range out {
		f.subjects++
		out[i] = sample{f.subjects, map[string]float64{"half": f.subjects / 2, "memory_peak_mib": 10 - f.subjects}}
	}
	return out, nil
}

func (f *fakePair) floor(_ context.Context, count int) ([]float64, error) {
	f.turns = append(f.turns, fmt.Sprintf("B%d", count))
	if f.failAt == "B" {
		return nil, errFake
	}
	return slices.Repeat([]float64{2}, count), nil
}

func (f *fakePair) close() error { f.closed = true; return nil }

func fakeBenchmark(f *fakePair, batch int) Benchmark {
	return Benchmark{
		Name: "fake", Unit: Milliseconds, Batch: batch,
		open: func(context.Context, *bed) (pair, error) { return f, nil },
	}
}

func TestSubjectAndFloorTakeTurnsAndTheFirstIsNotCounted(t *testing.T) {
	for _, tt := range []struct {
		name     string
		n, batch int
		turns    string
		steps    []int
	}{
		{"one by one", 3, 0, "A1 B1 A1 B1 A1 B1 A1 B1", []int{0, 1, 2, 3}},
		{"in batches, the last one short", 5, 2, "A1 B1 A2 B2 A2 B2 A1 B1", []int{0, 2, 4, 5}},
		{"a batch larger than the run", 2, 20, "A1 B1 A2 B2", []int{0, 2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := &fakePair{}
			var steps []int
			r, err := fakeBenchmark(f, tt.batch).measureOne(t.Context(), nil, tt.n, func(done int) { steps = append(steps, done) })
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(f.turns, " "); got != tt.turns {
				t.Errorf("turns %s, want %s", got, tt.turns)
			}
			if !slices.Equal(steps, tt.steps) {
				t.Errorf("steps %v, want %v", steps, tt.steps)
			}
			if r.N != tt.n || len(r.Samples) != tt.n || r.Samples[0] != 2 {
				t.Errorf("counted %d, samples %v: the warm-up (1) must not be among them", r.N, r.Samples)
			}
			if !f.closed {
				t.Error("not closed")
			}
		})
	}
}

func TestSummaryTellsMedianRatioAndPhases(t *testing.T) {
	f := &fakePair{}
	got, err := fakeBenchmark(f, 0).measureOne(t.Context(), nil, 4, func(int) {})
	if err != nil {
		t.Fatal(err)
	}
	want := Result{
		Name: "fake", N: 4, Unit: Milliseconds, P50: 3, P99: 5, FloorP50: 2, Ratio: 1.5,
		Phases: map[string]float64{"half": 1.5, "memory_peak_mib": 8}, Samples: []float64{2, 3, 4, 5},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestAFailureNamesBenchmarkAndSideAndStillCloses(t *testing.T) {
	for side, want := range map[string]string{
		"A": "benchmark fake: warm-up: fake trouble",
		"B": "benchmark fake: warm-up: the floor: fake trouble",
	} {
		f := &fakePair{failAt: side}
		_, err := fakeBenchmark(f, 0).measureOne(t.Context(), nil, 1, func(int) {})
		if err == nil || err.Error() != want || !errors.Is(err, errFake) {
			t.Errorf("got %v, want %s", err, want)
		}
		if !f.closed {
			t.Error("not closed")
		}
	}
}

func TestACancelledRunSaysSoInsteadOfBlamingAProcess(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := fakeBenchmark(&fakePair{failAt: "A"}, 0).measureOne(ctx, nil, 1, func(int) {})
	if !errors.Is(err, context.Canceled) || errors.Is(err, errFake) {
		t.Errorf("got %v", err)
	}
}

func TestBenchmarksAreChosenByNameInOrder(t *testing.T) {
	got, err := choose([]string{"stdio", "boot", "stdio"})
	if err != nil || len(got) != 2 || got[0].Name != "boot" || got[1].Name != "stdio" {
		t.Errorf("got %v, %v", got, err)
	}
	if all, err := choose(nil); err != nil || len(all) != len(Names()) {
		t.Errorf("no name: %v, %v", all, err)
	}
	_, err = choose([]string{"boot", "boat"})
	var unknown *UnknownError
	if !errors.As(err, &unknown) || err.Error() != `no benchmark "boat"; there are `+strings.Join(Names(), ", ") {
		t.Errorf("got %v", err)
	}
}
