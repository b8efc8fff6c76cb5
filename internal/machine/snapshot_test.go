package machine_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/supervisor"
)

// soak is true in the long run of the tests.
var soak = os.Getenv("WARREN_SOAK") != ""

// small is the machine that all tests of snapshots have: one template serves
// them all.
func small() machine.Options {
	o := options()
	o.CPUs, o.MemMB = 2, 256
	return o
}

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// create makes a machine from the template, which ends with the test.
func create(t *testing.T) *machine.Machine {
	t.Helper()
	m, err := machine.Create(testContext(t), small())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeMachine(t, m) })
	return m
}

// restore makes a machine from a snapshot, which ends with the test.
func restore(t *testing.T, id string) *machine.Machine {
	t.Helper()
	o := options()
	m, err := machine.Restore(testContext(t), id, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeMachine(t, m) })
	return m
}

// save makes a snapshot that must come to be.
func save(t *testing.T, m *machine.Machine) supervisor.SnapshotInfo {
	t.Helper()
	info, err := m.Save(testContext(t), t.Name())
	if err != nil {
		t.Fatalf("save: %v", err)
	}
	return info
}

// tell is what a script that must succeed writes, without the last end of line.
func tell(t *testing.T, m *machine.Machine, script string) string {
	t.Helper()
	status, out, errs := output(t, m, sh(script))
	if status.ExitCode() != 0 {
		t.Fatalf("%q ended with %d: %s%s", script, status.ExitCode(), out, errs)
	}
	return strings.TrimSuffix(out, "\n")
}

// number is tell of a number.
func number(t *testing.T, m *machine.Machine, script string) int {
	t.Helper()
	out := tell(t, m, script)
	n, err := strconv.Atoi(out)
	if err != nil {
		t.Fatalf("%q says %q", script, out)
	}
	return n
}

// behind starts a program that runs until its machine ends.
func behind(t *testing.T, m *machine.Machine, argv ...string) {
	t.Helper()
	p, err := m.Exec(context.Background(), guestapi.ExecRequest{Argv: argv}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	go p.Wait()
}

// python starts a python program behind.
func python(t *testing.T, m *machine.Machine, program string) {
	t.Helper()
	behind(t, m, "python3", "-c", program)
}

// awaits polls a script until it succeeds.
func awaits(t *testing.T, m *machine.Machine, script string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(30 * time.Millisecond) {
		status, _, errs := output(t, m, sh(script))
		if status.ExitCode() == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%q does not come true: %s", script, errs)
		}
	}
}

// vmFolders are the folders of all VMs, half made and half removed ones too.
func vmFolders() []string {
	all, _ := filepath.Glob(home.VMDir("[^.]*"))
	hidden, _ := filepath.Glob(home.VMDir(".[dn]*"))
	return append(all, hidden...)
}

const everything = `
import os, time, hashlib
shm = "/dev/shm/"
kept = open("/root/kept", "w+")
kept.write("written before"); kept.flush()
gone = open("/root/gone", "w+")
gone.write("nobody else sees me"); gone.flush()
os.unlink("/root/gone")
blob = os.urandom(4 << 20)
for name in (shm + "blob", "/root/blob"):
    open(name, "wb").write(blob)
    open(name + ".sum", "w").write(hashlib.sha256(blob).hexdigest())
os.write(1, b"half a li")
n = 0
while True:
    n += 1
    with open(shm + "count.new", "w") as f: f.write(str(n))
    os.rename(shm + "count.new", shm + "count")
    if os.path.exists(shm + "go"):
        break
    time.sleep(0.005)
os.write(1, b"ne\n")
for _ in range(64):
    os.write(1, b"x" * 32768)
gone.seek(0); kept.write(", written after"); kept.flush()
with open(shm + "end", "w") as f: f.write(gone.read() + " " + hashlib.sha256(blob).hexdigest())
time.sleep(1000)
`

