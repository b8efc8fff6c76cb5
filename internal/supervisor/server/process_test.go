package server

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/vm"
)

// The test binary plays two more parts: a supervisor whose guest is played by
// a test over a socket, and the owner of a VM, to be killed.
const (
	fakeLinkEnv  = "WARREN_TEST_LINK"
	fakeOwnerEnv = "WARREN_TEST_OWNER"
	fakeWaitEnv  = "WARREN_TEST_WAIT" // the fake supervisor's MaxWait
)

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(fakeLinkEnv) != "":
		if err := fakeSupervisor(os.Getenv(fakeLinkEnv)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	case os.Getenv(fakeOwnerEnv) != "":
		ownVM(os.Getenv(fakeOwnerEnv))
	}
	code := m.Run()
	os.RemoveAll(vmmDir)
	os.Exit(code)
}

// fakeSupervisor is cmd/abox-vmm with a process that sleeps in place of QEMU.
func fakeSupervisor(link string) error {
	debug.SetMemoryLimit(48 << 20)
	config, err := supervisor.ReadConfig(os.Stdin)
	if err != nil {
		return err
	}
	unix.CloseOnExec(supervisor.OwnerFD)
	unix.CloseOnExec(supervisor.LockFD)
	dir, err := store.AdoptVM(config.Dir, os.NewFile(supervisor.LockFD, "lock"))
	if err != nil {
		return err
	}
	maxWait, err := time.ParseDuration(os.Getenv(fakeWaitEnv))
	if err != nil {
		return err
	}
	o := Options{Config: config, Dir: dir, Events: os.Stdout, MaxWait: maxWait}
	if !config.Outlive {
		unix.SetNonblock(supervisor.OwnerFD, true)
		o.Owner = os.NewFile(supervisor.OwnerFD, "owner")
	}
	o.Launch = func(_ context.Context, _ supervisor.Config, console io.Writer) (Machine, error) {
		conn, err := net.Dial("unix", link)
		if err != nil {
			return nil, err
		}
		return sleepingVM(conn)
	}
	return Run(context.Background(), o)
}

// sleeping is a VM that is a `sleep`.
type sleeping struct {
	cmd  *exec.Cmd
	link net.Conn
	gone chan struct{}
}

func sleepingVM(link net.Conn) (Machine, error) {
	s := &sleeping{cmd: exec.Command("sleep", "10000"), link: link, gone: make(chan struct{})}
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		s.cmd.Wait()
		link.Close()
		close(s.gone)
	}()
	return s, nil
}

func (s *sleeping) Link() net.Conn          { return s.link }
func (s *sleeping) PID() int                { return s.cmd.Process.Pid }
func (s *sleeping) Exited() <-chan struct{} { return s.gone }
func (s *sleeping) Reason() string          { return "the sleeper was killed" }
func (s *sleeping) Stop(context.Context) error {
	s.cmd.Process.Kill()
	<-s.gone
	return nil
}

// spec is a real VM without a kernel: its firmware waits.
func spec(memMB int) vm.Spec {
	return vm.Spec{CPUs: 1, MemMB: memMB, Accel: vm.TCG, Paused: true}
}

// startProcess starts a supervisor in a process of its own whose guest is
// played by a. maxWait, if not 0, shortens the guest's deadlines.
func startProcess(t *testing.T, a agent, maxWait time.Duration, change func(*supervisor.Config)) *supervisor.Client {
	t.Helper()
	tmp := t.TempDir()
	socket := filepath.Join(tmp, "link.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var playing sync.WaitGroup
	playing.Go(func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		a.play(ctx, &fakeVM{guest: conn})
		conn.Close()
	})
	t.Cleanup(func() { l.Close(); cancel(); playing.Wait() })
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf("#!/bin/sh\n%s='%s' %s='%v' exec '%s'\n", fakeLinkEnv, socket, fakeWaitEnv, maxWait, self)
	vmm := filepath.Join(tmp, "vmm")
	if err := os.WriteFile(vmm, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	c, _, err := startIn(t, store.Home(filepath.Join(tmp, "home")), vmm, change)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// startIn starts a VM in home as its machine would.
func startIn(t testing.TB, home store.Home, vmm string, change func(*supervisor.Config)) (*supervisor.Client, string, error) {
	dir, err := home.CreateVM(store.NewID())
	if err != nil {
		t.Fatal(err)
	}
	config := supervisor.Config{
		ID: dir.ID, Dir: dir.Path, ImageID: "image-1", VM: spec(64),
		Identity: supervisor.Identity{Hostname: "one"}, BootTimeout: patience,
	}
	if change != nil {
		change(&config)
	}
	c, err := supervisor.Start(t.Context(), supervisor.Options{VMM: vmm, Dir: dir, Config: config})
	if err != nil {
		if removeErr := dir.Remove(); removeErr != nil {
			t.Error(removeErr)
		}
		return nil, dir.Path, err
	}
	dir.Close()
	t.Cleanup(func() {
		if err := c.Kill(context.Background()); err != nil {
			t.Error(err)
		}
		c.Close(context.Background())
		wantNothingIn(t, home)
	})
	return c, dir.Path, nil
}

// wantPeak checks how much memory a supervisor has ever used.
func wantPeak(t *testing.T, c *supervisor.Client, mib int) {
	t.Helper()
	st, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", st.SupervisorPID))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			var kb int
			fmt.Sscan(rest, &kb)
			t.Logf("the supervisor used up to %d MiB", kb>>10)
			if kb>>10 > mib && !underRace {
				t.Errorf("more than %d MiB", mib)
			}
		}
	}
}

