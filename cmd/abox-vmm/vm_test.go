package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/guestimage"
	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/supervisor"
)

// patience is how long anything may take on a machine that is busy with
// other tests.
const patience = 3 * time.Minute

// program is the supervisor under test; TestMain builds it.
var program string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "abox-vmm-test")
	if err == nil {
		program = filepath.Join(dir, supervisor.Name)
		var out []byte
		if out, err = exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
			err = fmt.Errorf("build abox-vmm: %w\n%s", err, out)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// boot starts a VM in a home of the test's own that shares the built guest
// image, and checks in the end that nothing of it is left.
func boot(t *testing.T, change func(*machine.Options)) *machine.Machine {
	t.Helper()
	shared, err := store.DefaultHome()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := guestimage.Open(shared.Dir()); err != nil {
		t.Fatalf("VM tests need the guest image; run scripts/setup, or `kosa8 image build`: %v", err)
	}
	home := store.Home(filepath.Join(t.TempDir(), "home"))
	if err := os.MkdirAll(home.Dir(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(shared.Guest(), home.Guest()); err != nil {
		t.Fatal(err)
	}
	o := machine.Options{Home: home.Dir(), VMM: program, MemMB: 256, BootTimeout: patience}
	if change != nil {
		change(&o)
	}
	m, err := machine.Boot(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	st, err := m.Status(t.Context())
	if err != nil {
		t.Error(err)
	}
	qemu, err := store.FindProcess(st.QEMUPID)
	if err != nil {
		t.Error(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := m.Close(ctx); err != nil {
			t.Error(err)
		}
		if qemu.Alive() {
			t.Error("QEMU is left")
		}
		if left, _ := filepath.Glob(filepath.Join(home.VMsDir(), "[a-z]*")); len(left) != 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	return m
}

func sh(t *testing.T, m *machine.Machine, script string) (string, guestapi.ExitStatus, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var out bytes.Buffer
	status, err := m.Run(ctx, guestapi.ExecRequest{Argv: []string{"sh", "-c", script}}, nil, &out, &out)
	return out.String(), status, err
}

func wantErr(t *testing.T, err error, kind error, text string) {
	t.Helper()
	if !errors.Is(err, kind) || !strings.Contains(err.Error(), text) {
		t.Errorf("error %v, want %v with %q", err, kind, text)
	}
}

// peakMiB is the most memory the VM's supervisor has ever used.
func peakMiB(t *testing.T, m *machine.Machine) int {
	t.Helper()
	st, err := m.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", st.SupervisorPID))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(data), "VmHWM:")
	var kb int
	if _, err := fmt.Sscan(rest, &kb); err != nil {
		t.Fatal(err)
	}
	return kb >> 10
}

// One VM for all that leaves it as it was.
func TestAVM(t *testing.T) {
	m := boot(t, func(o *machine.Options) { o.Hostname = "burrow" })
	for _, promise := range []struct {
		name string
		test func(*testing.T, *machine.Machine)
	}{
		{"runs programs and moves files", runsProgramsAndMovesFiles},
		{"is quick to start a program", isQuickToStartAProgram},
		{"runs sixty-four programs at once", runsSixtyFourProgramsAtOnce},
		{"runs thousands of programs in a row", runsThousandsOfProgramsInARow},
		{"carries bytes both ways unchanged in bounded memory", carriesBytes},
		{"bears a flood on its console", bearsAConsoleFlood},
	} {
		t.Run(promise.name, func(t *testing.T) { promise.test(t, m) })
	}
	if err := m.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	wantErr(t, m.Err(), supervisor.ErrGone, "it was stopped")
}

func runsProgramsAndMovesFiles(t *testing.T, m *machine.Machine) {
	if out, status, err := sh(t, m, "uname -s; hostname; exit 3"); err != nil || status.Code != 3 || out != "Linux\nburrow\n" {
		t.Errorf("%q, %+v, %v", out, status, err)
	}
	// On its own: the order of stdout and stderr is nobody's promise.
	if out, _, err := sh(t, m, "echo oops >&2"); err != nil || out != "oops\n" {
		t.Errorf("stderr: %q, %v", out, err)
	}
	content := strings.Repeat("through the link\n", 50_000)
	if err := m.WriteFile(t.Context(), "/root/f", 0o640, "", strings.NewReader(content)); err != nil {
		t.Fatal(err)
	}
	info, err := m.Stat(t.Context(), guestapi.StatRequest{Path: "/root/f"})
	if err != nil || info.Size != int64(len(content)) || info.Mode != 0o640 {
		t.Errorf("%+v, %v", info, err)
	}
	f, err := m.ReadFile(t.Context(), "/root/f", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if got, err := io.ReadAll(f); err != nil || string(got) != content {
		t.Errorf("%d bytes of %d, %v", len(got), len(content), err)
	}
	var refused *guestapi.Error
	if _, err := m.ReadFile(t.Context(), "/root/none", 0, -1); !errors.As(err, &refused) || refused.Code != guestapi.CodeNotFound {
		t.Errorf("a file that is not there: %v", err)
	}
	st, err := m.Status(t.Context())
	if err != nil || len(st.Phases) != 5 || len(st.Prepare) == 0 || st.Guest.Kernel == "" {
		t.Errorf("%+v, %v", st, err)
	}
	t.Logf("%+v prepare %v", st.Phases, st.Prepare)
}

func runsSixtyFourProgramsAtOnce(t *testing.T, m *machine.Machine) {
	before, err := m.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			want := fmt.Sprintf("%d\n%s\n", i, strings.Repeat("x", 2000))
			if out, _, err := sh(t, m, fmt.Sprintf("echo %d; printf '%%2000s\\n' | tr ' ' x", i)); err != nil || out != want {
				t.Errorf("program %d: %d bytes of %d, %v", i, len(out), len(want), err)
			}
		})
	}
	wg.Wait()
	wantSettled(t, m, before)
}

func runsThousandsOfProgramsInARow(t *testing.T, m *machine.Machine) {
	n := 100
	if os.Getenv("WARREN_SOAK") != "" {
		n = 2000
	}
	var before supervisor.Status
	for i := range n {
		if i == n/4 {
			var err error
			if before, err = m.Status(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		var out bytes.Buffer
		status, err := m.Run(t.Context(), guestapi.ExecRequest{Argv: []string{"echo", fmt.Sprint(i)}}, nil, &out, &out)
		if err != nil || status.Code != 0 || out.String() != fmt.Sprintln(i) {
			t.Fatalf("program %d: %q, %+v, %v", i, out.String(), status, err)
		}
	}
	wantSettled(t, m, before)
}

// wantSettled waits until a VM has no more open than before.
func wantSettled(t *testing.T, m *machine.Machine, before supervisor.Status) {
	t.Helper()
	var st supervisor.Status
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		var err error
		if st, err = m.Status(t.Context()); err != nil {
			t.Fatal(err)
		}
		figures, err := m.Figures(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		// A few connections are kept for the next call.
		if st.Streams == 0 && figures.Execs == 0 && st.Goroutines <= before.Goroutines+16 && st.FDs <= before.FDs+8 {
			return
		}
	}
	t.Errorf("it does not settle: %+v, was %+v", st, before)
}

// A gibibyte in a soak, a sixteenth of it otherwise: the path is the same.
func carriesBytes(t *testing.T, m *machine.Machine) {
	size := int64(64 << 20)
	if os.Getenv("WARREN_SOAK") != "" {
		size = 1 << 30
	}
	sent, got := sha256.New(), sha256.New()
	source := io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{1}), size), sent)
	began := time.Now()
	status, err := m.Run(t.Context(), guestapi.ExecRequest{Argv: []string{"cat"}}, source, got, nil)
	if err != nil || status.Code != 0 {
		t.Fatalf("%+v, %v", status, err)
	}
	t.Logf("%.1f MiB/s", float64(size>>20)/time.Since(began).Seconds())
	if !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
		t.Error("what came back is not what was sent")
	}
	if peak := peakMiB(t, m); peak > 64 {
		t.Errorf("the supervisor used up to %d MiB", peak)
	} else {
		t.Logf("the supervisor used up to %d MiB", peak)
	}
}

// Whatever ends a guest, a program in it ends with the reason, and so does
// every later call.
func TestTheEndOfAGuestIsToldToEveryCall(t *testing.T) {
	for _, row := range []struct {
		name, script string
		kill         bool // QEMU, from outside
		want         string
	}{
		{"panic", "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger", false, "the guest's kernel gave up: Kernel panic - not syncing"},
		{"power off", "echo 1 > /proc/sys/kernel/sysrq; echo o > /proc/sysrq-trigger", false, "the guest switched itself off"},
		{"killed", "", true, "QEMU was killed by signal 9"},
	} {
		t.Run(row.name, func(t *testing.T) {
			m := boot(t, nil)
			e, err := m.Exec(t.Context(), guestapi.ExecRequest{Argv: []string{"sleep", "100000"}}, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			if row.kill {
				st, err := m.Status(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				unix.Kill(st.QEMUPID, unix.SIGKILL)
			} else {
				_, _, err = sh(t, m, row.script+"; sleep 100000")
				wantErr(t, err, supervisor.ErrGone, row.want)
			}
			_, err = e.Wait()
			wantErr(t, err, supervisor.ErrGone, row.want)
			_, err = m.Figures(t.Context())
			wantErr(t, err, supervisor.ErrGone, row.want)
		})
	}
}

func bearsAConsoleFlood(t *testing.T, m *machine.Machine) {
	if _, _, err := sh(t, m, "dd if=/dev/zero bs=64k count=64 2>/dev/null | tr '\\0' x > /dev/ttyS0 & sleep 2; kill %1 2>/dev/null; true"); err != nil {
		t.Error(err)
	}
	info, err := os.Stat(filepath.Join(m.Dir(), store.ConsoleName))
	if err != nil || info.Size() > 1<<20 {
		t.Errorf("console log: %v, %v", info, err)
	}
	if out, _, err := sh(t, m, "echo fine"); err != nil || out != "fine\n" {
		t.Errorf("%q, %v", out, err)
	}
}

func isQuickToStartAProgram(t *testing.T, m *machine.Machine) {
	const n = 40
	floor, err := supervisor.Do(t.Context(), m.Client, guestapi.SpawnTime, guestapi.SpawnTimeRequest{Argv: []string{"true"}, Count: n})
	if err != nil {
		t.Fatal(err)
	}
	var spawn, trip time.Duration
	for _, us := range floor.Microseconds {
		spawn += time.Duration(us) * time.Microsecond
	}
	began := time.Now()
	for range n {
		if _, err := m.Run(t.Context(), guestapi.ExecRequest{Argv: []string{"true"}}, nil, nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	trip = time.Since(began)
	// A bound would measure how busy this machine is; the benchmark runs
	// both in turns and has one.
	t.Logf("in the guest %v, from here %v", spawn/n, trip/n)
}
