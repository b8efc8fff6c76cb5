package jail

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const startAndWait = "WARREN_TEST_START_AND_WAIT"

func TestMain(m *testing.M) {
	Main()
	if os.Getenv(startAndWait) != "" {
		beParent()
	}
	os.Exit(m.Run())
}

// beParent starts a program, says its pid and waits to be killed.
func beParent() {
	p, err := Start(context.Background(), command("sleep", "1000"))
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(p.PID())
	select {}
}

// command is a program of /usr/bin as the caller's kind of user runs it.
func command(program string, args ...string) Command {
	path, err := filepath.EvalSymlinks("/usr/bin/" + program)
	if err != nil {
		path = "/usr/bin/" + program
	}
	c := Command{Path: path, Args: args, Limits: Limits{FileSize: 1 << 20, OpenFiles: 100}}
	if os.Geteuid() == 0 {
		c.User = &User{UID: 65532, GID: 65532}
	}
	return c
}

// run runs a command to its end and returns its output.
func run(t *testing.T, c Command) (string, *os.ProcessState) {
	t.Helper()
	checkNothingLeft(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	c.Output = w
	p, err := Start(t.Context(), c)
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(r)
	if err != nil {
		t.Error(err)
	}
	<-p.Done()
	return string(out), p.State()
}

// checkNothingLeft fails the test when it ends with more goroutines,
// descriptors or children than it has now.
func checkNothingLeft(t *testing.T) {
	t.Helper()
	goroutines, fds := runtime.NumGoroutine(), openFDs()
	t.Cleanup(func() {
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			g, f := runtime.NumGoroutine(), openFDs()
			if g <= goroutines && f <= fds {
				return
			}
			if time.Now().After(end) {
				t.Errorf("left over: %d goroutines (%d before), %d descriptors (%d before)", g, goroutines, f, fds)
				return
			}
		}
	})
}

func openFDs() int {
	entries, _ := os.ReadDir("/proc/self/fd")
	return len(entries)
}

func TestTheProgramSeesOnlyWhatItWasGiven(t *testing.T) {
	dir := t.TempDir()
	mine := filepath.Join(dir, "mine")
	if err := os.WriteFile(mine, []byte("payload"), 0o644); err != nil {
		t.Fatal(err)
	}
	c := command("sh", "-c", `
		for f in / /vm /dev /etc; do echo $f: $(ls $f); done
		cat /vm/disk; echo
		for f in /etc/passwd /proc/self /home /root /tmp `+dir+`; do test -e $f && echo sees $f; done
		echo x 2>/dev/null >/vm/disk && echo wrote
		echo x 2>/dev/null >/new && echo wrote
		echo x 2>/dev/null >/usr/new && echo wrote
		echo x >/dev/null && head -c 4 /dev/urandom | wc -c
		echo host $(uname -n), env $(env | sort | tr '\n' ' ')
		id -u >&2; true`)
	c.Files = []File{{Host: mine, Inside: "/vm/disk"}}
	out, state := run(t, c)
	if !state.Success() {
		t.Errorf("ended with %v", state)
	}
	for _, want := range []string{"/vm: disk\n", "/dev: null urandom\n", "payload\n", "host vm,", "\n4\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is missing", want)
		}
	}
	for _, bad := range []string{"sees", "wrote", os.Getenv("HOME") + "\n"} {
		if bad != "\n" && strings.Contains(out, bad) {
			t.Errorf("%q must not be", bad)
		}
	}
	for _, line := range strings.Split(out, "\n") {
		if names, ok := strings.CutPrefix(line, "/: "); ok {
			for _, name := range strings.Fields(names) {
				if !strings.Contains(" bin dev etc lib lib32 lib64 libx32 sbin usr vm ", " "+name+" ") {
					t.Errorf("there is /%s", name)
				}
			}
		}
		if names, ok := strings.CutPrefix(line, "/etc: "); ok && names != "ld.so.cache" {
			t.Errorf("/etc holds %s", names)
		}
	}
	if t.Failed() {
		t.Log(out)
	}
}

