package boot

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
)

var anIdentity = guestapi.Identity{
	Hostname: "box-1", MachineID: strings.Repeat("0a", 16), Generation: 1<<64 - 1,
	Entropy: []byte("entropy"), UnixNano: 1_900_000_000_000_000_001,
}

// recorded is a renewal that notes its steps, with the given one failing.
func recorded(f *freezer, fails string) (renewal, *[]string) {
	var steps []string
	step := func(name string) error {
		steps = append(steps, name)
		if name == fails {
			return errors.New("no " + name)
		}
		return nil
	}
	return renewal{
		reseed: func(entropy []byte) error {
			if string(entropy) != "entropy" {
				return errors.New("wrong entropy")
			}
			return step("reseed")
		},
		clock: func(at time.Time) error {
			if at.UnixNano() != anIdentity.UnixNano {
				return errors.New("wrong clock")
			}
			return step("clock")
		},
		identify: func(guestapi.Identity) error { return step("identity") },
		hooks: func(guestapi.Identity) ([]guestapi.HookResult, int) {
			_ = step("hooks")
			return []guestapi.HookResult{{Name: "a", Code: 9}}, 3
		},
		thaw: func() error {
			if err := step("thaw"); err != nil {
				return err
			}
			return f.thaw()
		},
	}, &steps
}

func TestCopyIsItsOwnBeforeAnythingOfItRuns(t *testing.T) {
	dir, f := fakeCgroup(t, "frozen 1\n")
	if _, err := f.freeze(time.Minute); err != nil {
		t.Fatal(err)
	}
	r, steps := recorded(f, "")
	info, err := r.run(anIdentity)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"reseed", "clock", "identity", "hooks", "thaw"}; !slices.Equal(*steps, want) {
		t.Errorf("did %q, want %q", *steps, want)
	}
	if got := slices.Sorted(maps.Keys(info.PhasesUS)); !slices.Equal(got, []string{"clock", "hooks", "identity", "reseed", "thaw"}) {
		t.Errorf("phases %q", got)
	}
	// A hook that failed is told and stops nothing.
	if len(info.Hooks) != 1 || info.Hooks[0].Code != 9 || info.HooksLeft != 3 {
		t.Errorf("%+v", info)
	}
	if read(t, dir+"/cgroup.freeze") != "0" || f.frozen.Load() {
		t.Error("the programs are still frozen")
	}
}

func TestProgramsStayFrozenWhicheverStepFails(t *testing.T) {
	for i, fails := range []string{"reseed", "clock", "identity", "thaw"} {
		t.Run(fails, func(t *testing.T) {
			dir, f := fakeCgroup(t, "frozen 1\n")
			if _, err := f.freeze(time.Minute); err != nil {
				t.Fatal(err)
			}
			r, steps := recorded(f, fails)
			_, err := r.run(anIdentity)
			if err == nil || err.Error() != "renew, "+fails+": no "+fails {
				t.Errorf("error %v", err)
			}
			if fails != "thaw" && (len(*steps) != i+1 || slices.Contains(*steps, "hooks")) {
				t.Errorf("went on after it: %q", *steps)
			}
			if read(t, dir+"/cgroup.freeze") != "1" || !f.frozen.Load() {
				t.Error("the programs run")
			}
		})
	}
}
