package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestimage"
	"github.com/warren-vm/warren/internal/store"
)

// vmOptions measures little, in a home of the test's own that shares the
// guest image, with programs built from this tree. At the end of the test no
// VM and no process may be left.
func vmOptions(t *testing.T) Options {
	t.Helper()
	shared, err := store.DefaultHome()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := guestimage.Open(shared.Dir()); err != nil {
		t.Fatalf("VM tests need the guest image; scripts/setup builds it: %v", err)
	}
	home := store.Home(t.TempDir())
	if err := os.Symlink(shared.Guest(), home.Guest()); err != nil {
		t.Fatal(err)
	}
	kosa8, vmm := programs(t)
	t.Cleanup(func() {
		left, err := home.VMs()
		if err != nil || len(left) > 0 {
			t.Errorf("VMs left: %+v, %v", left, err)
		}
	})
	noChildren(t) // before the one above: clean-ups run backwards
	return Options{
		// One processor, so that two VMs at once do not fight over a small
		// host's two.
		N: 1, StdioMiB: 2, CPUs: 1, MemMB: 512, Home: home.Dir(), Kosa8: kosa8, VMM: vmm,
	}
}

// programs returns the paths of kosa8 and abox-vmm, built once for all tests.
func programs(t *testing.T) (kosa8, vmm string) {
	t.Helper()
	built.Do(func() {
		built.dir, built.err = os.MkdirTemp("", "warren-bench-*")
		if built.err != nil {
			return
		}
		build := exec.Command("go", "build", "-o", built.dir, "../../cmd/kosa8", "../../cmd/abox-vmm")
		if out, err := build.CombinedOutput(); err != nil {
			built.err = fmt.Errorf("%w\n%s", err, out)
		}
	})
	if built.err != nil {
		t.Fatalf("build the programs under test: %v", built.err)
	}
	return filepath.Join(built.dir, "kosa8"), filepath.Join(built.dir, "abox-vmm")
}

// built is removed by TestMain.
var built struct {
	sync.Once
	dir string
	err error
}

// large are benchmarks that differ from others in a number alone, and take minutes.
var large = []string{"fork100", "memory-touched-64mib", "chain-50"}

func TestEveryBenchmarkMeasuresRealVMs(t *testing.T) {
	o := vmOptions(t)
	for _, name := range Names() {
		if os.Getenv("WARREN_SOAK") != "" || !slices.Contains(large, name) {
			o.Names = append(o.Names, name)
		}
	}
	report, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Benchmarks) != len(o.Names) {
		t.Errorf("%d benchmarks, not %v", len(report.Benchmarks), o.Names)
	}
	for _, r := range report.Benchmarks {
		if r.N != o.N || len(r.Samples) != o.N || r.P50 <= 0 || r.P99 <= 0 || r.FloorP50 <= 0 || r.Ratio <= 0 {
			t.Errorf("%s lacks figures: %+v", r.Name, r)
		}
		for _, v := range r.Verdicts() {
			if !v.Measured {
				t.Errorf("%s: %s", r.Name, v)
			}
		}
		if r.Name == "boot" && len(r.Phases) < 4 {
			t.Errorf("boot lacks phases: %v", r.Phases)
		}
	}
	if m := report.Machine; m.QEMU == "unknown" || m.Accel == "" || m.GuestImage == "" {
		t.Errorf("machine %+v", m)
	}
	var doc bytes.Buffer
	if err := report.WriteJSON(&doc); err != nil || !json.Valid(doc.Bytes()) {
		t.Errorf("JSON: %v", err)
	}
	var table bytes.Buffer
	if err := report.WriteTable(&table); err != nil {
		t.Error(err)
	}
	t.Logf("figures of a machine that is busy with tests:\n%s", &table)
}

func TestACancelledBenchmarkLeavesNoVM(t *testing.T) {
	// Between them these two start everything that any benchmark starts:
	// kosa8, supervisors and plain QEMUs, with and without a guest in use.
	for _, name := range []string{"boot", "stdio"} {
		t.Run(name, func(t *testing.T) {
			o := vmOptions(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			o.Names, o.N, o.StdioMiB = []string{name}, MaxN, 64
			// The warm-up is done and all is running; a moment later something
			// is under way.
			o.Progress = func(string, int, int) { time.AfterFunc(100*time.Millisecond, cancel) }
			report, err := Run(ctx, o)
			if !errors.Is(err, context.Canceled) {
				t.Errorf("got %v", err)
			}
			if len(report.Benchmarks) != 0 {
				t.Errorf("a cancelled benchmark is reported: %+v", report.Benchmarks)
			}
		})
	}
}