func TestAWritableFileIsWrittenThrough(t *testing.T) {
	mine := filepath.Join(t.TempDir(), "data")
	if err := os.WriteFile(mine, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := command("sh", "-c", "echo from inside >/vm/data")
	if c.User != nil {
		os.Chown(mine, c.User.UID, c.User.GID)
	}
	c.Files = []File{{Host: mine, Inside: "/vm/data", Writable: true}}
	out, _ := run(t, c)
	if text, err := os.ReadFile(mine); err != nil || string(text) != "from inside\n" {
		t.Errorf("file holds %q, %v; program said %q", text, err, out)
	}
}

func TestTheProgramHasNoRightsLeft(t *testing.T) {
	checkNothingLeft(t)
	p, err := Start(t.Context(), command("sleep", "1000"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { p.Signal(syscall.SIGKILL); <-p.Done() }()
	status := readStatus(t, p.PID())
	for name, want := range map[string]string{
		"CapInh": "0000000000000000", "CapPrm": "0000000000000000", "CapEff": "0000000000000000",
		"CapBnd": "0000000000000000", "CapAmb": "0000000000000000", "NoNewPrivs": "1",
	} {
		if status[name] != want {
			t.Errorf("%s is %q, want %q", name, status[name], want)
		}
	}
	for _, name := range []string{"Uid", "Gid"} {
		for _, id := range strings.Fields(status[name]) {
			if id == "0" {
				t.Errorf("%s: %s", name, status[name])
			}
		}
	}
	if os.Geteuid() == 0 && strings.TrimSpace(status["Groups"]) != "" {
		t.Errorf("supplementary groups %q", status["Groups"])
	}
	if pids := strings.Fields(status["NSpid"]); len(pids) < 2 || pids[len(pids)-1] != "1" {
		t.Errorf("pids %v: not the first of its own namespace", pids)
	}
	for _, ns := range []string{"mnt", "pid", "net", "ipc", "uts", "cgroup"} {
		ours, _ := os.Readlink("/proc/self/ns/" + ns)
		theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", p.PID(), ns))
		if err != nil || ours == theirs {
			t.Errorf("%s namespace: ours %s, its %s, %v", ns, ours, theirs, err)
		}
	}
	limits, _ := os.ReadFile(fmt.Sprintf("/proc/%d/limits", p.PID()))
	for _, want := range []string{"Max core file size 0 0", "Max open files 100 100", "Max file size 1048576 1048576", "Max locked memory 0 0"} {
		if !strings.Contains(strings.Join(strings.Fields(string(limits)), " "), want) {
			t.Errorf("limits do not say %q:\n%s", want, limits)
		}
	}
}

func readStatus(t *testing.T, pid int) map[string]string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	status := map[string]string{}
	for line := range strings.Lines(string(data)) {
		name, value, _ := strings.Cut(line, ":")
		status[name] = strings.TrimSpace(value)
	}
	return status
}

func TestOnlyTheDescriptorsGivenAreInherited(t *testing.T) {
	// Given a descriptor that someone else left open for children.
	stray, err := unix.Open("/dev/null", unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(stray)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	c := command("sh", "-c", fmt.Sprintf("echo hello >&%d; exec sleep 1000", FirstFD+1))
	c.FDs = []*os.File{r, w}
	p, err := Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { p.Signal(syscall.SIGKILL); <-p.Done() }()
	buf := make([]byte, 6)
	if _, err := io.ReadFull(r, buf); err != nil || string(buf) != "hello\n" {
		t.Fatalf("%q, %v", buf, err)
	}
	// The shell's own descriptors are gone once it has become sleep.
	var got string
	for end := time.Now().Add(20 * time.Second); got != "0 1 2 4 5" && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.PID()))
		if err != nil {
			t.Fatal(err)
		}
		var fds []string
		for _, e := range entries {
			fds = append(fds, e.Name())
		}
		got = strings.Join(fds, " ")
	}
	if got != "0 1 2 4 5" {
		t.Errorf("descriptors %s", got)
	}
}

func TestTheNetworkIsEmpty(t *testing.T) {
	p, err := Start(t.Context(), command("sleep", "1000"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { p.Signal(syscall.SIGKILL); <-p.Done() }()
	if names := interfaces(t, p.PID()); len(names) != 1 || names[0] != "lo" {
		t.Errorf("interfaces %v", names)
	}
}

// interfaces lists the network interfaces a process has.
func interfaces(t *testing.T, pid int) []string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/dev", pid))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, line := range strings.Split(string(data), "\n")[2:] {
		if name, _, ok := strings.Cut(line, ":"); ok {
			names = append(names, strings.TrimSpace(name))
		}
	}
	return names
}

func TestTheProgramDiesWithItsStarter(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	parent := exec.Command(self)
	parent.Env = append(os.Environ(), startAndWait+"=1")
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatalf("the parent says %q", line)
	}
	if !alive(pid) {
		t.Fatal("the program does not run: the test proves nothing")
	}
	parent.Process.Kill()
	parent.Wait()
	for end := time.Now().Add(20 * time.Second); alive(pid); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			syscall.Kill(pid, syscall.SIGKILL)
			t.Fatal("it lives on without its starter")
		}
	}
}

// alive tells a running process from none and from one that waits for a
// parent to take note of its end.
func alive(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	state := string(data[bytes.LastIndexByte(data, ')')+2])
	return state != "Z" && state != "X"
}

