package server

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/supervisor"
)

// ownVM is the life of an owner: it starts a VM, says "ready", and does
// nothing until it is killed. what is home, supervisor and socket.
func ownVM(what string) {
	part := strings.Split(what, "\n")
	home, vmm := store.Home(part[0]), part[1]
	dir, err := home.CreateVM(store.NewID())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(dir.Path)
	_, err = supervisor.Start(context.Background(), supervisor.Options{VMM: vmm, Dir: dir, Config: supervisor.Config{
		ID: dir.ID, Dir: dir.Path, ImageID: "image-1", VM: spec(killMB),
		Identity: supervisor.Identity{Hostname: "one"}, BootTimeout: patience,
	}})
	if err != nil {
		fmt.Println("error:", strings.ReplaceAll(err.Error(), "\n", " | "))
		dir.Remove()
		os.Exit(1)
	}
	dir.Close()
	fmt.Println("ready")
	select {}
}

// killMB is a size of memory that only the VMs of these tests have, so that
// any QEMU of theirs can be told from all others.
const killMB = 83

var execHang = guestapi.ExecRequest{Argv: []string{"hang"}}

// vmmDir holds the built supervisor; TestMain removes it.
var vmmDir string

var builtVMM = sync.OnceValues(func() (path string, err error) {
	if vmmDir, err = os.MkdirTemp("", "abox-vmm-test"); err != nil {
		return "", err
	}
	path = filepath.Join(vmmDir, supervisor.Name)
	out, err := exec.Command("go", "build", "-o", path, "github.com/warren-vm/warren/cmd/abox-vmm").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build abox-vmm: %w\n%s", err, out)
	}
	return path, nil
})

// realVMM is the real supervisor, built once.
func realVMM(t testing.TB) string {
	t.Helper()
	path, err := builtVMM()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// owner is an owner in a process of its own.
type owner struct {
	cmd   *exec.Cmd
	lines *bufio.Scanner
	dir   string
}

func startOwner(t *testing.T, home store.Home, vmm string) *owner {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	o := &owner{cmd: exec.Command(self)}
	o.cmd.Env = append(os.Environ(), fakeOwnerEnv+"="+string(home)+"\n"+vmm)
	o.cmd.Stderr = os.Stderr
	out, err := o.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := o.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { o.cmd.Process.Kill(); o.cmd.Wait() })
	o.lines = bufio.NewScanner(out)
	o.dir = o.line(t)
	return o
}

func (o *owner) line(t *testing.T) string {
	t.Helper()
	if !o.lines.Scan() {
		t.Fatalf("the owner says nothing: %v", o.lines.Err())
	}
	return o.lines.Text()
}

// qemus are the processes of QEMU and its jail that these tests' VMs have.
func qemus(t *testing.T) (pids []string) {
	t.Helper()
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err == nil && strings.Contains(string(data), fmt.Sprintf("size=%dM", killMB)) {
			pids = append(pids, filepath.Base(filepath.Dir(f)))
		}
	}
	return pids
}

// holders are the processes that have a file below home open: supervisors.
func holders(home store.Home) (pids []string) {
	links, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	self := fmt.Sprint(os.Getpid())
	for _, l := range links {
		to, err := os.Readlink(l)
		pid := strings.Split(l, "/")[2]
		if err == nil && pid != self && strings.HasPrefix(to, string(home)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// wantAllGone waits until no process of the VMs in home is left, sweeps, and
// checks that no file is either.
func wantAllGone(t *testing.T, home store.Home) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		left := append(qemus(t), holders(home)...)
		if len(left) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("processes left: %v", left)
		}
		time.Sleep(20 * time.Millisecond)
	}
	if _, err := home.Sweep(t.Context()); err != nil {
		t.Error(err)
	}
	wantNothingIn(t, home)
}

func rounds(t *testing.T, n int) int {
	t.Helper()
	if os.Getenv("WARREN_SOAK") != "" {
		return 20 * n
	}
	return n
}

// The VM's firmware waits for a kernel that never comes, so that the kill
// hits the start: anywhere from the creation of the folder to the wait for
// the guest.
func TestKillingTheOwnerAtAnyMomentOfAStartLeavesNothing(t *testing.T) {
	home, vmm := store.Home(filepath.Join(t.TempDir(), "w")), realVMM(t)
	for i := range rounds(t, 8) {
		o := startOwner(t, home, vmm)
		time.Sleep(time.Duration(rand.IntN(400)) * time.Millisecond)
		o.cmd.Process.Kill()
		o.cmd.Wait()
		wantAllGone(t, home)
		if t.Failed() {
			t.Fatalf("round %d", i)
		}
	}
}

