package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const startAndWait = "WARREN_TEST_START_AND_WAIT"

func TestMain(m *testing.M) {
	JailMain()
	if os.Getenv(startAndWait) != "" {
		beParent()
	}
	os.Exit(m.Run())
}

// patience is how long a test waits for what must happen on a busy machine.
const patience = 40 * time.Second

// paused is the smallest VM: nothing runs in it.
var paused = Spec{CPUs: 1, MemMB: 64, Accel: TCG, Paused: true}

// start starts a VM that is stopped, and found to have left nothing, when the
// test ends.
func start(t *testing.T, s Spec, o Options) *VM {
	t.Helper()
	checkNothingLeft(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	v, err := Start(ctx, s, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stop(t, v) })
	return v
}

func stop(t *testing.T, v *VM) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := v.Stop(ctx); err != nil {
		t.Error(err)
	}
	if alive(v.PID()) {
		t.Errorf("process %d is left", v.PID())
	}
}

// alive tells a running process from none and from one that waits for a
// parent to take note of its end.
func alive(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	state := data[bytes.LastIndexByte(data, ')')+2]
	return state != 'Z' && state != 'X'
}

// checkNothingLeft fails the test when it ends with more goroutines or
// descriptors than it has now.
func checkNothingLeft(t *testing.T) {
	t.Helper()
	goroutines, fds := runtime.NumGoroutine(), openFDs()
	t.Cleanup(func() {
		for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
			g, f := runtime.NumGoroutine(), openFDs()
			if g <= goroutines && f <= fds {
				return
			}
			if time.Now().After(end) {
				buf := make([]byte, 64<<10)
				t.Errorf("left over: %d goroutines (%d before), %d descriptors (%d before)\n%s", g, goroutines, f, fds, buf[:runtime.Stack(buf, true)])
				return
			}
		}
	})
}

func openFDs() int {
	entries, _ := os.ReadDir("/proc/self/fd")
	return len(entries)
}

func waitExit(t *testing.T, v *VM) ExitInfo {
	t.Helper()
	select {
	case <-v.Exited():
	case <-time.After(patience):
		t.Fatal("the VM does not end")
	}
	return v.Exit()
}

func TestAVMStartsAndStops(t *testing.T) {
	v := start(t, paused, Options{})
	if v.QMP().Version().Major < 7 {
		t.Errorf("QEMU %v", v.QMP().Version())
	}
	var status struct{ Status string }
	if err := v.QMP().Do(t.Context(), "query-status", nil, &status); err != nil || status.Status != "prelaunch" {
		t.Errorf("status %q, %v", status.Status, err)
	}
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() { stop(t, v) })
	}
	wg.Wait()
	if info := v.Exit(); info.Reason != HostQuit || info.Code != 0 || info.Signal != 0 {
		t.Errorf("%+v", info)
	}
	if _, err := v.Link().Read(make([]byte, 1)); err == nil {
		t.Error("the link is still open")
	}
	if err := v.QMP().Do(t.Context(), "query-status", nil, nil); err == nil {
		t.Error("the monitor still answers")
	}
}

func TestManyStartAndStopAtOnce(t *testing.T) {
	checkNothingLeft(t)
	var wg sync.WaitGroup
	pids := make([]int, 6)
	for i := range pids {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			v, err := Start(ctx, paused, Options{})
			if err != nil {
				t.Error(err)
				return
			}
			pids[i] = v.PID()
			stop(t, v)
		})
	}
	wg.Wait()
	slices.Sort(pids)
	if len(slices.Compact(pids)) != 6 {
		t.Errorf("processes %v", pids)
	}
}

func TestAQEMUThatIsKilledIsNoticed(t *testing.T) {
	v := start(t, paused, Options{})
	waiting := make(chan error, 1)
	go func() { _, err := v.Link().Read(make([]byte, 1)); waiting <- err }()
	syscall.Kill(v.PID(), syscall.SIGKILL)
	if info := waitExit(t, v); info.Reason != Killed || info.Signal != syscall.SIGKILL {
		t.Errorf("%+v", info)
	}
	if err := <-waiting; err == nil {
		t.Error("the link goes on")
	}
}

func TestATerminatedQEMUIsTold(t *testing.T) {
	v := start(t, paused, Options{})
	syscall.Kill(v.PID(), syscall.SIGTERM)
	if info := waitExit(t, v); info.Reason != HostSignal {
		t.Errorf("%+v", info)
	}
}

func TestAQEMUThatDoesNotListenIsKilled(t *testing.T) {
	v := start(t, paused, Options{})
	syscall.Kill(v.PID(), syscall.SIGSTOP)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := v.Stop(ctx); err != nil {
		t.Error(err)
	}
	if info := waitExit(t, v); info.Reason != HostQuit || info.Signal != syscall.SIGKILL {
		t.Errorf("%+v", info)
	}
}

