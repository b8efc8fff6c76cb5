package hooks

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guest/proc"
	"github.com/warren-vm/warren/internal/guestapi"
)

// reaper collects every child of the test binary, as it does in PID 1.
var reaper *proc.Reaper

func TestMain(m *testing.M) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	reaper = proc.NewReaper()
	os.Exit(m.Run())
}

var identity = guestapi.Identity{Hostname: "copy-1", MachineID: strings.Repeat("0a", 16), Generation: 42}

// folder is a folder of hooks, and one where they can leave traces.
type folder struct {
	t         *testing.T
	dir, mark string
}

func newFolder(t *testing.T) *folder { return &folder{t: t, dir: t.TempDir(), mark: t.TempDir()} }

// hook writes a shell script; $M is the folder for traces.
func (f *folder) hook(name, script string, mode os.FileMode) {
	f.t.Helper()
	if err := os.WriteFile(f.dir+"/"+name, []byte("#!/bin/sh\nM="+f.mark+"\n"+script+"\n"), mode); err != nil {
		f.t.Fatal(err)
	}
}

func (f *folder) runner() *Runner {
	return &Runner{Dir: f.dir, Reaper: reaper, Each: time.Minute, All: time.Minute}
}

func (f *folder) trace(name string) string {
	data, err := os.ReadFile(f.mark + "/" + name)
	if err != nil {
		return ""
	}
	return string(data)
}

func (f *folder) names() string {
	f.t.Helper()
	names, _ := list(f.dir)
	return strings.Join(names, " ")
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never: " + what)
		}
	}
}

func TestGuestWithoutHooksHasNothingToDo(t *testing.T) {
	f := newFolder(t)
	r := f.runner()
	for _, dir := range []string{f.dir, f.dir + "/none"} {
		r.Dir = dir
		if results, left := r.Run(identity); results != nil || left != 0 {
			t.Errorf("%+v, %d", results, left)
		}
	}
}

func TestHooksRunInTheOrderOfTheirNamesAndKnowTheCopy(t *testing.T) {
	f := newFolder(t)
	f.hook("20-b", "echo 20 >>$M/order", 0o755)
	f.hook("10-a", `echo 10 >>$M/order; env | grep -v -e ^PWD= -e ^SHLVL= -e ^_= -e ^OLDPWD= | sort >$M/env
pwd >$M/pwd; wc -c | tr -d ' ' >$M/stdin; id -u >$M/uid; echo lost; echo lost >&2`, 0o700)
	f.hook("9.local_c", "echo 9 >>$M/order", 0o755)
	results, left := f.runner().Run(identity)
	want := "[{10-a 0 } {20-b 0 } {9.local_c 0 }]"
	if got := fmt.Sprint(results); got != want || left != 0 {
		t.Errorf("%s, %d, want %s", got, left, want)
	}
	if got := f.trace("order"); got != "10\n20\n9\n" {
		t.Errorf("order %q", got)
	}
	env := "PATH=" + proc.DefaultPath + "\nWARREN_GENERATION=42\nWARREN_HOSTNAME=copy-1\nWARREN_MACHINE_ID=" + identity.MachineID + "\n"
	if got := f.trace("env"); got != env {
		t.Errorf("environment %q, want %q", got, env)
	}
	if f.trace("pwd") != "/\n" || f.trace("stdin") != "0\n" || f.trace("uid") != fmt.Sprintln(os.Geteuid()) {
		t.Errorf("folder %q, input of %q, user %q", f.trace("pwd"), f.trace("stdin"), f.trace("uid"))
	}
}

