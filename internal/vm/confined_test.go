package vm

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// beParent starts a VM, says QEMU's pid and waits to be killed.
func beParent() {
	v, err := Start(context.Background(), paused, Options{})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(v.PID())
	select {}
}

// TestQEMUIsConfined looks at a running QEMU from outside.
func TestQEMUIsConfined(t *testing.T) {
	// Given a home with something in it, and a VM with one file of its own.
	home := t.TempDir()
	t.Setenv("HOME", home)
	canary := filepath.Join(home, "canary")
	if err := os.WriteFile(canary, []byte("secret"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("WARREN_TEST_SECRET", "secret")
	s := paused
	s.RootDisk = writeFile(t, "root.img", make([]byte, 1<<20))
	s.Memory = filepath.Join(home, "memory")
	v := start(t, s, Options{})

	status := procFile(t, v, "status")
	for _, want := range []string{
		"Seccomp:\t2", "NoNewPrivs:\t1",
		"CapInh:\t0000000000000000", "CapPrm:\t0000000000000000", "CapEff:\t0000000000000000",
		"CapBnd:\t0000000000000000", "CapAmb:\t0000000000000000",
	} {
		if !strings.Contains(status, "\n"+want+"\n") {
			t.Errorf("status does not say %q", want)
		}
	}
	for _, name := range []string{"Uid", "Gid"} {
		_, ids, _ := strings.Cut(status, "\n"+name+":\t")
		ids, _, _ = strings.Cut(ids, "\n")
		if fields := strings.Fields(ids); len(fields) != 4 || strings.Contains(" "+ids+" ", "\t0\t") || fields[0] == "0" {
			t.Errorf("%s: %s", name, ids)
		}
	}
	if t.Failed() {
		t.Log(status)
	}

	t.Run("files", func(t *testing.T) { onlyItsFiles(t, v, canary) })
	t.Run("namespaces", func(t *testing.T) { ownNamespaces(t, v) })
	if env := procFile(t, v, "environ"); strings.Contains(env, "secret") || strings.Contains(env, home) {
		t.Errorf("environment: %q", env)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", v.PID()))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		// Whatever QEMU has open is a socket, anonymous, or in its own root.
		target, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", v.PID(), fd.Name()))
		if strings.HasPrefix(target, "/") && target != "/dev/null" && !strings.HasPrefix(target, "/vm/") && !strings.HasSuffix(target, filepath.Base(s.RootDisk)) && target != s.Memory {
			t.Errorf("descriptor %s is %s", fd.Name(), target)
		}
	}
}

func procFile(t *testing.T, v *VM, name string) string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", v.PID(), name))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func onlyItsFiles(t *testing.T, v *VM, canary string) {
	root := fmt.Sprintf("/proc/%d/root", v.PID())
	if _, err := os.Stat(root + "/vm/root.img"); err != nil {
		t.Fatalf("its own disk is not there, so the rest proves nothing: %v", err)
	}
	for _, path := range []string{canary, filepath.Dir(canary), "/etc/passwd", "/etc/shadow", "/proc/self", "/root", "/home", "/tmp", "/var", "/run", "/dev/shm", "/dev/kvm"} {
		if _, err := os.Lstat(root + path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", path, err)
		}
	}
	err := filepath.WalkDir(root+"/sys", func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() && !slices.Contains(hugePages, strings.TrimPrefix(path, root)) {
			t.Errorf("of /sys it sees %s", path)
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	var names []string
	entries, err := os.ReadDir(root + "/vm")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if got := strings.Join(names, " "); got != "memory root.img" {
		t.Errorf("/vm holds %s", got)
	}
	for _, line := range strings.Split(strings.TrimSpace(procFile(t, v, "mountinfo")), "\n") {
		fields := strings.Fields(line)
		at, options := fields[4], ","+fields[5]+","
		writable := at == "/vm/memory" || at == "/vm/data.qcow2"
		if strings.Contains(options, ",rw,") != writable {
			t.Errorf("mount %s: %s", at, options)
		}
		if !strings.Contains(options, ",nosuid,") || !strings.HasPrefix(at, "/dev/") && !strings.Contains(options, ",nodev,") {
			t.Errorf("mount %s: %s", at, options)
		}
	}
}

func ownNamespaces(t *testing.T, v *VM) {
	for _, ns := range []string{"mnt", "pid", "net", "ipc", "uts", "cgroup"} {
		ours, _ := os.Readlink("/proc/self/ns/" + ns)
		its, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", v.PID(), ns))
		if err != nil || ours == its {
			t.Errorf("%s: ours %s, its %s, %v", ns, ours, its, err)
		}
	}
	lines := strings.Split(strings.TrimSpace(procFile(t, v, "net/dev")), "\n")[2:]
	if len(lines) != 1 || !strings.HasPrefix(strings.TrimSpace(lines[0]), "lo:") {
		t.Errorf("network interfaces: %q", lines)
	}
}

func TestQEMUDiesWithItsParent(t *testing.T) {
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
	if err != nil || !alive(pid) {
		parent.Process.Kill()
		parent.Wait()
		t.Fatalf("the parent says %q", line)
	}
	parent.Process.Kill()
	parent.Wait()
	for end := time.Now().Add(patience); alive(pid); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			syscall.Kill(pid, syscall.SIGKILL)
			t.Fatal("QEMU lives on")
		}
	}
}

func TestWhatQEMUWritesBelongsToItsUser(t *testing.T) {
	s := paused
	s.Memory = filepath.Join(t.TempDir(), "memory")
	start(t, s, Options{})
	info, err := os.Stat(s.Memory)
	if err != nil {
		t.Fatal(err)
	}
	want := os.Geteuid()
	if want == 0 {
		user, err := vmUser(TCG)
		if err != nil {
			t.Fatal(err)
		}
		want = user.UID
	}
	if uid := int(info.Sys().(*syscall.Stat_t).Uid); uid != want || uid == 0 {
		t.Errorf("memory belongs to %d, want %d", uid, want)
	}
}

// TestAnOrdinaryUserGetsTheSame runs the tests that need QEMU again as a user
// without rights, when we are root.
func TestAnOrdinaryUserGetsTheSame(t *testing.T) {
	if os.Geteuid() != 0 {
		return // then every test here has already shown it
	}
	const uid = 54321
	dir, err := os.MkdirTemp("", "warren-vm-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(dir, uid, uid); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "vm.test")
	if err := os.WriteFile(program, self, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "-test.v", "-test.run", "^(TestQEMU|TestAVM|TestAStart|TestAFile|TestTheDataDisk|TestTheMemory|TestWhatQEMU|TestAGoodSpec)")
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "TMPDIR=" + dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestQEMUIsConfined") {
		t.Errorf("as uid %d: %v\n%s", uid, err, out)
	}
}
