package machine_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/guestimage"
	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/vm"
)

// patience is how long anything may take on a machine that is busy with
// other tests.
const patience = 3 * time.Minute

// vmm is the supervisor under test, and home the tests' own, which shares the
// built guest image.
var (
	vmm  string
	home store.Home
)

// shared is one machine for the tests that leave it as it was.
var shared struct {
	once sync.Once
	m    *machine.Machine
	err  error
}

func TestMain(m *testing.M) {
	vm.JailMain()
	if os.Args[0] == supervisor.Name {
		if err := supervise(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if what := os.Getenv(clientEnv); what != "" {
		fmt.Println("ended", client(what))
		os.Exit(1)
	}
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "machine-test-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		if err := prepareTests(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		code := m.Run()
		if shared.m != nil {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			if err := shared.m.Close(ctx); err != nil {
				fmt.Fprintf(os.Stderr, "close the shared machine: %v\n", err)
				code = 1
			}
		}
		if left, _ := filepath.Glob(home.VMDir("[^.]*")); len(left) > 0 {
			fmt.Fprintf(os.Stderr, "left in the home: %q\n", left)
			code = 1
		}
		return code
	}())
}

func prepareTests(dir string) error {
	vmm = filepath.Join(dir, "abox-vmm")
	if out, err := exec.Command("go", "build", "-o", vmm, "../../cmd/abox-vmm").CombinedOutput(); err != nil {
		return fmt.Errorf("build abox-vmm: %w\n%s", err, out)
	}
	real, err := store.DefaultHome()
	if err != nil {
		return err
	}
	home = store.Home(filepath.Join(dir, "home"))
	if err := os.Mkdir(home.Dir(), 0o700); err != nil {
		return err
	}
	return os.Symlink(real.Guest(), home.Guest())
}

func options() machine.Options {
	return machine.Options{Home: home.Dir(), VMM: vmm, BootTimeout: patience, Label: "test"}
}

func boot(t *testing.T, o machine.Options) *machine.Machine {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	m, err := machine.Boot(ctx, o)
	if errors.Is(err, guestimage.ErrNotBuilt) {
		t.Fatalf("VM tests need the guest image; scripts/setup builds it: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeMachine(t, m) })
	return m
}

func closeMachine(t *testing.T, m *machine.Machine) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := m.Close(ctx); err != nil {
		t.Errorf("close: %v", err)
	}
	if _, err := os.Stat(m.Dir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder %s is still there (%v)", m.Dir(), err)
	}
}

func sharedMachine(t *testing.T) *machine.Machine {
	t.Helper()
	shared.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		shared.m, shared.err = machine.Boot(ctx, options())
	})
	if shared.err != nil {
		t.Fatalf("VM tests need the guest image, which scripts/setup builds, and a VM that boots: %v", shared.err)
	}
	return shared.m
}

// output runs a program to its end.
func output(t *testing.T, m *machine.Machine, req guestapi.ExecRequest) (status guestapi.ExitStatus, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var out, errs bytes.Buffer
	p, err := m.Exec(ctx, req, &out, &errs)
	if err != nil {
		t.Fatalf("%q: %v", req.Argv, err)
	}
	if status, err = p.Wait(); err != nil {
		t.Fatalf("%q: %v", req.Argv, err)
	}
	return status, out.String(), errs.String()
}

func sh(script string) guestapi.ExecRequest {
	return guestapi.ExecRequest{Argv: []string{"sh", "-c", script}}
}

func TestProgramsGetWhatWasAskedFor(t *testing.T) {
	m := sharedMachine(t)
	tests := []struct {
		name   string
		req    guestapi.ExecRequest
		code   int
		stdout string
	}{
		{"exit code", sh("exit 42"), 42, ""},
		{"signal", sh("kill -KILL $$"), 137, ""},
		{"no input", guestapi.ExecRequest{Argv: []string{"cat"}}, 0, ""},
		{"folder", guestapi.ExecRequest{Argv: []string{"pwd"}, Dir: "/usr/bin"}, 0, "/usr/bin\n"},
		{"environment", guestapi.ExecRequest{Argv: []string{"printenv", "X"}, Env: []string{"X=a=b c"}}, 0, "a=b c\n"},
		{"user", guestapi.ExecRequest{Argv: []string{"sh", "-c", "id -u; id -g; pwd"}, User: "agent"}, 0, "1000\n1000\n/home/agent\n"},
		{"host name", guestapi.ExecRequest{Argv: []string{"uname", "-n"}}, 0, "warren\n"},
		{"exact arguments", guestapi.ExecRequest{Argv: []string{"printf", "%s|", "", " ", "*", "$HOME", "\n"}}, 0, "| |*|$HOME|\n|"},
		{"timeout", guestapi.ExecRequest{Argv: []string{"sleep", "1000"}, TimeoutMS: 500}, 124, ""},
		{"an ordinary user cannot become root", guestapi.ExecRequest{
			Argv: []string{"sh", "-c", "find / -xdev -perm /6000 -type f 2>/dev/null"}, User: "agent"}, 0, ""},
		{"no network card", sh("ls /sys/class/net"), 0, "lo\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			status, out, errs := output(t, m, tt.req)
			// find complains of folders it may not enter
			if out != tt.stdout || status.ExitCode() != tt.code && tt.name != "an ordinary user cannot become root" {
				t.Errorf("code %d, stdout %q, stderr %q; want %d, %q", status.ExitCode(), out, errs, tt.code, tt.stdout)
			}
		})
	}
}