func TestWhatCannotBeIsSaidAndNothingRuns(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	os.WriteFile(file, nil, 0o644)
	for _, c := range []struct {
		name   string
		change func(*Command)
		want   string
	}{
		{"no such program", func(c *Command) { c.Path = "/usr/bin/no-such-program" }, "run /usr/bin/no-such-program: no such file or directory"},
		{"program outside", func(c *Command) { c.Path = file }, "run " + file + ": no such file or directory"},
		{"relative program", func(c *Command) { c.Path = "sleep" }, "the path must be absolute"},
		{"no such file", func(c *Command) { c.Files = []File{{Host: "/no/such", Inside: "/vm/a"}} }, "open /no/such: no such file or directory"},
		{"folder for a file", func(c *Command) { c.Files = []File{{Host: "/usr", Inside: "/vm/a"}} }, "a folder where a file should be"},
		{"same place twice", func(c *Command) { c.Files = []File{{file, "/vm/a", false}, {file, "/vm/a", false}} }, "bind /vm/a: file exists"},
		{"relative file", func(c *Command) { c.Files = []File{{Host: file, Inside: "vm/a"}} }, "paths must be absolute"},
		{"no such device", func(c *Command) { c.Devices = []string{"/dev/no-such"} }, "open /dev/no-such"},
	} {
		t.Run(c.name, func(t *testing.T) {
			checkNothingLeft(t)
			command := command("sleep", "1000")
			c.change(&command)
			_, err := Start(t.Context(), command)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want it to say %q", err, c.want)
			}
		})
	}
}

func TestNobodyStaysRoot(t *testing.T) {
	c := command("true")
	if os.Geteuid() != 0 {
		c.User = &User{UID: 5, GID: 5}
		if _, err := Start(t.Context(), c); err == nil {
			t.Error("an ordinary user could name another")
		}
		return
	}
	for _, user := range []*User{nil, {UID: 0, GID: 5}, {UID: 5, GID: 0}} {
		c.User = user
		if _, err := Start(t.Context(), c); err == nil {
			t.Errorf("ran as %v", user)
		}
	}
}

func TestAStartThatIsGivenUpLeavesNothing(t *testing.T) {
	checkNothingLeft(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Start(ctx, command("sleep", "1000")); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestStageTwoByHandDoesNothing(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := &exec.Cmd{Path: self, Args: []string{Name, "-test.run=none"}}
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 2 {
		t.Errorf("ended with %v", err)
	}
	want := "warren-jail: not the first process of a jail; it is a part of abox-vmm and not for use by hand\n"
	if string(out) != want {
		t.Errorf("said %q", out)
	}
}

func TestRefusedNamespacesNameTheirRemedy(t *testing.T) {
	if os.Geteuid() == 0 {
		err := explainSpawn(unix.EPERM)
		if !strings.Contains(err.Error(), "CAP_SYS_ADMIN") {
			t.Errorf("got %v", err)
		}
	} else {
		for _, err := range []error{
			explainSpawn(unix.EPERM), explainSpawn(unix.ENOSPC),
			fault{Step: "mount a tmpfs", Errno: unix.EACCES, Mounts: true}.explain(),
		} {
			if !strings.Contains(err.Error(), "unprivileged user namespaces") || !strings.Contains(err.Error(), "run as root") {
				t.Errorf("got %v", err)
			}
		}
	}
	if err := (fault{Step: "open /usr", Errno: unix.ENOSYS, Mounts: true}).explain(); !strings.Contains(err.Error(), "Linux 5.12") {
		t.Errorf("got %v", err)
	}
}

// TestAnOrdinaryUserGetsTheSameJail runs this file's tests again as a user
// without rights, when we are root.
func TestAnOrdinaryUserGetsTheSameJail(t *testing.T) {
	if os.Geteuid() != 0 {
		return // then every test here has already shown it
	}
	const uid = 54321
	dir, err := os.MkdirTemp("", "warren-jail-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	os.Chown(dir, uid, uid)
	program := filepath.Join(dir, "jail.test")
	if err := os.WriteFile(program, self, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "-test.v", "-test.run=^Test")
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "TMPDIR=" + dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestTheProgramHasNoRightsLeft") {
		t.Errorf("as uid %d: %v\n%s", uid, err, out)
	}
}

// BenchmarkStart is what the jail costs: from nothing to a program that has
// run and ended. BenchmarkPlain is the same program without it.
func BenchmarkStart(b *testing.B) {
	for b.Loop() {
		p, err := Start(b.Context(), command("true"))
		if err != nil {
			b.Fatal(err)
		}
		<-p.Done()
	}
}

func BenchmarkPlain(b *testing.B) {
	for b.Loop() {
		if err := exec.Command("/usr/bin/true").Run(); err != nil {
			b.Fatal(err)
		}
	}
}
