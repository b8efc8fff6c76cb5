package bench

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// Unit is what a benchmark's figures are counted in.
type Unit string

// The units. Times are milliseconds and sizes MiB throughout; of a
// throughput more is better, of everything else less.
const (
	Milliseconds Unit = "ms"
	MiB          Unit = "MiB"
	MiBPerSecond Unit = "MiB/s"
)

// moreIsBetter says which end of the samples is the good one.
func (u Unit) moreIsBetter() bool { return u == MiBPerSecond }

// Benchmark is one entry of the registry.
type Benchmark struct {
	// Name is how users and the JSON call it.
	Name string
	// Title says in a few words what is measured.
	Title string
	// Floor says in a few words what it is compared with.
	Floor string
	Unit  Unit
	// N is how many samples are taken when the user does not say.
	N int
	// Batch is how many samples are taken of one side before it is the
	// other's turn; 0 is 1.
	Batch int
	// Bars are the promises the project makes about it.
	Bars []Bar

	// open prepares both sides. What it returns is closed by Run, also when
	// measuring fails or ctx ends.
	open func(ctx context.Context, b *bed) (pair, error)
}

// pair is a benchmark ready to be measured: the subject and its floor.
type pair interface {
	// subject and floor take count samples each, in the benchmark's unit.
	subject(ctx context.Context, count int) ([]sample, error)
	floor(ctx context.Context, count int) ([]float64, error)
	// close ends every process the pair started. It needs no context and
	// comes back within seconds.
	close() error
}

// sample is one measurement of the subject and the parts it was made of.
type sample struct {
	value  float64
	phases map[string]float64
}

// registry holds every benchmark in the order they are run and shown.
func registry() []Benchmark {
	return []Benchmark{
		boot(), execute(), create(), restore(), rewind(), fork(10, 10, 1.6), fork(100, 2, 1.5),
		snapshotPause(), snapshotNoChange(),
		memory("memory-idle", "memory of an idle copy", 0), memory("memory-touched-64mib", "the same, 64 MiB touched", 64),
		diskPerSnapshot(), chain1(), chain50(), stdio(),
	}
}

// All returns every benchmark there is, in the order they run.
func All() []Benchmark { return registry() }

// Lookup finds a benchmark by its name.
func Lookup(name string) (Benchmark, bool) {
	all := registry()
	i := slices.IndexFunc(all, func(b Benchmark) bool { return b.Name == name })
	if i < 0 {
		return Benchmark{}, false
	}
	return all[i], true
}

// Names returns the names of all benchmarks, in the order they run.
func Names() []string {
	var names []string
	for _, b := range registry() {
		names = append(names, b.Name)
	}
	return names
}

// MaxN is the most samples one benchmark takes.
const MaxN = 100_000

// UnknownError says that no benchmark has a name that was asked for.
type UnknownError struct{ Name string }

func (e *UnknownError) Error() string {
	return fmt.Sprintf("no benchmark %q; there are %s", e.Name, strings.Join(Names(), ", "))
}

// choose returns the benchmarks of the given names in the registry's order,
// each once, or all of them when no name is given.
func choose(names []string) ([]Benchmark, error) {
	if len(names) == 0 {
		return registry(), nil
	}
	for _, n := range names {
		if _, ok := Lookup(n); !ok {
			return nil, &UnknownError{n}
		}
	}
	var chosen []Benchmark
	for _, b := range registry() {
		if slices.Contains(names, b.Name) {
			chosen = append(chosen, b)
		}
	}
	return chosen, nil
}
