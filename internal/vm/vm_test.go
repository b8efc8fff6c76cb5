package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
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

// A guest of one boot sector, written here so that no test needs an image.
var (
	// say writes the zero-terminated text at 0x7c40 to the serial port.
	say = []byte{
		0x31, 0xc0, 0x8e, 0xd8, // xor ax,ax; mov ds,ax
		0xba, 0xf8, 0x03, //       mov dx,0x3f8
		0xbe, 0x40, 0x7c, //       mov si,0x7c40
		0xac, 0x84, 0xc0, //       next: lodsb; test al,al
		0x74, 0x03, //             jz done
		0xee, 0xeb, 0xf8, //       out dx,al; jmp next
	} // done:
	powerOff = []byte{0xba, 0x04, 0x06, 0xb8, 0x00, 0x20, 0xef, 0xf4} // mov dx,0x604; mov ax,0x2000; out dx,ax; hlt
	reset    = []byte{0xb0, 0xfe, 0xe6, 0x64, 0xf4}                   // mov al,0xfe; out 0x64,al; hlt
	again    = []byte{0xeb, 0xec}                                     // jmp to the beginning
	halt     = []byte{0xf4, 0xeb, 0xfd}                               // hlt; jmp to it
)

// guest is a VM that says text on its console and then does what then does.
// It is paused: boot lets it run.
func guest(t *testing.T, text string, then []byte) Spec {
	t.Helper()
	sector := make([]byte, 1<<20) // the firmware does not start a disk without a whole cylinder
	copy(sector, append(append([]byte{}, say...), then...))
	copy(sector[0x40:0x1fe], text)
	sector[510], sector[511] = 0x55, 0xaa
	s := paused
	s.RootDisk = writeFile(t, "boot.img", sector)
	return s
}

func boot(t *testing.T, v *VM) {
	t.Helper()
	if err := v.QMP().Do(t.Context(), "cont", nil, nil); err != nil {
		t.Fatal(err)
	}
}

// buffer is a console that can be looked at while it is written to.
type buffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
	n   int
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.n += len(p)
	if b.buf.Len() < 1<<20 {
		b.buf.Write(p)
	}
	return len(p), nil
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func (b *buffer) len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.n
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

func TestAGuestThatSwitchesItselfOffIsToldFromOneThatRestarts(t *testing.T) {
	for _, c := range []struct {
		name string
		then []byte
		want Reason
	}{{"power off", powerOff, GuestPoweroff}, {"restart", reset, GuestReset}} {
		t.Run(c.name, func(t *testing.T) {
			var console buffer
			v := start(t, guest(t, "hello from the guest\r\n", c.then), Options{Console: &console})
			boot(t, v)
			info := waitExit(t, v)
			if info.Reason != c.want || info.Code != 0 {
				t.Errorf("%+v", info)
			}
			if console.String() != "hello from the guest\r\n" {
				t.Errorf("console: %q", console.String())
			}
		})
	}
}

func TestAConsoleFloodFillsNeitherDiskNorTheWayOut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "console.log")
	const max = 64 << 10
	log, err := BoundedLog(path, max)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	var seen buffer
	v := start(t, guest(t, strings.Repeat("flood ", 60), again), Options{Console: io.MultiWriter(log, &seen)})
	boot(t, v)
	for end := time.Now().Add(patience); seen.len() < 4*max; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the console stands still after %d bytes", seen.len())
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Size() > max {
		t.Errorf("log: %v, %v", info, err)
	}
	// The monitor answers, and the VM can be stopped, in the middle of it.
	if err := v.QMP().Do(t.Context(), "query-status", nil, nil); err != nil {
		t.Error(err)
	}
	stop(t, v)
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

func TestTheMemoryFileIsPrivateSparseAndNeverWritten(t *testing.T) {
	s := guest(t, "up\r\n", halt)
	s.Memory = filepath.Join(t.TempDir(), "memory")
	var console buffer
	v := start(t, s, Options{Console: &console})
	boot(t, v)
	for end := time.Now().Add(patience); console.String() != "up\r\n"; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the guest does not come up")
		}
	}
	stop(t, v)
	info, err := os.Stat(s.Memory)
	if err != nil || info.Mode().Perm() != 0o600 || info.Size() != 64<<20 {
		t.Fatalf("%v, %v", info, err)
	}
	if blocks := info.Sys().(*syscall.Stat_t).Blocks; blocks*512 > 1<<20 {
		t.Errorf("%d bytes on disk", blocks*512)
	}
	f, err := os.Open(s.Memory)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	page := make([]byte, 512)
	if _, err := f.ReadAt(page, 0x7c00); err != nil || !bytes.Equal(page, make([]byte, 512)) {
		t.Error("what the guest has in its memory is in the file")
	}
	// The same file serves the next VM.
	stop(t, start(t, s, Options{}))
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

func BenchmarkStart(b *testing.B) {
	for b.Loop() {
		v, err := Start(b.Context(), paused, Options{})
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		v.Stop(b.Context())
		b.StartTimer()
	}
}
