package accel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

type fakeProbe struct {
	openErr    error
	m          measurement
	measureErr error
	// hang: measure ignores its context.
	hang     chan struct{}
	measured *int
}

func (p fakeProbe) open() error { return p.openErr }

func (p fakeProbe) measure(context.Context) (measurement, error) {
	if p.measured != nil {
		*p.measured++
	}
	if p.hang != nil {
		<-p.hang
	}
	return p.m, p.measureErr
}

var (
	fast = measurement{Steps: loopSteps, Took: 9 * time.Millisecond, Finished: true}
	slow = measurement{Steps: 400_000, Took: time.Second}
	boot = host{BootID: "b1", Modules: "kvm kvm_intel"}
)

func TestOnlyHardwareSpeedChoosesKVM(t *testing.T) {
	for _, c := range []struct {
		name     string
		probe    fakeProbe
		accel    Accel
		verdict  Verdict
		evidence string
		remedy   string
	}{
		{"fast", fakeProbe{m: fast}, KVM, Good, "counted to 20.0 million in 9ms (2.2 billion per second)", ""},
		{"emulated", fakeProbe{m: slow}, TCG, Useless, "counted to 400 thousand in 1s (400 thousand per second)", "nested"},
		{"no device", fakeProbe{openErr: &fs.PathError{Op: "open", Path: "/dev/kvm", Err: syscall.ENOENT}}, TCG, NoDevice, "/dev/kvm: no such file or directory", "load kvm_intel"},
		{"device without driver", fakeProbe{openErr: &fs.PathError{Op: "open", Path: "/dev/kvm", Err: syscall.ENODEV}}, TCG, NoDevice, "/dev/kvm: no such device", "load kvm_intel"},
		{"no permission", fakeProbe{openErr: &fs.PathError{Op: "open", Path: "/dev/kvm", Err: syscall.EACCES}}, TCG, NoPermission, "/dev/kvm: permission denied", "usermod -aG kvm"},
		{"refuses", fakeProbe{measureErr: fmt.Errorf("create vm: %w", syscall.EBUSY)}, TCG, Useless, "does not run: create vm: device or resource busy", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := chooser{probe: c.probe, cache: cache{t.TempDir()}, host: boot}.choose(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if got.Accel != c.accel || got.Verdict != c.verdict || got.Remembered {
				t.Errorf("got %+v", got)
			}
			if !strings.Contains(got.Evidence, c.evidence) || !strings.Contains(got.Remedy, c.remedy) {
				t.Errorf("evidence %q, remedy %q", got.Evidence, got.Remedy)
			}
		})
	}
}

func TestAMeasurementIsRememberedForOneBootOfTheHost(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache")
	n := 0
	c := chooser{probe: fakeProbe{m: slow, measured: &n}, cache: cache{dir}, host: boot}
	first, _ := c.choose(t.Context())
	second, _ := c.choose(t.Context())
	if n != 1 || !second.Remembered || second.Accel != first.Accel || second.Evidence != first.Evidence {
		t.Fatalf("measured %d times, %+v then %+v", n, first, second)
	}
	info, err := os.Stat(filepath.Join(dir, cacheFile))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("cache file: %v, %v", info, err)
	}
	for _, h := range []host{{BootID: "b2", Modules: boot.Modules}, {BootID: "b1", Modules: "kvm kvm_pvm"}} {
		c.host = h
		before := n
		if got, _ := c.choose(t.Context()); n != before+1 || got.Remembered {
			t.Errorf("on %+v it was not measured again", h)
		}
	}
	// Who lost the right to the device does not get it from memory.
	c.probe = fakeProbe{openErr: syscall.EACCES}
	if got, _ := c.choose(t.Context()); got.Verdict != NoPermission {
		t.Errorf("got %+v", got)
	}
}