func TestAFloodOfOutputStaysInBoundedMemory(t *testing.T) {
	a := honest()
	block := frame(guestapi.FrameStdout, strings.Repeat("y\n", guestapi.MaxFrame/2))
	a[guestapi.ExecPath] = endless(switching, block)
	c := startProcess(t, a, 0, nil)
	var open []*supervisor.Exec
	// Nobody calls Wait. With 16 such readers the link stands still, for want
	// of room, until one of them goes on.
	for range 14 {
		e, err := c.Exec(t.Context(), guestapi.ExecRequest{Argv: []string{"yes"}}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, e)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	n := 0
	e, err := c.Exec(ctx, guestapi.ExecRequest{Argv: []string{"yes"}}, writerFunc(func(p []byte) {
		if n += len(p); n > 64<<20 {
			cancel()
		}
	}), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Wait(); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	wantPeak(t, c, 64)
	for _, e := range open {
		e.Close()
	}
}

func TestAnEndlessListStaysInBoundedMemory(t *testing.T) {
	for name, entry := range map[string]string{"small entries": `{},`, "long names": `{"name":"` + strings.Repeat("n", 4000) + `"},`} {
		t.Run(name, func(t *testing.T) {
			a := honest()
			a[guestapi.List.Path] = endless(ok+"Content-Type: application/json\r\n\r\n"+`{"entries":[`, entry)
			c := startProcess(t, a, 0, nil)
			var wg sync.WaitGroup
			for range 4 {
				wg.Go(func() {
					_, err := c.List(t.Context(), guestapi.ListRequest{Path: "/"})
					wantErr(t, err, supervisor.ErrGuestBroken, "of more than")
				})
			}
			wg.Wait()
			wantPeak(t, c, 64)
		})
	}
}

func TestALargeListStaysInBoundedMemory(t *testing.T) {
	var list guestapi.ListInfo
	for i := range guestapi.MaxList {
		list.Entries = append(list.Entries, guestapi.FileInfo{Name: fmt.Sprintf("%d-%s", i, strings.Repeat("n", 1400)), Type: "file"})
	}
	a := honest()
	a[guestapi.List.Path] = answer(list)
	c := startProcess(t, a, 0, nil)
	for range 3 {
		got, err := c.List(t.Context(), guestapi.ListRequest{Path: "/"})
		if err != nil || len(got.Entries) != guestapi.MaxList {
			t.Fatalf("%d entries, %v", len(got.Entries), err)
		}
	}
	wantPeak(t, c, 64)
}

// The guest is slow to end what the host has given up; that must not fill
// anything up.
func TestGuestsThatNeverEndTheirStreamsDoNotFillTheSupervisor(t *testing.T) {
	a := honest()
	free := make(chan struct{})
	defer close(free)
	a[guestapi.Figures.Path] = func(_ *http.Request, _ *bufio.Reader, conn net.Conn) {
		conn.Write(bytes.Repeat([]byte("x"), 200<<10))
		<-free
	}
	c := startProcess(t, a, 3*time.Second, nil)
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			if _, err := c.Figures(t.Context()); err == nil {
				t.Error("it answered")
			}
		})
	}
	wg.Wait()
	wantPeak(t, c, 64)
	if err := c.Err(); err != nil {
		t.Error(err)
	}
}

// 1 GiB in a soak, a quarter of it otherwise: the path is the same.
func TestAGibibyteThroughStdinAndStdoutStaysInBoundedMemory(t *testing.T) {
	size := int64(256 << 20)
	if os.Getenv("WARREN_SOAK") != "" {
		size = 1 << 30
	}
	c := startProcess(t, honest(), 0, nil)
	var n int64
	began := time.Now()
	status, err := c.Run(t.Context(), guestapi.ExecRequest{Argv: []string{"cat"}}, io.LimitReader(zeros{}, size),
		writerFunc(func(p []byte) { n += int64(len(p)) }), nil)
	if err != nil || status.Code != 0 || n != size {
		t.Fatalf("%d bytes of %d, %+v, %v", n, size, status, err)
	}
	t.Logf("%.0f MiB/s", float64(size>>20)/time.Since(began).Seconds())
	wantPeak(t, c, 64)
}
