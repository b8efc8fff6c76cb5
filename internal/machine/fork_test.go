package machine_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/supervisor"
)

// count is a program that counts in a file, in steps of 5 ms.
const count = `
import time, os
n = 0
while True:
    n += 1
    open("/dev/shm/n.new", "w").write(str(n))
    os.rename("/dev/shm/n.new", "/dev/shm/n")
    time.sleep(0.005)`

// wantCounting checks that the counting program goes on.
func wantCounting(t *testing.T, m *machine.Machine) {
	t.Helper()
	awaits(t, m, fmt.Sprintf("test 0$(cat /dev/shm/n) -gt %d", number(t, m, "cat /dev/shm/n")))
}

// collect removes what nothing needs and says what that was.
func collect(t *testing.T) snapshots.Collected {
	t.Helper()
	done, err := snapshots.In(home).Collect(testContext(t), nil)
	if err != nil {
		t.Errorf("collect: %v", err)
	}
	if len(done.Unreadable) > 0 {
		t.Errorf("unreadable: %v", done.Unreadable)
	}
	return done
}

func exists(id string) bool {
	_, err := os.Stat(filepath.Join(home.SnapshotsDir(), id))
	return err == nil
}

func TestForksShareTheirPastAndNothingElse(t *testing.T) {
	m := create(t)
	python(t, m, count)
	awaits(t, m, "test -e /dev/shm/n")
	tell(t, m, "echo parent > /root/who; head -c 3000000 /dev/urandom > /root/big; sha256sum /root/big > /root/big.sum")
	var told [4]machine.Forked
	began := time.Now()
	forks, err := m.Fork(testContext(t), 4, machine.Options{CPUs: 7}, machine.ForkHooks{
		Name: func(i int) string {
			if i == 2 {
				return "not a name"
			}
			return fmt.Sprintf("child-%d", i)
		},
		Ready: func(i int, f machine.Forked) { told[i] = f },
	})
	took := time.Since(began)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("4 ways in %v, paused %d µs", took, forks.Capture.PauseUS)
	if paused := time.Duration(forks.Capture.PauseUS) * time.Microsecond; paused > took/2 || paused <= 0 {
		t.Errorf("the parent was paused for %v of %v", paused, took)
	}
	var children []*machine.Machine
	for i, f := range forks.Copies {
		if told[i] != f {
			t.Errorf("of copy %d was told %+v, it is %+v", i, told[i], f)
		}
		if i == 2 {
			if f.Err == nil || f.Machine != nil || !strings.Contains(f.Err.Error(), "not a name") {
				t.Errorf("copy 2: %v", f.Err)
			}
			continue
		}
		if f.Err != nil {
			t.Fatalf("copy %d: %v", i, f.Err)
		}
		t.Cleanup(func() { closeMachine(t, f.Machine) })
		children = append(children, f.Machine)
	}
	for i, c := range children {
		wantCounting(t, c)
		tell(t, c, fmt.Sprintf("sha256sum -c /root/big.sum && echo %d > /root/who && echo %d > /root/new && sync", i, i))
	}
	for i, c := range children {
		if got := tell(t, c, "cat /root/who /root/new"); got != fmt.Sprintf("%d\n%d", i, i) {
			t.Errorf("child %d has %q", i, got)
		}
	}
	if got := tell(t, m, "cat /root/who; test -e /root/new || echo none"); got != "parent\nnone" {
		t.Errorf("the parent has %q", got)
	}
	wantCounting(t, m)

	// The capture stays while the parent or a copy stands on it.
	collect(t)
	if !exists(forks.Capture.ID) {
		t.Fatal("the capture went while it was needed")
	}
	if err := snapshots.In(home).Delete(testContext(t), forks.Capture.ID); !errors.Is(err, snapshots.ErrNeeded) {
		t.Errorf("delete the capture: %v", err)
	}
	// A fork of a fork, and a snapshot of that.
	second, err := children[0].Fork(testContext(t), 1, machine.Options{}, machine.ForkHooks{})
	if err != nil || second.Copies[0].Err != nil {
		t.Fatalf("fork of a fork: %v, %v", err, second.Copies)
	}
	grandchild := second.Copies[0].Machine
	t.Cleanup(func() { closeMachine(t, grandchild) })
	tell(t, grandchild, "echo grandchild >> /root/who")
	kept := save(t, grandchild)
	for _, gone := range append(children, grandchild, m) {
		closeMachine(t, gone)
	}
	collect(t)
	for _, id := range []string{forks.Capture.ID, second.Capture.ID} {
		if !exists(id) {
			t.Errorf("%s went, and %s needs it", id, kept.ID)
		}
	}
	c := restore(t, kept.ID)
	if got := tell(t, c, "sha256sum -c /root/big.sum >&2; cat /root/who /root/new; uname -n"); got != "0\ngrandchild\n0\nwarren" {
		t.Errorf("the snapshot of the fork of the fork has %q", got)
	}
	wantCounting(t, c)
	closeMachine(t, c)
	if err := snapshots.In(home).Delete(testContext(t), kept.ID); err != nil {
		t.Fatal(err)
	}
	done := collect(t)
	if exists(forks.Capture.ID) || exists(second.Capture.ID) {
		t.Errorf("the captures are still there; removed were %q", done.Removed)
	}
}

