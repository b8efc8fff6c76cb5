package proc

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestapi"
)

// reaper collects every child of the test binary, as it does in PID 1: orphans
// come to a child subreaper too.
var reaper *Reaper

func TestMain(m *testing.M) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	reaper = NewReaper()
	os.Exit(m.Run())
}

// shell starts a script of bash, which gives jobs groups of their own even
// without a terminal, in a session of its own, with stdout in a pipe
// whose reading end is returned.
func shell(t *testing.T, script string) (*Process, *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	null, err := DevNull()
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(null)
	p, err := reaper.Start("/bin/bash", []string{"bash", "-c", script}, &syscall.ProcAttr{
		Env:   []string{"PATH=" + DefaultPath},
		Files: []uintptr{uintptr(null), w.Fd(), uintptr(null)},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.Close()
		reaper.SignalSession(p, syscall.SIGKILL, nil)
		<-p.Done()
	})
	return p, r
}

// line reads one line, byte by byte, so that nothing after it is lost.
func line(t *testing.T, f *os.File) string {
	t.Helper()
	var b []byte
	for one := make([]byte, 1); ; b = append(b, one[0]) {
		if _, err := f.Read(one); err != nil {
			t.Fatalf("after %q: %v", b, err)
		}
		if one[0] == '\n' {
			return string(b)
		}
	}
}

func ended(t *testing.T, p *Process) syscall.WaitStatus {
	t.Helper()
	select {
	case <-p.Done():
		return p.Status()
	case <-time.After(30 * time.Second):
		t.Fatal("the program's end was not reported")
		panic("unreachable")
	}
}

// eventually polls until ok.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never: " + what)
		}
	}
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

func TestEveryEndIsReportedToItsStarterAlone(t *testing.T) {
	var all []*Process
	for i := range 100 {
		p, _ := shell(t, "exit "+strconv.Itoa(i))
		all = append(all, p)
	}
	for i, p := range all {
		if ws := ended(t, p); !ws.Exited() || ws.ExitStatus() != i {
			t.Errorf("run %d ended with %v", i, ws)
		}
	}
}

func TestOrphansAreCollected(t *testing.T) {
	p, out := shell(t, "sleep 0.2 & echo $!")
	orphan, err := strconv.Atoi(line(t, out))
	if err != nil {
		t.Fatal(err)
	}
	ended(t, p)
	// A zombie would answer to kill for ever.
	eventually(t, "the orphan is gone", func() bool { return !alive(orphan) })
}

func TestProgramThatCannotStartLeavesNoChild(t *testing.T) {
	_, err := reaper.Start("/nonexistent/program", []string{"x"}, &syscall.ProcAttr{})
	if !errors.Is(err, syscall.ENOENT) {
		t.Fatalf("error %v, want ENOENT", err)
	}
	select {
	case <-reaper.None():
	case <-time.After(30 * time.Second):
		t.Fatal("a child is left")
	}
}

func TestNoneIsToldWhenTheLastChildHasEnded(t *testing.T) {
	p, _ := shell(t, "exec sleep 60")
	none := reaper.None()
	select {
	case <-none:
		t.Fatal("none, with a child running")
	case <-time.After(50 * time.Millisecond):
	}
	if err := reaper.SignalGroup(p, syscall.SIGKILL, nil); err != nil {
		t.Fatal(err)
	}
	select {
	case <-none:
	case <-time.After(30 * time.Second):
		t.Fatal("never told")
	}
}

func TestEndedProgramIsNotSignalled(t *testing.T) {
	p, _ := shell(t, "exit 0")
	ended(t, p)
	noted := false
	if err := reaper.SignalGroup(p, syscall.SIGKILL, func() { noted = true }); err != ErrEnded || noted {
		t.Errorf("error %v, noted %v", err, noted)
	}
}

func TestSessionSignalReachesJobsWithGroupsOfTheirOwn(t *testing.T) {
	p, out := shell(t, "set -m; sleep 60 & echo $!; wait")
	job, err := strconv.Atoi(line(t, out))
	if err != nil {
		t.Fatal(err)
	}
	if pgid, err := syscall.Getpgid(job); err != nil || pgid == p.PID() {
		t.Fatalf("the job's group is %d (%v): not a group of its own", pgid, err)
	}
	reaper.SignalSession(p, syscall.SIGKILL, nil)
	ended(t, p)
	eventually(t, "the job is gone", func() bool { return !alive(job) })
}

func TestSessionSignalReachesWhatAnEndedProgramLeft(t *testing.T) {
	p, out := shell(t, "sleep 60 & echo $!")
	left, err := strconv.Atoi(line(t, out))
	if err != nil {
		t.Fatal(err)
	}
	ended(t, p)
	reaper.SignalSession(p, syscall.SIGKILL, func() { t.Error("noted for an ended program") })
	eventually(t, "the child is gone", func() bool { return !alive(left) })
}

