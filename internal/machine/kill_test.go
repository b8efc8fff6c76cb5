package machine_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/vm"
	"github.com/warren-vm/warren/internal/vm/ram"
)

// clientEnv makes the test binary a client: home and supervisor.
const clientEnv = "WARREN_MACHINE_TEST_CLIENT"

// client makes, saves, forks and rewinds machines until it is killed, and says
// what it does: "saving ID N" before, "made ID N" after; "vm DIR SUPERVISOR
// QEMU" for each that came to be.
func client(what string) error {
	home, vmm, _ := strings.Cut(what, "\n")
	ctx := context.Background()
	o := machine.Options{Home: home, VMM: vmm, CPUs: 2, MemMB: 256, BootTimeout: patience}
	for n := rand.IntN(1 << 30); ; n++ {
		m, err := machine.Create(ctx, o)
		if err != nil {
			return err
		}
		if err := work(ctx, home, m, n); err != nil {
			fmt.Println("lost", strings.ReplaceAll(err.Error(), "\n", " | "))
		}
		m.Close(ctx)
	}
}

func announce(ctx context.Context, m *machine.Machine) {
	if s, err := m.Status(ctx); err == nil {
		fmt.Println("vm", m.Dir(), s.SupervisorPID, s.QEMUPID)
	}
}

func work(ctx context.Context, home string, m *machine.Machine, n int) error {
	announce(ctx, m)
	for i := rand.IntN(4); ; i++ {
		mark := fmt.Sprintf("%d-%d", n, i)
		script := fmt.Sprintf("echo %s > /dev/shm/mark; echo %s > /root/mark; head -c 2500000 /dev/urandom > /dev/shm/r%d; sync", mark, mark, i%8)
		p, err := m.Exec(ctx, guestapi.ExecRequest{Argv: []string{"sh", "-c", script}}, nil, nil)
		if err == nil {
			_, err = p.Wait()
		}
		if err != nil {
			return err
		}
		id := snapshots.NewID()
		fmt.Println("saving", id, mark)
		if _, err := m.Snapshot(ctx, supervisor.SnapshotRequest{ID: id, Kind: string(snapshots.KindSnapshot)}); err != nil {
			return err
		}
		fmt.Println("made", id, mark)
		switch i % 4 {
		case 1:
			forks, err := m.Fork(ctx, 2, machine.Options{}, machine.ForkHooks{})
			if err != nil {
				return err
			}
			for _, f := range forks.Copies {
				if f.Machine != nil {
					announce(ctx, f.Machine)
					defer f.Machine.Close(ctx)
				}
			}
		case 2:
			if err := flattenAndCollect(ctx, store.Home(home), id); err != nil {
				return err
			}
		case 3:
			next, err := m.Rewind(ctx, id)
			if err != nil {
				return err
			}
			announce(ctx, next)
			defer next.Close(ctx)
			m = next
		}
	}
}

// flattenAndCollect does at once what otherwise is done aside.
func flattenAndCollect(ctx context.Context, home store.Home, id string) error {
	st := snapshots.In(home, snapshots.WithOwner(vm.Own))
	sn, err := st.Open(ctx, id)
	if err != nil {
		return err
	}
	defer sn.Close()
	if _, err := sn.MakeFlat(ctx, ram.Flattener(ctx, int64(sn.Manifest().Machine.MemMB)<<20)); err != nil {
		return err
	}
	_, err = st.Collect(ctx, nil)
	return err
}

// told is what a client said.
type told struct {
	mu      sync.Mutex
	lines   []string
	started chan struct{} // closed with the first snapshot
}

func (c *told) read(out *bufio.Scanner) {
	for out.Scan() {
		c.mu.Lock()
		c.lines = append(c.lines, out.Text())
		c.mu.Unlock()
		if strings.HasPrefix(out.Text(), "made ") {
			select {
			case <-c.started:
			default:
				close(c.started)
			}
		}
	}
}

func (c *told) all(word string) (found [][]string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, line := range c.lines {
		if f := strings.Fields(line); f[0] == word {
			found = append(found, f[1:])
		}
	}
	return found
}

func TestWhatIsKilledLosesNoSnapshotAndLeavesNothing(t *testing.T) {
	rounds := 3 // one for each victim
	if soak {
		rounds = 500
	}
	if _, err := machine.Template(testContext(t), small()); err != nil {
		t.Fatal(err)
	}
	for round := range rounds {
		victim := []string{"client", "supervisor", "QEMU"}[round%3]
		killRound(t, round, victim, soak || round%3 == 2)
		if t.Failed() {
			t.Fatalf("round %d, which killed the %s", round, victim)
		}
	}
}