func TestKillingTheSupervisorAtAnyMomentOfAStartIsAClearErrorAndLeavesNothing(t *testing.T) {
	home, vmm := store.Home(filepath.Join(t.TempDir(), "w")), realVMM(t)
	for i := range rounds(t, 8) {
		o := startOwner(t, home, vmm)
		pid := waitSupervisor(t, o)
		time.Sleep(time.Duration(rand.IntN(300)) * time.Millisecond)
		unix.Kill(pid, unix.SIGKILL)
		if got := o.line(t); !strings.Contains(got, "the supervisor died while it started the VM: signal: killed") {
			t.Errorf("round %d: %s", i, got)
		}
		o.cmd.Wait()
		wantAllGone(t, home)
	}
}

// waitSupervisor is the pid of the owner's child, once that is a supervisor:
// Go forks for reasons of its own, too.
func waitSupervisor(t *testing.T, o *owner) int {
	t.Helper()
	deadline := time.Now().Add(patience)
	for time.Now().Before(deadline) {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", o.cmd.Process.Pid))
		for _, f := range tasks {
			children, _ := os.ReadFile(f)
			for _, pid := range strings.Fields(string(children)) {
				name, _ := os.ReadFile("/proc/" + pid + "/cmdline")
				if n, err := strconv.Atoi(pid); err == nil && string(name) == supervisor.Name+"\x00" {
					return n
				}
			}
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatal("the owner starts no supervisor")
	return 0
}

func TestKillingQEMUWhileItBootsIsAClearErrorAndLeavesNothing(t *testing.T) {
	home := store.Home(filepath.Join(t.TempDir(), "w"))
	vmm := realVMM(t)
	go func() {
		for {
			vms, _ := home.VMs()
			if len(vms) > 0 && vms[0].Record.QEMU.PID != 0 {
				unix.Kill(vms[0].Record.QEMU.PID, unix.SIGKILL)
				return
			}
			select {
			case <-t.Context().Done():
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	}()
	_, _, err := startIn(t, home, vmm, func(c *supervisor.Config) { c.VM = spec(killMB) })
	if err == nil || !strings.Contains(err.Error(), "the VM ended while it booted: QEMU was killed by signal 9") {
		t.Errorf("error %v", err)
	}
	wantAllGone(t, home)
}

func TestAStartThatTakesTooLongOrIsCancelledLeavesNothing(t *testing.T) {
	home, vmm := store.Home(filepath.Join(t.TempDir(), "w")), realVMM(t)
	wantNoLeak(t, func() {
		_, _, err := startIn(t, home, vmm, func(c *supervisor.Config) { c.VM = spec(killMB); c.BootTimeout = time.Second })
		if err == nil || !strings.Contains(err.Error(), "the guest did not get ready within 1s") {
			t.Errorf("error %v", err)
		}
		wantAllGone(t, home)
	})
	dir, err := home.CreateVM("two")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err = supervisor.Start(ctx, supervisor.Options{VMM: vmm, Dir: dir, Config: supervisor.Config{
		ID: dir.ID, Dir: dir.Path, ImageID: "image-1", VM: spec(killMB), Outlive: true,
		Identity: supervisor.Identity{Hostname: "one"}, BootTimeout: patience,
	}})
	if err == nil || !strings.Contains(err.Error(), "deadline exceeded") {
		t.Errorf("error %v", err)
	}
	if err := dir.Remove(); err != nil {
		t.Error(err)
	}
	wantAllGone(t, home)
}

// From here on the guest is played by the test, so that the VM gets ready.

func TestKillingTheSupervisorOfARunningVMEndsEverything(t *testing.T) {
	c := startProcess(t, honest(), 0, nil)
	st, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	qemu, err := store.FindProcess(st.QEMUPID)
	if err != nil {
		t.Fatal(err)
	}
	unix.Kill(st.SupervisorPID, unix.SIGKILL)
	soon(t, c.Gone())
	wantErr(t, c.Err(), supervisor.ErrGone, "its supervisor died")
	_, _, err = run(t, c, "", "true")
	wantErr(t, err, supervisor.ErrGone, "its supervisor died")
	deadline := time.Now().Add(patience)
	for qemu.Alive() {
		if time.Now().After(deadline) {
			t.Fatal("QEMU lives on")
		}
		time.Sleep(5 * time.Millisecond)
	}
	// Close removes what the supervisor could not; the clean-up checks it.
}

func TestKillingQEMUOfARunningVMIsReportedAndCleanedUp(t *testing.T) {
	c := startProcess(t, honest(), 0, nil)
	st, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	e, err := c.Exec(t.Context(), execHang, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	unix.Kill(st.QEMUPID, unix.SIGKILL)
	_, err = e.Wait()
	wantErr(t, err, supervisor.ErrGone, "the sleeper was killed")
	soon(t, c.Gone())
	wantErr(t, c.Err(), supervisor.ErrGone, "the VM ended: the sleeper was killed")
}

func TestAVMThatMayOutliveItsStarterIsAdoptedAndStopped(t *testing.T) {
	var path string
	first := startProcess(t, honest(), 0, func(c *supervisor.Config) { c.Outlive = true; path = c.Dir })
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	c, err := supervisor.Connect(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(t.Context())
	if out, _, err := run(t, c, "", "echo", "adopted"); err != nil || out != "adopted\n" {
		t.Errorf("%q, %v", out, err)
	}
	st, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// Its own session: no terminal's signals reach it.
	if sid, err := unix.Getsid(st.SupervisorPID); err != nil || sid != st.SupervisorPID {
		t.Errorf("session %d of %d, %v", sid, st.SupervisorPID, err)
	}
	unix.Kill(st.SupervisorPID, syscall.SIGHUP)
	if err := c.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestTheSupervisorSeesNothingOfItsStartersEnvironment(t *testing.T) {
	t.Setenv("SOME_API_KEY", "secret")
	c := startProcess(t, honest(), 0, nil)
	st, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", st.SupervisorPID))
	if err != nil || strings.Contains(string(data), "SOME_API_KEY") {
		t.Errorf("%q, %v", data, err)
	}
}

func TestTheProgramTakesNoArgumentsAndNoConfigThatIsNone(t *testing.T) {
	vmm := realVMM(t)
	for _, row := range []struct {
		name, in string
		args     []string
		code     int
		want     string
	}{
		{"help", "", []string{"--help"}, 0, "abox-vmm runs one VM"},
		{"version", "", []string{"--version"}, 0, "abox-vmm "},
		{"an argument", "", []string{"--frobnicate"}, 2, `takes no arguments, got ["--frobnicate"]`},
		{"nothing", "", nil, 1, "read the VM's config: EOF"},
		{"no JSON", "hello", nil, 1, "read the VM's config: invalid character"},
		{"unknown field", `{"colour":1}`, nil, 1, `unknown field "colour"`},
		{"empty", `{}`, nil, 1, "VM id \"\""},
		{"too long", strings.Repeat(" ", 2<<20), nil, 1, "document of more than 1048576 bytes"},
	} {
		t.Run(row.name, func(t *testing.T) {
			cmd := exec.Command(vmm, row.args...)
			cmd.Stdin = strings.NewReader(row.in)
			out, _ := cmd.CombinedOutput()
			if code := cmd.ProcessState.ExitCode(); code != row.code || !strings.Contains(string(out), row.want) {
				t.Errorf("code %d, %s", code, out)
			}
		})
	}
}

func TestClientsThatMisbehaveHarmOnlyThemselves(t *testing.T) {
	r := start(t, rigOptions{guest: honest().play})
	head := "POST /v1/guest/v1/exec HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: warren-exec\r\n"
	body := `{"id":"a","argv":["cat"]}`
	for _, row := range []struct{ name, send, want string }{
		{"garbage", "\x00\xff\r\n\r\n", "400"},
		{"unknown call", "GET /etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", "this supervisor has no call"},
		{"prepare is not for clients", "POST /v1/guest/v1/prepare HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", "this supervisor has no call"},
		{"endless header", "GET / HTTP/1.1\r\n" + strings.Repeat("A: b\r\n", 100_000), "431"},
		{"huge body", "POST /v1/guest/v1/file/stat HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + strings.Repeat(" ", 1_000_000), "document of more than"},
		{"unknown field", "POST /v1/guest/v1/file/stat HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n\r\n" + `{"a":1}`, "unknown field"},
		{"no upgrade", "POST /v1/guest/v1/exec HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", "exec needs the header"},
		{"stdin without notice", head + fmt.Sprintf("Content-Length: %d\r\n\r\n%s\x01\x00\x00\x00\x01x", len(body), body), "without an announced one"},
		{"huge frame", head + fmt.Sprintf("Content-Length: %d\r\n\r\n%s\x01\xff\xff\xff\xff", len(body), body), "exec frame of"},
		{"bad stop", "POST /v1/stop?mode=maybe HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", "stop mode"},
		{"bad transfer", "GET /v1/guest/v1/file?path=/f&surprise=1 HTTP/1.1\r\nHost: x\r\n\r\n", "a transfer has a path"},
	} {
		t.Run(row.name, func(t *testing.T) {
			conn, err := net.Dial("unix", filepath.Join(r.dir, store.ControlName))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(patience))
			go conn.Write([]byte(row.send))
			var got strings.Builder
			buf := make([]byte, 4096)
			for !strings.Contains(got.String(), row.want) {
				n, err := conn.Read(buf)
				got.Write(buf[:n])
				if err != nil {
					t.Fatalf("%v after %q, want %q", err, got.String(), row.want)
				}
			}
		})
	}
	if _, _, err := run(t, r.client, "", "true"); err != nil {
		t.Error(err)
	}
}

// A thousand connections that say nothing must not keep a real call out for
// longer than the time they are given.
func TestManySilentClientsDoNotFillTheSupervisor(t *testing.T) {
	r := start(t, rigOptions{guest: honest().play})
	var open []net.Conn
	for range 400 {
		conn, err := net.Dial("unix", filepath.Join(r.dir, store.ControlName))
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, conn)
	}
	if _, _, err := run(t, r.client, "", "true"); err != nil {
		t.Error(err)
	}
	for _, c := range open {
		c.Close()
	}
}