func TestStatIsReadWhateverTheProgramIsCalled(t *testing.T) {
	got, ok := parseStat([]byte("71 (a) R 9 9) ( x) S 1 70 69 0 -1 4194560"))
	if want := (Stat{State: 'S', Parent: 1, Group: 70, Session: 69}); !ok || got != want {
		t.Errorf("got %+v, %v", got, ok)
	}
	for _, bad := range []string{"", "71", "71 (x)", "71 (x) S", "71 (x) S a b c"} {
		if _, ok := parseStat([]byte(bad)); ok {
			t.Errorf("%q was read", bad)
		}
	}
}

// accounts makes an /etc with two users.
func accounts(t *testing.T) (*Accounts, string) {
	t.Helper()
	etc := t.TempDir()
	write(t, etc+"/passwd", "root:x:0:0:root:/root:/bin/bash\n# a comment\nbroken\nagent:x:1000:1000:,,,:/home/agent:/bin/sh\n")
	write(t, etc+"/group", "root:x:0:\nagent:x:1000:agent\nvideo:x:44:root,agent\nbad:x:y:agent\ndocker:x:999:agent\n")
	return NewAccounts(etc), etc
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestUsersAreFoundByNameAndNumber(t *testing.T) {
	a, _ := accounts(t)
	for _, c := range []struct {
		ask  string
		want User
	}{
		{"", User{Name: "root", Home: "/root", Groups: []uint32{44}}},
		{"root", User{Name: "root", Home: "/root", Groups: []uint32{44}}},
		{"agent", User{Name: "agent", UID: 1000, GID: 1000, Home: "/home/agent", Groups: []uint32{44, 999}}},
		{"1000", User{Name: "agent", UID: 1000, GID: 1000, Home: "/home/agent", Groups: []uint32{44, 999}}},
		{"1000:7", User{Name: "agent", UID: 1000, GID: 7, Home: "/home/agent"}},
		{"5000", User{Name: "5000", UID: 5000, GID: 5000, Home: "/"}},
		{"5000:6", User{Name: "5000", UID: 5000, GID: 6, Home: "/"}},
	} {
		got, err := a.Lookup(c.ask)
		if err != nil || got.Name != c.want.Name || got.UID != c.want.UID || got.GID != c.want.GID ||
			got.Home != c.want.Home || !slices.Equal(got.Groups, c.want.Groups) {
			t.Errorf("%q: got %+v, %v; want %+v", c.ask, got, err, c.want)
		}
	}
	for _, bad := range []string{"nobody-here", "-1", "4294967295", "99999999999", "1000:x", "1000:", "agent:0"} {
		if u, err := a.Lookup(bad); err == nil {
			t.Errorf("%q was found: %+v", bad, u)
		}
	}
}

func TestChangedAccountsAreSeenAtOnce(t *testing.T) {
	a, etc := accounts(t)
	if _, err := a.Lookup("new"); err == nil {
		t.Fatal("found before it was there")
	}
	write(t, etc+"/passwd", "new:x:77:78::/n:/bin/sh\n")
	if u, err := a.Lookup("new"); err != nil || u.UID != 77 {
		t.Fatalf("got %+v, %v", u, err)
	}
	if err := os.Remove(etc + "/passwd"); err != nil {
		t.Fatal(err)
	}
	if u, err := a.Lookup("root"); err != nil || u.UID != 0 {
		t.Fatalf("root without a passwd file: %+v, %v", u, err)
	}
}

func resolve(t *testing.T, req guestapi.ExecRequest) (*Command, *guestapi.Error) {
	t.Helper()
	a, _ := accounts(t)
	c, err := a.Resolve(&req)
	if err == nil {
		return c, nil
	}
	var e *guestapi.Error
	if !errors.As(err, &e) {
		t.Fatalf("error without a code: %v", err)
	}
	return nil, e
}

func TestEnvironmentHasDefaultsAndTheCallersWord(t *testing.T) {
	c, err := resolve(t, guestapi.ExecRequest{
		Argv: []string{"sh"}, Dir: "/", TTY: true,
		Env: []string{"A=1", "LANG=de_DE.UTF-8", "A=2", "EMPTY=", "X==y"},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"PATH=" + DefaultPath, "HOME=/root", "USER=root", "LANG=de_DE.UTF-8", "TERM=xterm-256color", "A=2", "EMPTY=", "X==y"}
	if !slices.Equal(c.Env, want) {
		t.Errorf("got  %q\nwant %q", c.Env, want)
	}
}

func TestManyVariablesKeepTheRules(t *testing.T) {
	var env []string
	for i := range 1000 {
		env = append(env, "V"+strconv.Itoa(i%500)+"="+strconv.Itoa(i))
	}
	c, err := resolve(t, guestapi.ExecRequest{Argv: []string{"sh"}, Dir: "/", Env: append(env, "HOME=/h")})
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Env) != 504 || !slices.Contains(c.Env, "V3=503") || slices.Contains(c.Env, "V3=3") ||
		!slices.Contains(c.Env, "HOME=/h") || slices.Contains(c.Env, "HOME=/root") {
		t.Errorf("%d variables: %q", len(c.Env), c.Env)
	}
}

func TestProgramsAreFoundAsAShellFindsThem(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"one", "two"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, dir+"/one/tool", "not executable")
	write(t, dir+"/two/tool", "#!/bin/sh\n")
	write(t, dir+"/one/plain", "not executable")
	if err := os.Chmod(dir+"/two/tool", 0o755); err != nil {
		t.Fatal(err)
	}
	path := []string{"PATH=" + dir + "/none:" + dir + "/one:" + dir + "/two"}
	for _, c := range []struct {
		name, argv0, dir, want string
		code                   guestapi.Code
	}{
		{"passes over what cannot run", "tool", "", dir + "/two/tool", ""},
		{"absolute path", dir + "/two/tool", "", dir + "/two/tool", ""},
		{"path from the working folder", "./tool", dir + "/two", dir + "/two/tool", ""},
		{"nowhere", "absent", "", "", guestapi.CodeNotFound},
		{"nowhere by path", "/absent", "", "", guestapi.CodeNotFound},
		{"under a file", dir + "/one/tool/x", "", "", guestapi.CodeNotFound},
		{"only without its bit", "plain", "", "", guestapi.CodeNotExecutable},
		{"a folder", dir + "/one", "", "", guestapi.CodeNotExecutable},
		{"no such folder", "tool", dir + "/three", "", guestapi.CodeNotFound},
		{"relative folder", "tool", "two", "", guestapi.CodeBadRequest},
		{"zero byte", "to\x00ol", "", "", guestapi.CodeBadRequest},
	} {
		got, err := resolve(t, guestapi.ExecRequest{Argv: []string{c.argv0}, Dir: c.dir, Env: path})
		switch {
		case c.code != "" && (err == nil || err.Code != c.code):
			t.Errorf("%s: error %v, want %s", c.name, err, c.code)
		case c.code == "" && (err != nil || got.Path != c.want):
			t.Errorf("%s: got %+v, %v", c.name, got, err)
		}
	}
	for _, env := range []string{"", "=x", "noequals", "A=\x00"} {
		if _, err := resolve(t, guestapi.ExecRequest{Argv: []string{"sh"}, Env: []string{env}}); err == nil || err.Code != guestapi.CodeBadRequest {
			t.Errorf("variable %q: error %v", env, err)
		}
	}
	if _, err := resolve(t, guestapi.ExecRequest{}); err == nil || err.Code != guestapi.CodeBadRequest {
		t.Errorf("no program: error %v", err)
	}
}