func TestTheRootDiskCannotBeChangedAndTheGuestDoesNotNotice(t *testing.T) {
	m := sharedMachine(t)
	status, out, errs := output(t, m, sh("echo new > /etc/motd && rm /usr/bin/wc && cat /etc/motd && ! dd if=/dev/zero of=/dev/vda bs=512 count=1 conv=fsync 2>/dev/null"))
	if status.ExitCode() != 0 || out != "new\n" {
		t.Errorf("code %d, stdout %q, stderr %q", status.ExitCode(), out, errs)
	}
}

func TestSixtyFourProgramsAtOnceKeepTheirBytesApart(t *testing.T) {
	m := sharedMachine(t)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			in := bytes.Repeat([]byte{byte(i)}, 100_000+i)
			var out bytes.Buffer
			p, err := m.Exec(ctx, guestapi.ExecRequest{Argv: []string{"cat"}, Stdin: true}, &out, nil)
			if err != nil {
				t.Errorf("program %d: %v", i, err)
				return
			}
			go func() {
				p.Stdin().Write(in)
				p.Stdin().Close()
			}()
			if status, err := p.Wait(); err != nil || status.ExitCode() != 0 || !bytes.Equal(out.Bytes(), in) {
				t.Errorf("program %d: %v, code %d, %d bytes of %d", i, err, status.ExitCode(), out.Len(), len(in))
			}
		})
	}
	wg.Wait()
}

// figures are what must not grow on either side.
func figures(t *testing.T, m *machine.Machine) (guest guestapi.FiguresInfo, fds, goroutines int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	guest, err := m.Figures(ctx)
	if err != nil {
		t.Fatal(err)
	}
	status, err := m.Status(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return guest, status.FDs, status.Goroutines
}

func TestTwoThousandProgramsInARowLeaveNothing(t *testing.T) {
	m := sharedMachine(t)
	for range 300 { // pools and caches fill
		output(t, m, sh("echo warm"))
	}
	before, fds, goroutines := figures(t, m)
	for i := range 2000 {
		status, out, errs := output(t, m, guestapi.ExecRequest{Argv: []string{"echo", fmt.Sprint(i)}})
		if status.ExitCode() != 0 || out != fmt.Sprintln(i) || errs != "" {
			t.Fatalf("program %d: code %d, stdout %q, stderr %q", i, status.ExitCode(), out, errs)
		}
	}
	// What ends does so a moment after its program's end was told.
	var after guestapi.FiguresInfo
	var fds2, goroutines2 int
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		after, fds2, goroutines2 = figures(t, m)
		if after.Execs == 0 && after.AgentFDs <= before.AgentFDs && after.AgentGoroutines <= before.AgentGoroutines+2 &&
			after.Processes <= before.Processes && fds2 <= fds+1 && goroutines2 <= goroutines+2 {
			break
		}
	}
	if after.Execs != 0 || after.AgentFDs > before.AgentFDs || after.AgentGoroutines > before.AgentGoroutines+2 || after.Processes > before.Processes {
		t.Errorf("the guest had %+v, has %+v", before, after)
	}
	if fds2 > fds+1 || goroutines2 > goroutines+2 {
		t.Errorf("the supervisor had %d files and %d goroutines, has %d and %d", fds, goroutines, fds2, goroutines2)
	}
	t.Logf("the agent's heap: %d bytes before, %d after; with all else: %d, %d", before.AgentHeap, after.AgentHeap, before.AgentMemory, after.AgentMemory)
	if grown := after.AgentHeap - before.AgentHeap; before.AgentHeap <= 0 || grown > 1<<20 { // 500 bytes for each program
		t.Errorf("the agent holds %d bytes more", grown)
	}
	if grown := after.AgentMemory - before.AgentMemory; grown > 4<<20 {
		t.Errorf("the agent grew by %d bytes", grown)
	}
}

