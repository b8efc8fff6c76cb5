package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestimage"
	"github.com/warren-vm/warren/internal/store"
)

// patience is how long one command may take on a machine that is busy with
// other tests. No test depends on how quick anything is.
const patience = 3 * time.Minute

// templates are made once for all tests.
var templates struct {
	once sync.Once
	err  error
}

func templateHome() string { return filepath.Join(bin, "templates") }

func makeTemplates(shared store.Home) error {
	home := store.Home(templateHome())
	if err := home.Make(); err != nil {
		return err
	}
	if err := errors.Join(os.Remove(home.Guest()), os.Symlink(shared.Guest(), home.Guest())); err != nil {
		return err
	}
	build := exec.Command(filepath.Join(bin, "kosa8"), "template", "build")
	build.Env = append(os.Environ(), "WARREN_HOME="+home.Dir(), "PATH="+bin+":"+os.Getenv("PATH"))
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("make the template: %w\n%s", err, out)
	}
	return nil
}

// vmHome is a home of the test's own that shares the built guest image and, with
// the other tests, templates and snapshots. The
// test fails if a VM's folder is left in it.
func vmHome(t *testing.T) store.Home {
	t.Helper()
	shared, err := store.DefaultHome()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := guestimage.Open(shared.Dir()); err != nil {
		t.Fatalf("VM tests need the guest image; scripts/setup builds it: %v", err)
	}
	home := store.Home(t.TempDir())
	templates.once.Do(func() { templates.err = makeTemplates(shared) })
	if templates.err != nil {
		t.Fatal(templates.err)
	}
	for _, name := range []string{"guest", "snapshots", "cache"} {
		if err := os.Symlink(filepath.Join(templateHome(), name), filepath.Join(home.Dir(), name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { wantNoVMs(t, home) })
	return home
}

// wantNoVMs waits until no VM is left: the supervisor of a killed kosa8 needs
// a moment.
func wantNoVMs(t *testing.T, home store.Home) {
	t.Helper()
	var left []string
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if left = vmFolders(t, home); len(left) == 0 {
			return
		}
	}
	t.Errorf("left in the home: %q", left)
}

func vmFolders(t *testing.T, home store.Home) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(home.Dir(), "vms"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names
}

// kosa8 is one command under test. Its process is ended with the test.
type kosa8 struct {
	*exec.Cmd
	home      store.Home
	out, errs bytes.Buffer
}

func newKosa8(t *testing.T, home store.Home, args ...string) *kosa8 {
	t.Helper()
	k := &kosa8{Cmd: exec.Command(filepath.Join(bin, "kosa8"), args...), home: home}
	k.Env = append(os.Environ(), "WARREN_HOME="+home.Dir(), "PATH="+bin+":"+os.Getenv("PATH"))
	k.Stdout, k.Stderr = &k.out, &k.errs
	k.WaitDelay = 10 * time.Second
	return k
}

// end waits for the command and gives its exit code.
func (k *kosa8) end(t *testing.T) int {
	t.Helper()
	timer := time.AfterFunc(patience, func() { k.Process.Kill() })
	defer timer.Stop()
	err := k.Wait()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatalf("%v: %v", k.Args, err)
	}
	if s := k.ProcessState.Sys().(syscall.WaitStatus); s.Signaled() {
		t.Fatalf("%v ended by %v after %v\nstdout %.2000q\nstderr %.2000q", k.Args, s.Signal(), patience, k.out.String(), k.errs.String())
	}
	return k.ProcessState.ExitCode()
}

func (k *kosa8) start(t *testing.T) *kosa8 {
	t.Helper()
	if err := k.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Process.Kill() })
	return k
}

// run starts the command, waits for it and holds it against what it must
// give.
func (k *kosa8) run(t *testing.T, code int, stdout, stderr string) {
	t.Helper()
	got := k.start(t).end(t)
	if got != code || k.out.String() != stdout || k.errs.String() != stderr {
		t.Errorf("%q\n got code %d, stdout %.2000q, stderr %.2000q\nwant code %d, stdout %.2000q, stderr %.2000q",
			k.Args[1:], got, k.out.String(), k.errs.String(), code, stdout, stderr)
	}
}

// awaitLine reads from r until a line that is want; what comes after stays
// unread.
func awaitLine(t *testing.T, r io.Reader, want string) {
	t.Helper()
	found := make(chan error, 1)
	go func() {
		var seen []byte
		one := make([]byte, 1)
		for {
			if _, err := r.Read(one); err != nil {
				found <- fmt.Errorf("%w after %q", err, seen)
				return
			}
			seen = append(seen, one[0])
			if strings.HasSuffix(strings.ReplaceAll(string(seen), "\r", ""), want+"\n") {
				found <- nil
				return
			}
		}
	}()
	select {
	case err := <-found:
		if err != nil {
			t.Fatalf("waited for the line %q: %v", want, err)
		}
	case <-time.After(patience):
		t.Fatalf("waited %v for the line %q", patience, want)
	}
}
