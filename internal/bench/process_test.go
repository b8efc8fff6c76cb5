package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"
)

var sampleTime = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

// TestMain makes this process the parent of every orphan below it, so that
// noChildren sees also what a killed child left behind.
func TestMain(m *testing.M) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		fmt.Fprintln(os.Stderr, "become subreaper:", err)
		os.Exit(1)
	}
	code := m.Run()
	if built.dir != "" {
		os.RemoveAll(built.dir)
	}
	os.Exit(code)
}

// noChildren fails the test if a process started in it is still there some
// time after its end.
func noChildren(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		var left []string
		for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
			if left = children(t); len(left) == 0 {
				return
			}
		}
		t.Errorf("processes left: %s", strings.Join(left, ", "))
	})
}

// children lists this process's children; orphans that are dead are reaped
// on the way.
func children(t *testing.T) []string {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, path := range stats {
		data, err := os.ReadFile(path)
		if err != nil {
			continue // gone meanwhile
		}
		name := string(data[:bytes.LastIndexByte(data, ')')+1])
		fields := strings.Fields(string(data[len(name):]))
		if len(fields) < 2 || fields[1] != strconv.Itoa(os.Getpid()) {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if fields[0] == "Z" {
			if _, err := unix.Wait4(pid, nil, unix.WNOHANG, nil); err == nil {
				continue
			}
		}
		found = append(found, name)
	}
	return found
}

// script writes an executable shell script and returns its path.
func script(t *testing.T, body string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "fake-qemu")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+body), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestTheFloorEndsAtTheAgentsFirstLine(t *testing.T) {
	noChildren(t)
	for name, body := range map[string]string{
		"plain":           `printf 'Linux version 6.1\r\nwarren: init\r\n'; exec sleep 1000`,
		"with time stamp": `printf 'boot\n[    1.234567] warren: init\n'; exec sleep 1000`,
		"in pieces":       `printf 'boot\nwarr'; sleep 0.05; printf 'en: init'; sleep 0.05; echo; exec sleep 1000`,
		"after a flood":   `head -c 100000 /dev/zero; echo; echo 'warren: init'; exec sleep 1000`,
	} {
		t.Run(name, func(t *testing.T) {
			vm, err := plain{QEMU: script(t, body)}.start(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer vm.stop()
			if took, err := vm.awaitInit(); err != nil || took <= 0 {
				t.Errorf("%v, %v", took, err)
			}
		})
	}
}

func TestOtherLinesAreNotTheAgentsFirst(t *testing.T) {
	for name, text := range map[string]string{
		"command line":        "[    0.0] Command line: console=ttyS0 warren: init x\n",
		"longer word":         "warren: initramfs\n",
		"end not yet there":   "warren: init",
		"something before":    "not warren: init\n",
		"empty":               "",
		"an unclosed bracket": "[ 1.2 warren: init\n",
	} {
		t.Run(name, func(t *testing.T) {
			err := awaitLine(iotest.OneByteReader(strings.NewReader(text)), initLine, &tail{max: 100})
			if !errors.Is(err, io.EOF) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestADeadFloorSaysWhyAndShowsItsConsole(t *testing.T) {
	noChildren(t)
	vm, err := plain{QEMU: script(t, `echo 'Kernel panic'; printf '\033[31mred\n'; echo 'no such file' >&2; exit 3`)}.start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer vm.stop()
	_, err = vm.awaitInit()
	want := `plain QEMU ended (exit status 3: no such file) before the console said "warren: init": Kernel panic | ?[31mred`
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

func TestAMissingProgramIsAnErrorAtOnce(t *testing.T) {
	if _, err := (plain{QEMU: "/no/such/qemu"}).start(t.Context()); err == nil || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestCancellationKillsEveryChild(t *testing.T) {
	noChildren(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	// It ignores what it can, and says so before it is cancelled.
	vm, err := plain{QEMU: script(t, `trap '' TERM INT HUP; echo ready; while :; do sleep 0.05; done`)}.start(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer vm.stop()
	if err := awaitLine(vm.console, "ready", vm.seen); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := vm.awaitInit(); err == nil {
		t.Error("no error")
	}
}

func TestAGracefulChildGetsTimeToTidyUp(t *testing.T) {
	noChildren(t)
	done := filepath.Join(t.TempDir(), "done")
	out, theirs, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	p, err := command{
		argv:   []string{"/bin/sh", "-c", `trap 'echo > "$1"; exit' TERM; echo ready; while :; do sleep 0.05; done`, "sh", done},
		stdout: theirs, grace: 30 * time.Second,
	}.start(t.Context())
	theirs.Close()
	if err != nil {
		t.Fatal(err)
	}
	if err := awaitLine(out, "ready", &tail{max: 100}); err != nil {
		t.Fatal(err)
	}
	p.stop()
	if _, err := os.Stat(done); err != nil {
		t.Error("it was killed before it could tidy up:", err)
	}
}