func TestTwoMachinesAreNotTwins(t *testing.T) {
	small := options()
	small.MemMB, small.CPUs, small.Hostname = 256, 1, "other"
	other := boot(t, small)
	m := sharedMachine(t)
	look := sh("cat /etc/machine-id /run/warren/generation; head -c 16 /dev/urandom | od -An -tx1; uname -n")
	_, first, _ := output(t, m, look)
	_, second, _ := output(t, other, look)
	a, b := strings.Split(first, "\n"), strings.Split(second, "\n")
	if len(a) < 4 || len(a) != len(b) {
		t.Fatalf("got %q and %q", first, second)
	}
	for i := range 4 {
		if a[i] == b[i] {
			t.Errorf("both say %q", a[i])
		}
	}
	status, out, _ := output(t, other, sh("nproc; awk '/MemTotal/ { print ($2 > 180000 && $2 <= 262144) }' /proc/meminfo"))
	if status.ExitCode() != 0 || out != "1\n1\n" {
		t.Errorf("asked for 1 CPU and 256 MiB, the guest says %q", out)
	}
}

func TestTheClockIsTheHosts(t *testing.T) {
	m := sharedMachine(t)
	before := time.Now().Add(-2 * time.Second)
	_, out, _ := output(t, m, guestapi.ExecRequest{Argv: []string{"date", "+%s"}})
	var unix int64
	if _, err := fmt.Sscan(out, &unix); err != nil {
		t.Fatalf("date says %q", out)
	}
	if got := time.Unix(unix, 0); got.Before(before) || got.After(time.Now().Add(2*time.Second)) {
		t.Errorf("the guest's clock shows %v, ours %v", got, time.Now())
	}
}

func TestAMachineThatIsGoneSaysWhy(t *testing.T) {
	m := boot(t, options())
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	p, err := m.Exec(ctx, guestapi.ExecRequest{Argv: []string{"sleep", "1000"}}, io.Discard, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wait(); err == nil {
		t.Log("the program had ended before the machine did") // the guest ends its programs first
	}
	if _, err := m.Exec(ctx, sh("true"), nil, nil); err == nil || !strings.Contains(err.Error(), "stopped") {
		t.Errorf("err %v, want one that says that it was stopped", err)
	}
}

func TestABootThatFailsLeavesNothing(t *testing.T) {
	sharedMachine(t) // so that the image is there
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	tests := []struct {
		name   string
		ctx    context.Context
		change func(*machine.Options)
		want   string
	}{
		{"given up before", cancelled, func(*machine.Options) {}, "context canceled"},
		{"no supervisor", context.Background(), func(o *machine.Options) { o.VMM = "/nowhere/abox-vmm" }, "abox-vmm not found"},
		{"no guest image", context.Background(), func(o *machine.Options) { o.Home = t.TempDir() }, "kosa8 image build"},
		{"no QEMU", context.Background(), func(o *machine.Options) { o.QEMU = "/nowhere/qemu" }, "QEMU not found"},
		{"not enough time", context.Background(), func(o *machine.Options) { o.BootTimeout = time.Second }, "within 1s"},
		{"a supervisor that is something else", context.Background(), func(o *machine.Options) { o.VMM = "/bin/false" }, "supervisor died"},
	}
	before, _ := filepath.Glob(home.VMDir("[^.]*"))
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			o := options()
			tt.change(&o)
			m, err := machine.Boot(tt.ctx, o)
			if err == nil {
				m.Close(context.Background())
				t.Fatal("it booted")
			}
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("err %q, want one about %q", err, tt.want)
			}
		})
	}
	if after, _ := filepath.Glob(home.VMDir("[^.]*")); len(after) != len(before) {
		t.Errorf("folders before %q, after %q", before, after)
	}
}

func TestPhasesAddUpToTheBoot(t *testing.T) {
	m := sharedMachine(t)
	var names []string
	for _, p := range m.Phases() {
		names = append(names, p.Name)
		if p.Took < 0 {
			t.Errorf("phase %s took %v", p.Name, p.Took)
		}
	}
	if got := strings.Join(names, " "); got != "find spawn qemu boot link prepare" {
		t.Errorf("phases %q", got)
	}
}