func TestAQEMUWithoutAMonitorDoesNotLiveOn(t *testing.T) {
	v := start(t, paused, Options{})
	v.QMP().Close()
	if info := waitExit(t, v); info.Reason != MonitorLost {
		t.Errorf("%+v", info)
	}
}

func TestAStartThatFailsSaysWhyAndLeavesNothing(t *testing.T) {
	checkNothingLeft(t)
	notQcow := writeFile(t, "data", bytes.Repeat([]byte("x"), 64<<10))
	s := paused
	s.DataDisk, s.DataBase = notQcow, writeFile(t, "base", make([]byte, 64<<10))
	_, err := Start(t.Context(), s, Options{})
	var failed *StartError
	if !errors.As(err, &failed) || failed.Exit.Reason != QEMUError || failed.Exit.Code != 1 {
		t.Fatalf("got %v", err)
	}
	if !strings.HasPrefix(err.Error(), "start QEMU: QEMU ended with code 1: ") || !strings.Contains(err.Error(), "not in qcow2 format") {
		t.Errorf("got %q", err)
	}
}

func TestAQEMUThatIsNoneIsRefused(t *testing.T) {
	for _, c := range []struct{ name, script, want string }{
		{"ends at once", "exit 0", "QEMU ended with code 0"},
		{"says something else", "echo 'HTTP/1.1 400 Bad Request' >&4; exec sleep 1000", "not a QMP message"},
		{"floods", "while :; do echo noise >&2; done", "no greeting from QEMU: context deadline exceeded: noise"},
	} {
		t.Run(c.name, func(t *testing.T) {
			checkNothingLeft(t)
			// A folder of its own, outside the home, is what a QEMU in /opt has.
			dir := t.TempDir()
			t.Setenv("HOME", filepath.Join(dir, "home"))
			program := filepath.Join(dir, "qemu", "bin", "qemu-system-x86_64")
			if err := os.MkdirAll(filepath.Dir(program), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(program, []byte("#!/bin/sh\n"+c.script+"\n"), 0o755); err != nil {
				t.Fatal(err)
			}
			s := paused
			s.QEMU = program
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			_, err := Start(ctx, s, Options{})
			if err == nil || !strings.Contains(err.Error(), c.want) || len(err.Error()) > 1000 {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestAStartThatIsGivenUpLeavesNothing(t *testing.T) {
	checkNothingLeft(t)
	for _, d := range []time.Duration{0, time.Millisecond, 20 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(t.Context(), d)
		v, err := Start(ctx, paused, Options{})
		if err == nil { // a very fast machine
			stop(t, v)
		} else if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		cancel()
	}
}

func TestTheDataDiskIsAnOverlayOverItsBase(t *testing.T) {
	dir := t.TempDir()
	s := paused
	s.DataBase = writeFile(t, "base.img", nil)
	if err := os.Truncate(s.DataBase, 64<<20); err != nil {
		t.Fatal(err)
	}
	s.DataDisk = filepath.Join(dir, "data.qcow2")
	if out, err := exec.Command("qemu-img", "create", "-q", "-f", "qcow2", s.DataDisk, "64M").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	before, err := os.Stat(s.DataBase)
	if err != nil {
		t.Fatal(err)
	}
	v := start(t, s, Options{})
	var blocks []struct {
		QDev     string
		Inserted struct {
			Drv   string
			Image struct {
				VirtualSize  int64 `json:"virtual-size"`
				BackingImage *struct{ Filename string }
			}
		}
	}
	if err := v.QMP().Do(t.Context(), "query-block", nil, &blocks); err != nil {
		t.Fatal(err)
	}
	if len(blocks) != 1 || blocks[0].Inserted.Drv != "qcow2" || blocks[0].Inserted.Image.VirtualSize != 64<<20 || !strings.Contains(blocks[0].QDev, "data-disk") {
		t.Errorf("%+v", blocks)
	}
	stop(t, v)
	if after, err := os.Stat(s.DataBase); err != nil || !after.ModTime().Equal(before.ModTime()) {
		t.Error("the base was touched")
	}
}

// Restores and snapshots hand QEMU files that are not in its jail.
func TestAFileCanBeHandedIntoTheJail(t *testing.T) {
	v := start(t, paused, Options{})
	f, err := os.OpenFile(filepath.Join(t.TempDir(), "state"), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	path, err := v.QMP().AddFD(t.Context(), 1, f)
	if err != nil {
		t.Fatal(err)
	}
	if err := v.QMP().Do(t.Context(), "stop", nil, nil); err != nil {
		t.Fatal(err)
	}
	if err := v.QMP().Do(t.Context(), "xen-save-devices-state", map[string]any{"filename": path, "live": false}, nil); err != nil {
		t.Fatal(err)
	}
	if info, err := f.Stat(); err != nil || info.Size() < 1000 {
		t.Errorf("%v, %v", info, err)
	}
	if err := v.QMP().RemoveFD(t.Context(), 1); err != nil {
		t.Error(err)
	}
	if err := v.QMP().GetFD(t.Context(), "incoming", f); err != nil {
		t.Error(err)
	}
}