func killRound(t *testing.T, round int, victim string, thorough bool) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	before := listed(t)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), clientEnv+"="+home.Dir()+"\n"+vmm)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &told{started: make(chan struct{})}
	read := make(chan struct{})
	go func() { defer close(read); c.read(bufio.NewScanner(out)) }()
	defer func() { cmd.Process.Kill(); <-read; cmd.Wait() }()
	select {
	case <-c.started:
	case <-time.After(patience):
		t.Fatalf("the client made no snapshot: %q %s", c.lines, errs.String())
	}
	time.Sleep(time.Duration(rand.IntN(1500)) * time.Millisecond)
	if vms := c.all("vm"); victim != "client" {
		var pid int
		fmt.Sscan(vms[len(vms)-1][map[string]int{"supervisor": 1, "QEMU": 2}[victim]], &pid)
		syscall.Kill(pid, syscall.SIGKILL)
		time.Sleep(time.Duration(rand.IntN(700)) * time.Millisecond)
	}
	cmd.Process.Kill()
	<-read
	cmd.Wait()

	// Supervisors and QEMUs end by themselves, soon.
	for _, f := range c.all("vm") {
		for _, pid := range f[1:] {
			for end := time.Now().Add(30 * time.Second); runs(pid); time.Sleep(20 * time.Millisecond) {
				if time.Now().After(end) {
					t.Errorf("process %s of %s still runs", pid, f[0])
					break
				}
			}
		}
	}
	awaitQuiet(t)
	if _, err := home.Sweep(testContext(t)); err != nil {
		t.Error(err)
	}
	collect(t)
	for _, f := range c.all("vm") {
		if _, err := os.Stat(f[0]); err == nil {
			t.Errorf("%s is left", f[0])
		}
	}
	for _, pattern := range []string{home.VMDir(".[nd]*"), filepath.Join(home.SnapshotsDir(), ".[nd]*"), filepath.Join(home.Cache(), "ram", "*", ".*")} {
		if left, _ := filepath.Glob(pattern); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	}
	made, known := c.all("made"), map[string]bool{}
	now := listed(t)
	for _, f := range made {
		known[f[0]] = true
		if !now[f[0]] {
			t.Errorf("snapshot %s was made and is gone", f[0])
		}
	}
	begun := c.all("saving")
	for id := range now {
		inFlight := false
		for _, f := range begun {
			inFlight = inFlight || f[0] == id
		}
		if !before[id] && !known[id] && !inFlight {
			t.Errorf("snapshot %s was never asked for", id)
		}
	}
	for i := len(made) - 1; i >= 0; i-- {
		if i == len(made)-1 || soak {
			wantMark(t, made[i][0], made[i][1])
		} else if thorough {
			if err := snapshots.In(home).Verify(testContext(t), made[i][0], nil); err != nil {
				t.Error(err)
			}
		}
	}
	for i := len(begun) - 1; i >= 0; i-- { // newest first: the older are needed
		if now[begun[i][0]] {
			if err := snapshots.In(home).Delete(testContext(t), begun[i][0]); err != nil {
				collect(t) // forks need it
				if err := snapshots.In(home).Delete(testContext(t), begun[i][0]); err != nil {
					t.Error(err)
				}
			}
		}
	}
	t.Logf("round %d: killed the %s; %d snapshots made, %d VMs, said %q", round, victim, len(made), len(c.all("vm")), c.all("lost"))
}

// wantMark restores a snapshot and looks whether it is the one that was made.
func wantMark(t *testing.T, id, mark string) {
	t.Helper()
	m, err := machine.Restore(testContext(t), id, options())
	if err != nil {
		t.Errorf("snapshot %s: %v", id, err)
		return
	}
	defer closeMachine(t, m)
	if got := tell(t, m, "cat /dev/shm/mark /root/mark"); got != mark+"\n"+mark {
		t.Errorf("snapshot %s has %q, want %q", id, got, mark)
	}
}

// awaitQuiet waits until no supervisor holds a VM's folder but our own.
func awaitQuiet(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		n := 0
		for _, path := range vmFolders() {
			if path != sharedDir() {
				n++
			}
		}
		if n == 0 {
			return
		}
		home.Sweep(context.Background())
	}
}

func sharedDir() string {
	if shared.m == nil {
		return ""
	}
	return shared.m.Dir()
}

func listed(t *testing.T) map[string]bool {
	t.Helper()
	all, problems, err := snapshots.In(home).List(testContext(t))
	if err != nil || len(problems) > 0 {
		t.Fatalf("list: %v %v", problems, err)
	}
	ids := map[string]bool{}
	for _, m := range all {
		if m.Kind == snapshots.KindSnapshot {
			ids[m.ID] = true
		}
	}
	return ids
}

func runs(pid string) bool {
	data, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(data), ") ")
	return !strings.HasPrefix(rest, "Z")
}