func TestStartErrorsSayWhatToDo(t *testing.T) {
	c := &Command{Path: "/bin/x", Dir: "/d", User: User{Name: "agent"}}
	for errno, want := range map[syscall.Errno]struct {
		code guestapi.Code
		text string
	}{
		syscall.ENOENT:  {guestapi.CodeNotExecutable, "interpreter"},
		syscall.ENOEXEC: {guestapi.CodeNotExecutable, "#!"},
		syscall.EACCES:  {guestapi.CodeNotExecutable, "as agent"},
		syscall.E2BIG:   {guestapi.CodeBadRequest, "too long"},
		syscall.EAGAIN:  {guestapi.CodeTooMany, "stop some"},
		syscall.ENOMEM:  {guestapi.CodeInternal, "memory"},
	} {
		var e *guestapi.Error
		if err := c.Explain(errno); !errors.As(err, &e) || e.Code != want.code || !strings.Contains(e.Message, want.text) {
			t.Errorf("%v: %v", errno, err)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("71 (cat) S 1 70 69 0"))
	f.Fuzz(func(t *testing.T, data []byte) { parseStat(data) })
}

func FuzzAccounts(f *testing.F) {
	f.Add("root:x:0:0::/root:/bin/sh\n", "1000:5")
	f.Fuzz(func(t *testing.T, passwd, user string) {
		etc := t.TempDir()
		write(t, etc+"/passwd", passwd)
		write(t, etc+"/group", passwd)
		NewAccounts(etc).Lookup(user)
	})
}