func TestRewindUndoesDamage(t *testing.T) {
	m := create(t)
	python(t, m, count)
	awaits(t, m, "test -e /dev/shm/n")
	tell(t, m, "mkdir /root/work; seq 1000 > /root/work/f; hostname given 2>/dev/null; true")
	info := save(t, m)
	at := number(t, m, "cat /dev/shm/n")
	tell(t, m, "rm -rf /root /home /usr/bin/python3* 2>/dev/null; pkill -9 -f '[r]ename'; rm /dev/shm/n; true")
	if got := tell(t, m, "test -e /root/work || echo gone"); got != "gone" {
		t.Fatalf("the damage was not done: %q", got)
	}
	began := time.Now()
	next, err := m.Rewind(testContext(t), info.ID)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeMachine(t, next) })
	t.Logf("rewound in %v", time.Since(began))
	if m.Err() == nil {
		t.Error("the machine before is still there")
	}
	if got := number(t, next, "cat /dev/shm/n"); got < at-200 || got > at+4000 {
		t.Errorf("counts at %d; was at %d", got, at)
	}
	wantCounting(t, next)
	if got := tell(t, next, "wc -l < /root/work/f; python3 -c 'print(1)'"); got != "1000\n1" {
		t.Errorf("got %q", got)
	}
	// Once more, from the machine that was rewound.
	again, err := next.Rewind(testContext(t), info.ID)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeMachine(t, again) })
	wantCounting(t, again)
}

func TestRewindKeepsTheMachineWhenTheSnapshotIsGoneOrDamaged(t *testing.T) {
	m := create(t)
	python(t, m, count)
	awaits(t, m, "test -e /dev/shm/n")
	pid := tell(t, m, "pgrep -f '[r]ename' | head -1")
	good := save(t, m)
	m2 := create(t)
	tell(t, m2, "echo x > /root/x")
	damaged := save(t, m2)
	closeMachine(t, m2)
	flip(t, filepath.Join(home.SnapshotsDir(), damaged.ID, "state"), 100)
	broken := forge(t, good.ID, func(m *snapshots.Manifest) {}, map[string]func(string){"state": func(path string) { scribble(t, path) }})
	for _, tt := range []struct {
		id, want string
	}{{"s-nowhere", "no such snapshot"}, {damaged.ID, "is damaged"}, {broken, "restore the devices"}} {
		next, err := m.Rewind(testContext(t), tt.id)
		if err == nil {
			closeMachine(t, next)
			t.Fatalf("rewound to %s", tt.id)
		}
		if !strings.Contains(err.Error(), tt.want) {
			t.Errorf("err %q, want one about %q", err, tt.want)
		}
		t.Logf("%s: %v", tt.id, err)
		wantCounting(t, m)
		if got := tell(t, m, "pgrep -f '[r]ename' | head -1"); got != pid {
			t.Errorf("the process was %s, is %s", pid, got)
		}
		wantRightClock(t, m)
	}
	// One that was paused stays so.
	if err := m.Pause(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if next, err := m.Rewind(testContext(t), broken); err == nil {
		closeMachine(t, next)
		t.Fatal("rewound to what is broken")
	}
	if status, err := m.Status(testContext(t)); err != nil || !status.Paused {
		t.Errorf("a paused machine runs on after a rewind that failed: %+v, %v", status, err)
	}
	if err := m.Resume(testContext(t)); err != nil {
		t.Fatal(err)
	}
	wantCounting(t, m)
	for _, id := range []string{damaged.ID, broken} {
		if err := snapshots.In(home).Delete(testContext(t), id); err != nil {
			t.Error(err)
		}
	}
}

func TestRewindEndsAMachineThatMayOutliveItsOwner(t *testing.T) {
	o := small()
	o.Outlive = true
	m, err := machine.Create(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	info := save(t, m)
	next, err := m.Rewind(testContext(t), info.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := next.Kill(context.Background()); err != nil {
			t.Error(err)
		}
		closeMachine(t, next)
	}()
	if _, err := os.Stat(m.Dir()); err == nil {
		t.Errorf("%s is still there", m.Dir())
	}
	if _, err := m.Status(testContext(t)); !errors.Is(err, supervisor.ErrGone) {
		t.Errorf("the machine before: %v", err)
	}
	tell(t, next, "true")
}

func TestChainsOfSnapshotsAreExact(t *testing.T) {
	length := 12
	if soak {
		length = 140 // the 128 that one snapshot may need are passed
	}
	m := create(t)
	var ids, told []string
	const look = "cat /dev/shm/r* /root/r* | sha256sum; cat /root/n; ls /root/r* | wc -l"
	for i := range length {
		told = append(told, tell(t, m, fmt.Sprintf(`head -c 1500000 /dev/urandom > /dev/shm/r%d; head -c 300000 /dev/urandom > /root/r%d
test %d -lt 3 || rm /dev/shm/r%d; test %d -lt 15 || rm /root/r%d; echo %d > /root/n; test %d = 0 || sync; `, i, i, i, i-3, i, i-15, i, i%2)+look))
		info := save(t, m)
		if i%2 == 1 && !info.DiskChanged {
			t.Errorf("snapshot %d has no disk", i)
		}
		ids = append(ids, info.ID)
	}
	flats := 0
	for end := time.Now().Add(20 * time.Second); flats == 0 && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		for _, id := range ids {
			if sn, err := snapshots.In(home).Open(testContext(t), id); err == nil {
				if _, ok := sn.Flat(); ok {
					flats++
				}
				sn.Close()
			}
		}
	}
	if flats == 0 {
		t.Error("nothing was flattened aside")
	}
	t.Logf("%d of %d snapshots are flat", flats, length)
	closeMachine(t, m)
	for _, i := range []int{0, length / 2, length - 1} {
		c := restore(t, ids[i])
		if got := tell(t, c, look); got != told[i] {
			t.Errorf("snapshot %d of %d has %q, had %q", i, length, got, told[i])
		}
		closeMachine(t, c)
	}
}
