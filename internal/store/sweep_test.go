package store

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// sleeper starts a process that ends only when it is killed.
func sleeper(t *testing.T) (*exec.Cmd, Process) {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	p, err := FindProcess(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return cmd, p
}

func TestSweepKillsWhatADeadSupervisorLeftAndRemovesItsFiles(t *testing.T) {
	h := newHome(t)
	d := create(t, h, "one")
	qemu, p := sleeper(t)
	if err := d.WriteRecord(Record{ID: "one", QEMU: p}); err != nil {
		t.Fatal(err)
	}
	d.Close()
	swept, err := h.Sweep(t.Context())
	if err != nil || len(swept.Removed) != 1 || len(swept.Killed) != 1 || swept.Killed[0] != p.PID {
		t.Fatalf("%+v, %v", swept, err)
	}
	if err := qemu.Wait(); err == nil {
		t.Error("the process ended well, it was not killed")
	}
	wantVMs(t, h)
}

func TestSweepLeavesAProcessThatOnlyHasTheSamePid(t *testing.T) {
	h := newHome(t)
	d := create(t, h, "one")
	_, p := sleeper(t)
	old := p
	old.Start--
	if err := d.WriteRecord(Record{ID: "one", QEMU: old, Supervisor: Process{PID: p.PID, Start: p.Start, Boot: "another"}}); err != nil {
		t.Fatal(err)
	}
	d.Close()
	swept, err := h.Sweep(t.Context())
	if err != nil || len(swept.Removed) != 1 || len(swept.Killed) != 0 || !p.Alive() {
		t.Fatalf("%+v, %v, alive %v", swept, err, p.Alive())
	}
}

func TestSweepNeverTouchesALiveVM(t *testing.T) {
	h := newHome(t)
	d := create(t, h, "one")
	_, p := sleeper(t)
	if err := d.WriteRecord(Record{ID: "one", QEMU: p}); err != nil {
		t.Fatal(err)
	}
	swept, err := h.Sweep(t.Context())
	if err != nil || len(swept.Removed) != 0 || !p.Alive() {
		t.Fatalf("%+v, %v", swept, err)
	}
	wantVMs(t, h, "one")
}

func TestSweepRemovesHalfMadeAndHalfRemovedFolders(t *testing.T) {
	h := newHome(t)
	if err := h.Make(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{".new-a-1", ".dead-b-2", "no-lock", "bad-record"} {
		if err := os.Mkdir(h.VMDir(name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"bad-record/lock", "bad-record/vm.json", ".dead-b-2/memory"} {
		if err := os.WriteFile(filepath.Join(h.VMsDir(), name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantVMs(t, h)
}

func TestSweepOfNothingIsNoError(t *testing.T) {
	if swept, err := newHome(t).Sweep(t.Context()); err != nil || len(swept.Removed) != 0 {
		t.Errorf("%+v, %v", swept, err)
	}
}

func TestReapRemovesOneVMAlone(t *testing.T) {
	h := newHome(t)
	create(t, h, "one").Close()
	create(t, h, "two").Close()
	live := create(t, h, "three")
	for _, path := range []string{h.VMDir("one"), live.Path, h.VMDir("none")} {
		if _, err := Reap(t.Context(), path); err != nil {
			t.Error(err)
		}
	}
	wantVMs(t, h, "three", "two")
}

// Creators, owners that die or clean up, and sweeps, all at once: no sweep
// fails, no live folder vanishes, nothing is left at the end.
func TestSweepsAndCreationsAtOnceHarmNobody(t *testing.T) {
	h := newHome(t)
	if err := h.Make(); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var sweepers, owners sync.WaitGroup
	for range 4 {
		sweepers.Go(func() {
			for {
				if _, err := h.Sweep(t.Context()); err != nil {
					t.Error(err)
					return
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	for n := range 4 {
		owners.Go(func() {
			for i := range 50 {
				own(t, h, fmt.Sprintf("vm-%d-%d", n, i%3))
			}
		})
	}
	owners.Wait()
	close(stop)
	sweepers.Wait()
	if _, err := h.Sweep(t.Context()); err != nil {
		t.Error(err)
	}
	wantVMs(t, h)
}

// own lives one VM's life: created, used a moment, then removed or dropped.
func own(t *testing.T, h Home, id string) {
	d, err := h.CreateVM(id)
	if err != nil {
		return // the last one of that name is not swept yet
	}
	if err := d.WriteRecord(Record{ID: id}); err != nil {
		t.Error(err)
	}
	time.Sleep(time.Duration(rand.IntN(3)) * time.Millisecond)
	if r, err := ReadRecord(d.Path); err != nil || r.ID != id {
		t.Errorf("a live VM's record: %+v, %v", r, err)
	}
	if rand.IntN(2) == 0 {
		err = d.Remove()
	} else {
		err = d.Close()
	}
	if err != nil {
		t.Error(err)
	}
}
