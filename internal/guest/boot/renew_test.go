package boot

import (
	"errors"
	"maps"
	"os"
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

func TestGenerationChangesLastAndWithALinkThatWasReplaced(t *testing.T) {
	root := t.TempDir()
	if err := errors.Join(os.Mkdir(root+"/etc", 0o755), os.Mkdir(root+"/run", 0o755)); err != nil {
		t.Fatal(err)
	}
	link := root + "/etc/machine-id"
	if err := os.Symlink(guestapi.MachineIDFile, link); err != nil {
		t.Fatal(err)
	}
	if err := writeIdentity(root, anIdentity); err != nil {
		t.Fatal(err)
	}
	if target, err := os.Readlink(link); err != nil || target != guestapi.MachineIDFile {
		t.Errorf("the link is %q, %v", target, err)
	}
	if got := read(t, root+guestapi.GenerationFile); got != "18446744073709551615\n" {
		t.Errorf("generation %q", got)
	}

	// A program put a file in the link's place.
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(link, []byte("old\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	next := anIdentity
	next.MachineID, next.Generation = strings.Repeat("1b", 16), 2
	if err := writeIdentity(root, next); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{link, root + guestapi.MachineIDFile} {
		if got := read(t, path); got != next.MachineID+"\n" {
			t.Errorf("%s holds %q", path, got)
		}
	}

	// Whatever fails before, the generation is still the old one.
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(link+"/in-the-way", 0o755); err != nil {
		t.Fatal(err)
	}
	third := next
	third.Generation = 3
	if err := writeIdentity(root, third); err == nil {
		t.Error("no error")
	}
	if got := read(t, root+guestapi.GenerationFile); got != "2\n" {
		t.Errorf("generation %q", got)
	}
}