func TestEverythingGoesOnAfterARestore(t *testing.T) {
	m := create(t)
	var out bytes.Buffer
	var lock sync.Mutex
	p, err := m.Exec(context.Background(), guestapi.ExecRequest{Argv: []string{"python3", "-c", everything}},
		writerFunc(func(b []byte) (int, error) { lock.Lock(); defer lock.Unlock(); return out.Write(b) }), nil)
	if err != nil {
		t.Fatal(err)
	}
	go p.Wait()
	awaits(t, m, "test -e /dev/shm/count")
	behind(t, m, "sh", "-c", "sleep 4; echo woke > /dev/shm/timer")
	tell(t, m, "echo mounted > /root/file; mkdir -p /mnt/t; mount -t tmpfs none /mnt/t; echo in tmpfs > /mnt/t/f")
	before := number(t, m, "cat /dev/shm/count")
	info := save(t, m)
	if !info.Frozen || info.PauseUS <= 0 {
		t.Errorf("the snapshot says %+v", info)
	}
	after := number(t, m, "cat /dev/shm/count")

	check := func(t *testing.T, m *machine.Machine) {
		if got := tell(t, m, "cat /root/file /mnt/t/f; cat /root/kept; ls /root/gone 2>/dev/null"+"; true"); got != "mounted\nin tmpfs\nwritten before" {
			t.Errorf("files hold %q", got)
		}
		at := number(t, m, "cat /dev/shm/count")
		awaits(t, m, fmt.Sprintf("test $(cat /dev/shm/count) -gt %d", at))
		tell(t, m, "for f in /dev/shm/blob /root/blob; do echo \"$(cat $f.sum)  $f\" | sha256sum -c - || exit 1; done")
		tell(t, m, "touch /dev/shm/go")
		awaits(t, m, "test -e /dev/shm/end && test -e /dev/shm/timer")
		sum := tell(t, m, "cat /root/blob.sum")
		if got := tell(t, m, "cat /dev/shm/end"); got != "nobody else sees me "+sum {
			t.Errorf("the program ended with %q", got)
		}
		if got := tell(t, m, "cat /root/kept /dev/shm/timer"); got != "written before, written afterwoke" {
			t.Errorf("after the end files hold %q", got)
		}
	}
	t.Run("in the copy", func(t *testing.T) {
		c := restore(t, info.ID)
		if at := number(t, c, "cat /dev/shm/count"); at < before || at > after+2000 {
			t.Errorf("the copy counts at %d; the original was between %d and %d", at, before, after)
		}
		check(t, c)
	})
	t.Run("in the original", func(t *testing.T) {
		check(t, m)
		lock.Lock()
		defer lock.Unlock()
		if want := "half a line\n" + strings.Repeat("x", 64*32768); out.String() != want {
			t.Errorf("the original wrote %d bytes that begin with %.20q, want %d", out.Len(), out.String(), len(want))
		}
	})
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func TestCallsInFlightAreNotDisturbedBySnapshots(t *testing.T) {
	m := create(t)
	const stream = `
import os, hashlib, random, time
r, sum = random.Random(7), hashlib.sha256()
for i in range(320):
    b = r.randbytes(65536)
    sum.update(b)
    os.write(1, b[:30000]); os.write(1, b[30000:])
    time.sleep(0.004)
open("/dev/shm/sum", "w").write(sum.hexdigest())
`
	ctx := testContext(t)
	sum, got := sha256.New(), 0
	p, err := m.Exec(ctx, guestapi.ExecRequest{Argv: []string{"python3", "-c", stream}},
		writerFunc(func(b []byte) (int, error) { got += len(b); return sum.Write(b) }), nil)
	if err != nil {
		t.Fatal(err)
	}
	streamed := make(chan error, 1)
	go func() {
		status, err := p.Wait()
		if err == nil && status.ExitCode() != 0 {
			err = fmt.Errorf("it ended with %d", status.ExitCode())
		}
		streamed <- err
	}()
	stop, started := make(chan struct{}), make(chan int, 1)
	go func() { // programs start meanwhile, and files are moved
		n := 0
		defer func() { started <- n }()
		for {
			select {
			case <-stop:
				return
			default:
			}
			q, err := m.Exec(ctx, guestapi.ExecRequest{Argv: []string{"true"}}, nil, nil)
			if err == nil {
				_, err = q.Wait()
			}
			if err != nil {
				t.Errorf("program %d: %v", n, err)
				return
			}
			if err := m.WriteFile(ctx, "/dev/shm/f", 0o600, "", strings.NewReader("content")); err != nil {
				t.Errorf("file %d: %v", n, err)
				return
			}
			n++
		}
	}()
	var last supervisor.SnapshotInfo
	for range 5 {
		last = save(t, m)
	}
	close(stop)
	if n := <-started; n == 0 {
		t.Error("no program started meanwhile")
	} else {
		t.Logf("%d programs started during 5 snapshots", n)
	}
	if err := <-streamed; err != nil {
		t.Fatalf("the stream: %v", err)
	}
	if want := tell(t, m, "cat /dev/shm/sum"); got != 20<<20 || fmt.Sprintf("%x", sum.Sum(nil)) != want {
		t.Errorf("%d bytes with the digest %x, want %d with %s", got, sum.Sum(nil), 20<<20, want)
	}
	c := restore(t, last.ID)
	awaits(t, c, "test -e /dev/shm/sum") // it goes on without a client, to its end
}

func TestAPausedMachineIsSavedAndGoesOnWithTheRightTime(t *testing.T) {
	m := create(t)
	python(t, m, count)
	awaits(t, m, "test -s /dev/shm/n")
	ctx := testContext(t)
	for range 2 { // the second does nothing
		if err := m.Pause(ctx); err != nil {
			t.Fatal(err)
		}
	}
	info := save(t, m)
	short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	if _, err := m.Exec(short, sh("true"), nil, nil); err == nil {
		t.Error("a program started in a paused machine")
	}
	if _, err := m.Figures(short); err == nil {
		t.Error("a paused guest answered")
	}
	late := make(chan error, 1)
	go func() {
		p, err := m.Exec(ctx, sh("true"), nil, nil)
		if err == nil {
			_, err = p.Wait()
		}
		late <- err
	}()
	time.Sleep(2 * time.Second)
	for range 2 {
		if err := m.Resume(ctx); err != nil {
			t.Fatal(err)
		}
	}
	wantRightClock(t, m)
	if err := <-late; err != nil {
		t.Errorf("a program that was started while the machine was paused: %v", err)
	}
	at := number(t, m, "cat /dev/shm/n")
	awaits(t, m, fmt.Sprintf("test 0$(cat /dev/shm/n) -gt %d", at+3))
	c := restore(t, info.ID)
	wantRightClock(t, c)
	at = number(t, c, "cat /dev/shm/n")
	awaits(t, c, fmt.Sprintf("test 0$(cat /dev/shm/n) -gt %d", at+3))
}

// wantRightClock compares the guest's clock with the host's. The guest is
// asked at an instant that is known to lie between two of the host's.
func wantRightClock(t *testing.T, m *machine.Machine) {
	t.Helper()
	const most = 50 * time.Millisecond
	var worst time.Duration
	for range 5 {
		began := time.Now()
		nano, err := strconv.ParseInt(tell(t, m, "date +%s%N"), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		early, late := began.Sub(time.Unix(0, nano)), time.Since(time.Unix(0, nano))
		if early <= most && late >= -most {
			return
		}
		worst = max(early, -late)
	}
	t.Errorf("the guest's clock is wrong by at least %v", worst)
}

func TestASnapshotOfWhatHasNotChangedIsSmallAndQuick(t *testing.T) {
	m := create(t)
	save(t, m)
	began := time.Now()
	second := save(t, m)
	took := time.Since(began)
	t.Logf("%v: %d pages, %d bytes, paused %d µs", took, second.DataPages, second.Bytes, second.PauseUS)
	if second.DiskChanged || second.DataPages > 2500 || second.Bytes > 12<<20 || took > 5*time.Second {
		t.Errorf("%v for %+v", took, second)
	}
	// an id that exists is refused
	_, err := m.Snapshot(testContext(t), supervisor.SnapshotRequest{ID: second.ID, Kind: string(snapshots.KindSnapshot)})
	if err == nil || !strings.Contains(err.Error(), "exists already") {
		t.Errorf("err %v", err)
	}
	for _, bad := range []supervisor.SnapshotRequest{{ID: "No!", Kind: "snapshot"}, {ID: snapshots.NewID(), Kind: "other"}, {ID: snapshots.NewID(), Kind: "snapshot", Label: strings.Repeat("x", 300)}} {
		if _, err := m.Snapshot(testContext(t), bad); err == nil {
			t.Errorf("%+v was taken", bad)
		}
	}
	tell(t, m, "true")
	third := save(t, m)
	if third.Parent != second.ID {
		t.Errorf("the third snapshot is a difference to %s, not to %s", third.Parent, second.ID)
	}
}

func TestABootedMachineCannotBeSaved(t *testing.T) {
	m := sharedMachine(t)
	for name, err := range map[string]error{
		"save": func() error { _, err := m.Save(testContext(t), ""); return err }(), "pause": m.Pause(testContext(t)),
	} {
		if err == nil || !strings.Contains(err.Error(), "booted, not restored") {
			t.Errorf("%s: err %v", name, err)
		}
	}
	tell(t, m, "true")
}

func TestACallerWhoGivesUpLeavesTheMachineAsItWas(t *testing.T) {
	m := create(t)
	for i := range 12 {
		ctx, cancel := context.WithTimeout(testContext(t), time.Duration(i*12)*time.Millisecond)
		_, err := m.Save(ctx, "")
		cancel()
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("err %v", err)
		}
		began := time.Now()
		tell(t, m, fmt.Sprintf("echo %d > /root/n; cat /root/n", i))
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("the machine answered after %v", took)
		}
	}
	c := restore(t, save(t, m).ID)
	if got := tell(t, c, "cat /root/n"); got != "11" {
		t.Errorf("the copy has %q", got)
	}
}