func TestAFaultIsNotRemembered(t *testing.T) {
	dir := t.TempDir()
	n := 0
	c := chooser{probe: fakeProbe{measureErr: syscall.EBUSY, measured: &n}, cache: cache{dir}, host: boot}
	c.choose(t.Context())
	c.choose(t.Context())
	if n != 2 {
		t.Errorf("measured %d times", n)
	}
}

func TestADamagedMemoryMeansMeasuringAgain(t *testing.T) {
	good := `{"host":{"boot_id":"b1","modules":"kvm kvm_intel"},"measurement":{"steps":20000000,"took_ns":9000000,"finished":true}}`
	for name, text := range map[string]string{
		"empty":          "",
		"not JSON":       "kvm",
		"unknown field":  strings.Replace(good, `"host"`, `"x":1,"host"`, 1),
		"trailing data":  good + "{}",
		"too long":       good + strings.Repeat(" ", maxCacheFile),
		"absurd figures": strings.Replace(good, "20000000", "-5", 1),
		"no time":        strings.Replace(good, "9000000", "0", 1),
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, cacheFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		n := 0
		got, err := chooser{probe: fakeProbe{m: fast, measured: &n}, cache: cache{dir}, host: boot}.choose(t.Context())
		if err != nil || n != 1 || got.Accel != KVM {
			t.Errorf("%s: measured %d times, %+v, %v", name, n, got, err)
		}
	}
	dir := t.TempDir()
	os.WriteFile(filepath.Join(dir, cacheFile), []byte(good+"\n"), 0o600)
	n := 0
	chooser{probe: fakeProbe{m: fast, measured: &n}, cache: cache{dir}, host: boot}.choose(t.Context())
	if n != 0 {
		t.Error("an undamaged memory was not used: the cases above prove nothing")
	}
}

func TestAMemoryThatCannotBeWrittenIsNoError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	os.WriteFile(file, nil, 0o600)
	got, err := chooser{probe: fakeProbe{m: fast}, cache: cache{filepath.Join(file, "sub")}, host: boot}.choose(t.Context())
	if err != nil || got.Accel != KVM {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestAKVMThatHangsIsUselessInUnderTwoSeconds(t *testing.T) {
	hang := make(chan struct{})
	defer close(hang)
	begin := time.Now()
	got, err := chooser{probe: fakeProbe{hang: hang}, cache: cache{t.TempDir()}, host: boot}.choose(t.Context())
	if err != nil || got.Verdict != Useless {
		t.Errorf("%+v, %v", got, err)
	}
	// The bound itself is a constant below two seconds; the check here is
	// generous because the machine may be busy.
	if took := time.Since(begin); giveUp >= 2*time.Second || took > 10*time.Second {
		t.Errorf("took %v", took)
	}
}

func TestChoosingEndsWithItsContext(t *testing.T) {
	hang := make(chan struct{})
	defer close(hang)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err := chooser{probe: fakeProbe{hang: hang}, cache: cache{t.TempDir()}, host: boot}.choose(ctx)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestParseKnowsThreeWords(t *testing.T) {
	for in, want := range map[string]Accel{"kvm": KVM, "tcg": TCG, "auto": "", "": ""} {
		if got, err := Parse(in); err != nil || got != want {
			t.Errorf("%q: %q, %v", in, got, err)
		}
	}
	if _, err := Parse("xen"); err == nil || err.Error() != `accelerator "xen": there are kvm, tcg and auto` {
		t.Errorf("got %v", err)
	}
}

// TestThisMachineGetsAnAnswer runs the real probe: on real KVM the loop, and
// on any machine a decision with evidence.
func TestThisMachineGetsAnAnswer(t *testing.T) {
	got, err := Choose(t.Context(), t.TempDir())
	if err != nil || got.Evidence == "" {
		t.Fatalf("%+v, %v", got, err)
	}
	if (got.Accel == KVM) != (got.Verdict == Good) {
		t.Errorf("verdict and accelerator disagree: %+v", got)
	}
	t.Logf("%+v", got)
}
