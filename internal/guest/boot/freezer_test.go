package boot

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// fakeCgroup is a folder with plain files in place of a cgroup.
func fakeCgroup(t *testing.T, events string) (dir string, f *freezer) {
	t.Helper()
	dir = t.TempDir()
	for name, text := range map[string]string{"cgroup.freeze": "0", "cgroup.events": events} {
		if err := os.WriteFile(dir+"/"+name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir, newTestFreezer(t, dir)
}

func newTestFreezer(t *testing.T, dir string) *freezer {
	t.Helper()
	f, err := openFreezer(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(f.order); unix.Close(f.events) })
	return f
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestFreezeReturnsOnceAllHaveStopped(t *testing.T) {
	dir, f := fakeCgroup(t, "populated 1\nfrozen 0\n")
	late := time.AfterFunc(30*time.Millisecond, func() {
		if err := os.WriteFile(dir+"/cgroup.events", []byte("populated 1\nfrozen 1\n"), 0o600); err != nil {
			t.Error(err)
		}
	})
	defer late.Stop()
	info, err := f.freeze(time.Minute)
	if err != nil || !info.Frozen || info.SettledUS < 20_000 || info.SettledUS > 30_000_000 {
		t.Errorf("%+v, %v", info, err)
	}
	if got := read(t, dir+"/cgroup.freeze"); got != "1" || !f.frozen.Load() {
		t.Errorf("the order is %q", got)
	}
	for range 2 {
		if err := f.thaw(); err != nil || f.frozen.Load() || read(t, dir+"/cgroup.freeze") != "0" {
			t.Errorf("thaw: %v", err)
		}
	}
}

func TestOrderStandsWhenATaskHasNotStoppedYet(t *testing.T) {
	dir, f := fakeCgroup(t, "populated 1\nfrozen 0\n")
	begin := time.Now()
	info, err := f.freeze(60 * time.Millisecond)
	if err != nil || info.Frozen || info.SettledUS < 60_000 || time.Since(begin) < 60*time.Millisecond {
		t.Errorf("%+v, %v", info, err)
	}
	if !f.frozen.Load() || read(t, dir+"/cgroup.freeze") != "1" {
		t.Error("the order was taken back")
	}
}

func TestFreezeThatCannotBeOrderedChangesNothing(t *testing.T) {
	dir, f := fakeCgroup(t, "frozen 1\n")
	order := f.order
	defer func() { f.order = order }()
	readOnly, err := unix.Open(dir+"/cgroup.freeze", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(readOnly)
	f.order = readOnly
	if info, err := f.freeze(time.Minute); err == nil || !strings.Contains(err.Error(), "freeze programs") || f.frozen.Load() {
		t.Errorf("%+v, %v", info, err)
	}
	f.frozen.Store(true)
	if err := f.thaw(); err == nil || !f.frozen.Load() {
		t.Errorf("thaw: %v", err)
	}
}

func TestFreezerWithoutItsFilesNamesThem(t *testing.T) {
	dir := t.TempDir()
	if _, err := openFreezer(dir); err == nil || !strings.Contains(err.Error(), "cgroup.freeze") {
		t.Errorf("error %v", err)
	}
	if err := os.WriteFile(dir+"/cgroup.freeze", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := openFreezer(dir); err == nil || !strings.Contains(err.Error(), "cgroup.events") {
		t.Errorf("error %v", err)
	}
}

// realCgroup makes a cgroup of version 2 where this machine lets it, with a
// group below as the programs' has.
func realCgroup(t *testing.T) (dir, leaf string) {
	t.Helper()
	for _, top := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var st unix.Statfs_t
		if unix.Statfs(top, &st) != nil || st.Type != unix.CGROUP2_SUPER_MAGIC {
			continue
		}
		dir, err := os.MkdirTemp(top, "warren-test-")
		if err != nil {
			continue
		}
		leaf = filepath.Join(dir, "exec")
		t.Cleanup(func() { os.Remove(dir) })
		if err := os.Mkdir(leaf, 0o755); err != nil {
			t.Skipf("no cgroup of our own: %v", err)
		}
		t.Cleanup(func() { os.Remove(leaf) })
		return dir, leaf
	}
	t.Skip("no cgroup2 that this test may write to")
	return "", ""
}

func TestFrozenProgramsDoNotRunAndDieWhereTheyStand(t *testing.T) {
	dir, leaf := realCgroup(t)
	f := newTestFreezer(t, dir)
	// Also before any program has run.
	if info, err := f.freeze(10 * time.Second); err != nil || !info.Frozen {
		t.Fatalf("without programs: %+v, %v", info, err)
	}
	if err := f.thaw(); err != nil {
		t.Fatal(err)
	}
	count := t.TempDir() + "/count"
	group, err := unix.Open(leaf, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(group)
	cmd := exec.Command("/bin/sh", "-c", "while :; do echo x >>"+count+"; done")
	cmd.SysProcAttr = &unix.SysProcAttr{UseCgroupFD: true, CgroupFD: group}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cmd.Process.Kill()
		cmd.Wait()
	}()
	size := func() int64 {
		st, err := os.Stat(count)
		if err != nil {
			return 0
		}
		return st.Size()
	}
	grows := func(from int64) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); size() <= from; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("the program does not run")
			}
		}
	}
	grows(0)
	for range 5 {
		info, err := f.freeze(10 * time.Second)
		if err != nil || !info.Frozen {
			t.Fatalf("%+v, %v", info, err)
		}
		t.Logf("settled after %d µs", info.SettledUS)
		before := size()
		time.Sleep(20 * time.Millisecond)
		if after := size(); after != before {
			t.Errorf("wrote %d bytes while frozen", after-before)
		}
		if err := f.thaw(); err != nil {
			t.Fatal(err)
		}
		grows(before)
	}
	if _, err := f.freeze(10 * time.Second); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait() // returns: it died without being thawed
}