// inside are the figures of a machine's supervisor, its QEMU and its folder.
func inside(t *testing.T, m *machine.Machine) (s supervisor.Status, qemuFDs, files int) {
	t.Helper()
	s, err := m.Status(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.QEMUPID))
	if err != nil {
		t.Fatal(err)
	}
	names, err := os.ReadDir(m.Dir())
	if err != nil {
		t.Fatal(err)
	}
	return s, len(fds), len(names)
}

func TestSnapshotsLeakNothing(t *testing.T) {
	m := create(t)
	for range 4 {
		save(t, m)
	}
	before, fds, files := inside(t, m)
	// The snapshots themselves are held: a lock for each.
	const saves = 20
	for range saves {
		save(t, m)
	}
	var after supervisor.Status
	var fds2, files2 int
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if after, fds2, files2 = inside(t, m); after.Goroutines <= before.Goroutines+2 && after.FDs <= before.FDs+saves+2 {
			break // a flat file is being made aside
		}
	}
	t.Logf("supervisor: %d files, %d goroutines, heap %d; QEMU: %d files; folder: %d files (before: %d, %d, %d; %d; %d)",
		after.FDs, after.Goroutines, after.HeapBytes, fds2, files2, before.FDs, before.Goroutines, before.HeapBytes, fds, files)
	if after.Goroutines > before.Goroutines+2 || after.FDs > before.FDs+saves+2 {
		t.Errorf("the supervisor had %d files and %d goroutines, has %d and %d", before.FDs, before.Goroutines, after.FDs, after.Goroutines)
	}
	if fds2 > fds+4 || files2 > files+1 {
		t.Errorf("QEMU had %d files and the folder %d, now %d and %d", fds, files, fds2, files2)
	}
}