func TestWhatIsNoHookIsIgnored(t *testing.T) {
	f := newFolder(t)
	f.hook("good", "true", 0o755)
	f.hook("not-executable", "true", 0o644)
	f.hook("backup~", "true", 0o755)
	f.hook("with space", "true", 0o755)
	f.hook("ünicode", "true", 0o755)
	for _, err := range []error{
		os.Mkdir(f.dir+"/folder", 0o755),
		os.Symlink("good", f.dir+"/link"),
		unix.Mkfifo(f.dir+"/pipe", 0o755),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if got := f.names(); got != "good" {
		t.Errorf("hooks %q", got)
	}
}

func TestHookThatFailsIsToldAndTheOthersRun(t *testing.T) {
	f := newFolder(t)
	f.hook("1", "exit 3", 0o755)
	f.hook("2", "kill -TERM $$", 0o755)
	if err := os.WriteFile(f.dir+"/3", []byte("#!/no/such/interpreter\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(f.dir+"/4", []byte{0, 1, 2, 3}, 0o755); err != nil {
		t.Fatal(err)
	}
	f.hook("5", "echo ran >$M/5", 0o755)
	results, _ := f.runner().Run(identity)
	for i, want := range []struct {
		code int
		text string
	}{{3, ""}, {128 + 15, "ended by signal 15"}, {126, "interpreter"}, {126, "not a program"}, {0, ""}} {
		r := results[i]
		if r.Code != want.code || !strings.Contains(r.Error, want.text) || (want.text == "") != (r.Error == "") || len(r.Error) > guestapi.MaxHookText {
			t.Errorf("%+v, want %d %q", r, want.code, want.text)
		}
	}
	if f.trace("5") != "ran\n" {
		t.Error("the last hook did not run")
	}
}

func TestHookThatTakesTooLongIsKilledWithItsGroup(t *testing.T) {
	f := newFolder(t)
	f.hook("1-hangs", "trap '' TERM INT HUP; sleep 600 & echo $! >$M/child; wait", 0o755)
	f.hook("2-next", "echo ran >$M/next", 0o755)
	r := f.runner()
	r.Each = 500 * time.Millisecond
	results, _ := r.Run(identity)
	if results[0].Code != 124 || results[0].Error != "killed after 500ms" || results[1].Code != 0 || f.trace("next") != "ran\n" {
		t.Errorf("%+v", results)
	}
	child, err := strconv.Atoi(strings.TrimSpace(f.trace("child")))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "its child is gone", func() bool { return syscall.Kill(child, 0) == syscall.ESRCH })
}

func TestAllHooksTogetherHaveALimit(t *testing.T) {
	f := newFolder(t)
	for i := range 4 {
		f.hook(fmt.Sprint(i), "sleep 600", 0o755)
	}
	r := f.runner()
	r.Each, r.All = 300*time.Millisecond, 500*time.Millisecond
	begin := time.Now()
	results, left := r.Run(identity)
	if took := time.Since(begin); took < r.All || took > 30*time.Second {
		t.Errorf("took %v", took)
	}
	for i, text := range []string{"killed after 300ms", "killed after", "not run: those before it took the 500ms of all hooks", "not run"} {
		if results[i].Code != 124 || !strings.HasPrefix(results[i].Error, text) {
			t.Errorf("%+v, want %q", results[i], text)
		}
	}
	if left != 0 {
		t.Errorf("%d left", left)
	}
}

func TestOnlySoManyHooksRun(t *testing.T) {
	f := newFolder(t)
	for i := range guestapi.MaxHooks + 5 {
		f.hook(fmt.Sprintf("%03d", i), "echo x >>$M/count", 0o755)
	}
	results, left := f.runner().Run(identity)
	if len(results) != guestapi.MaxHooks || left != 5 || len(f.trace("count")) != 2*guestapi.MaxHooks || results[0].Name != "000" {
		t.Errorf("%d results, %d left, %d ran", len(results), left, len(f.trace("count"))/2)
	}
	// And a folder with names without end is not read to its end.
	for i := range 2 * maxNames {
		if err := os.WriteFile(f.dir+"/"+fmt.Sprintf("x%d", i), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if names, left := list(f.dir); len(names) != guestapi.MaxHooks || left > maxNames {
		t.Errorf("%d hooks, %d left", len(names), left)
	}
}

func TestNamesAndErrorsAreBounded(t *testing.T) {
	f := newFolder(t)
	f.hook(strings.Repeat("n", 255), "exit 1", 0o755)
	results, _ := f.runner().Run(identity)
	if len(results) != 1 || len(results[0].Name) != guestapi.MaxHookText || results[0].Code != 1 {
		t.Errorf("%+v", results)
	}
	if got := cut(strings.Repeat("ü", 150) + "\x1b[0m"); len(got) > guestapi.MaxHookText || !strings.HasPrefix(got, "üü") {
		t.Errorf("%q", got)
	}
	if got := cut("x" + strings.Repeat("ü", 150)); len(got) != guestapi.MaxHookText-1 {
		t.Errorf("%d bytes", len(got))
	}
}

func TestHooksDoNotRunWhereTheyCouldNotBeKilled(t *testing.T) {
	f := newFolder(t)
	f.hook("1", "echo ran >$M/1", 0o755)
	parent, err := unix.Open(t.TempDir(), unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(parent)
	if err := unix.Symlinkat("/tmp", parent, groupsName); err != nil { // in the group's place
		t.Fatal(err)
	}
	r := f.runner()
	r.Parent = parent
	results, _ := r.Run(identity)
	if len(results) != 1 || results[0].Code != 126 || !strings.Contains(results[0].Error, "not run: open cgroup hooks") || f.trace("1") != "" {
		t.Errorf("%+v", results)
	}
}

// realParent is a cgroup of version 2, where this machine lets us make one.
func realParent(t *testing.T) (path string, fd int) {
	t.Helper()
	for _, top := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var st unix.Statfs_t
		if unix.Statfs(top, &st) != nil || st.Type != unix.CGROUP2_SUPER_MAGIC {
			continue
		}
		path, err := os.MkdirTemp(top, "warren-test-")
		if err != nil {
			continue
		}
		t.Cleanup(func() { os.Remove(path) })
		fd, err := unix.Open(path, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return path, fd
	}
	t.Skip("no cgroup2 that this test may write to")
	return "", 0
}

func TestNothingOfAHookRemains(t *testing.T) {
	path, fd := realParent(t)
	f := newFolder(t)
	// Out of the session: only the cgroup still knows what hook 1 left.
	f.hook("1", "setsid sleep 600 & echo $! >$M/child; exit 0", 0o755)
	f.hook("2", "setsid sh -c 'trap \"\" TERM; sleep 600; true' & sleep 600", 0o755)
	f.hook("3", "true", 0o755)
	r := f.runner()
	r.Parent, r.Each = fd, 2*time.Second
	for range 2 {
		results, _ := r.Run(identity)
		if got := fmt.Sprint(results); got != "[{1 0 } {2 124 killed after 2s} {3 0 }]" {
			t.Error(got)
		}
		child, err := strconv.Atoi(strings.TrimSpace(f.trace("child")))
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "what hook 1 left has been collected", func() bool { return syscall.Kill(child, 0) == syscall.ESRCH })
	}
	if err := os.Remove(path + "/" + groupsName); err != nil {
		t.Errorf("a group is left: %v", err)
	}
}

func TestGroupsThatAHookMadeDoNotHoldTheNextUp(t *testing.T) {
	path, fd := realParent(t)
	own := path + "/" + groupsName + "/0/own"
	t.Cleanup(func() {
		for _, dir := range []string{own, path + "/" + groupsName + "/0", path + "/" + groupsName} {
			if err := os.Remove(dir); err != nil {
				t.Error(err)
			}
		}
	})
	f := newFolder(t)
	f.hook("1", "mkdir "+own+" && { sleep 600 & echo $! >"+own+"/cgroup.procs; }", 0o755)
	f.hook("2", "true", 0o755)
	r := f.runner()
	r.Parent = fd
	results, _ := r.Run(identity)
	if got := fmt.Sprint(results); got != "[{1 0 } {2 0 }]" {
		t.Error(got)
	}
	if got, err := os.ReadFile(own + "/cgroup.procs"); err != nil || len(got) != 0 {
		t.Errorf("left: %q, %v", got, err)
	}
}
