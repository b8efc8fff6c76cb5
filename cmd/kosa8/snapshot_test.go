package main

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store"
)

var savedID = regexp.MustCompile(`(?m)^saved snapshot (s[0-9a-f]{16}) \(with an answer\) in \d+ms$`)

func TestASavedVMGoesOnHereAndInAnotherHome(t *testing.T) {
	home := vmHome(t)
	k := newKosa8(t, home, "run", "--save=with an answer", "base", "--", "sh", "-c", "echo 42 > /root/answer; exit 3")
	code := k.start(t).end(t)
	saved := savedID.FindStringSubmatch(k.errs.String())
	if code != 3 || saved == nil || !strings.Contains(k.errs.String(), "  run in a copy of it: kosa8 run --from s") {
		t.Fatalf("code %d, stderr %q", code, k.errs.String())
	}
	id := saved[1]
	from := []string{"run", "--from", id, "base", "cat", "/root/answer"}
	newKosa8(t, home, from...).run(t, 0, "42\n", "")
	k = newKosa8(t, home, "snapshot", "ls")
	if code := k.start(t).end(t); code != 0 || !strings.Contains(k.out.String(), id+"  with an answer") {
		t.Errorf("code %d, stdout %q", code, k.out.String())
	}

	// In another home, with its guest image.
	archive := filepath.Join(t.TempDir(), "a.tar.zst")
	k = newKosa8(t, home, "snapshot", "export", "-q", "-o", archive, id)
	k.run(t, 0, "", "")
	other := store.Home(t.TempDir())
	newKosa8(t, other, "snapshot", "import", "-q", archive).run(t, 0, id+"\n", "")
	// Templates that came with it are not what new machines are made from.
	newKosa8(t, other, "run", "-q", "base", "true").run(t, 0, "", "")
	newKosa8(t, other, "snapshot", "rm", "-q", id).run(t, 0, "", "")
	newKosa8(t, other, "template", "rm", "--stale", "-q").run(t, 0, "", "")
	k = newKosa8(t, other, "template", "ls")
	if code := k.start(t).end(t); code != 0 || strings.Count(k.out.String(), "matches") != 2 || strings.Contains(k.out.String(), "stale") {
		t.Errorf("code %d, stdout %q", code, k.out.String())
	}
	// What is its own does not stand in the way.
	newKosa8(t, other, "snapshot", "import", "-q", archive).run(t, 0, id+"\n", "")
	newKosa8(t, other, from...).run(t, 0, "42\n", "")
	newKosa8(t, other, "image", "verify", "-q").start(t).end(t)

	// While a VM runs that needs it, it stays.
	busy := newKosa8(t, home, "run", "--from", id, "base", "--", "sh", "-c", "echo ready; sleep 1000")
	busy.Stdout = nil
	out, err := busy.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	busy.start(t)
	awaitLine(t, out, "ready")
	k = newKosa8(t, home, "snapshot", "rm", id)
	if code := k.start(t).end(t); code != 1 || !strings.Contains(k.errs.String(), "is needed by a running VM") {
		t.Errorf("code %d, stdout %q, stderr %q", code, k.out.String(), k.errs.String())
	}
	busy.Process.Signal(os.Interrupt)
	busy.end(t)
	newKosa8(t, home, "snapshot", "rm", id).run(t, 0, "removed "+id+"\n", "")
	k = newKosa8(t, home, from...)
	if code := k.start(t).end(t); code != 1 || !strings.HasPrefix(k.errs.String(), "kosa8: no such snapshot: \""+id+"\"\n") {
		t.Errorf("code %d, stderr %q", code, k.errs.String())
	}
}

func TestRunTakesItsSizeFromTheSnapshotUnlessAsked(t *testing.T) {
	o, err := complete(t, "--from", "s1", "--save", "base", "true")
	if err != nil || o.machine.CPUs != 0 || o.machine.MemMB != 0 || o.from != "s1" || !o.save || o.label != "" {
		t.Errorf("%+v, %v", o, err)
	}
	o, err = complete(t, "--from", "s1", "--cpus", "1", "--memory", "256m", "--save=a label", "base", "true")
	if err != nil || o.machine.CPUs != 1 || o.machine.MemMB != 256 || o.label != "a label" {
		t.Errorf("%+v, %v", o, err)
	}
	o, err = complete(t, "--boot", "base", "true")
	if err != nil || !o.boot || o.machine.CPUs != machine.DefaultCPUs || o.machine.MemMB != machine.DefaultMemMB {
		t.Errorf("%+v, %v", o, err)
	}
	for _, label := range []string{"two\nlines", "\x1b[1m", "\xff", strings.Repeat("x", 201)} {
		if _, err := complete(t, "--save="+label, "base", "true"); err == nil {
			t.Errorf("label %q is taken", label)
		}
	}
	if _, err := complete(t, "--save", "--boot", "base", "true"); cli.ExitCode(err) != cli.ExitUsage {
		t.Errorf("save what was booted: %v", err)
	}
}

func TestAHomeIsCollectedAtMostOnceAMinute(t *testing.T) {
	home := store.Home(filepath.Join(t.TempDir(), "home"))
	now := time.Now()
	if dueForCollection(home, now) {
		t.Error("there is nothing to collect")
	}
	if _, err := os.Stat(home.Dir()); !errors.Is(err, os.ErrNotExist) {
		t.Error("a home was made for it")
	}
	if err := errors.Join(home.Make(), os.Mkdir(home.SnapshotsDir(), 0o700)); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		after time.Duration
		want  bool
	}{{0, true}, {time.Second, false}, {59 * time.Second, false}, {61 * time.Second, true}, {62 * time.Second, false}, {-time.Hour, true}} {
		if got := dueForCollection(home, now.Add(step.after)); got != step.want {
			t.Errorf("after %v: %v", step.after, got)
		}
	}
}