func TestTheSupervisorStaysSmallWhenAGuestChangedMuch(t *testing.T) {
	const mb = 130 // twice what a capture keeps in memory
	m := create(t)
	python(t, m, `
import os, time, mmap
MB = `+fmt.Sprint(mb)+`
b = mmap.mmap(-1, MB << 20)
chunk = os.urandom(1 << 20)
for i in range(MB):
    b[i << 20:(i + 1) << 20] = chunk
    b[i << 20] = i & 255
open("/dev/shm/full", "w").write("x")
while not os.path.exists("/dev/shm/go"): time.sleep(0.02)
good = all(b[i << 20] == i & 255 and b[(i << 20) + 1:(i + 1) << 20] == chunk[1:] for i in range(MB))
open("/dev/shm/good", "w").write(str(good))
time.sleep(1000)`)
	awaits(t, m, "test -s /dev/shm/full")
	status, err := m.Status(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	info := save(t, m)
	peak := peakRSS(t, status.SupervisorPID)
	t.Logf("%d pages, paused %d ms, the supervisor's most memory was %d MiB", info.DataPages, info.PauseUS/1000, peak>>20)
	if info.DataPages < mb<<20/4096 {
		t.Errorf("%d pages changed", info.DataPages)
	}
	if peak > 150<<20 {
		t.Errorf("the supervisor took %d MiB", peak>>20)
	}
	c := restore(t, info.ID)
	tell(t, c, "touch /dev/shm/go")
	awaits(t, c, "test -s /dev/shm/good")
	if got := tell(t, c, "cat /dev/shm/good"); got != "True" {
		t.Errorf("the copy's memory is right: %s", got)
	}
}

func peakRSS(t *testing.T, pid int) int {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, _ := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(rest), " kB"))
			return kb << 10
		}
	}
	return 0
}
