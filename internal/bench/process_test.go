package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
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
	os.Exit(m.Run())
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
	p, err := startProcess(t.Context(), []string{"/bin/sh", "-c",
		`trap 'echo > "$1"; exit' TERM; echo ready; while :; do sleep 0.05; done`, "sh", done}, nil, theirs, nil, 30*time.Second)
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

func TestBytesAreTimedAndComparedByDigest(t *testing.T) {
	p := newPayload(3*mib + 5)
	echo := func(change func([]byte)) (float64, error) {
		ours, theirs := net.Pipe()
		defer ours.Close()
		back, in := io.Pipe()
		go func() {
			buf := make([]byte, 4096)
			for {
				n, err := theirs.Read(buf)
				if err != nil {
					return
				}
				change(buf[:n])
				if _, err := in.Write(buf[:n]); err != nil {
					return
				}
			}
		}()
		return throughput(t.Context(), p, ours, nil, func(w io.Writer) error {
			_, err := io.CopyN(w, back, p.size)
			return err
		})
	}
	if rate, err := echo(func([]byte) {}); err != nil || rate <= 0 {
		t.Errorf("unchanged: %v, %v", rate, err)
	}
	if _, err := echo(func(b []byte) { b[0] ^= 1 }); err == nil || !strings.Contains(err.Error(), "came back changed") {
		t.Errorf("changed: %v", err)
	}
}

func TestPayloadsOfOneSizeAreEqualAndNoTwoMiBAre(t *testing.T) {
	var a, b bytes.Buffer
	if _, err := newPayload(2 * mib).WriteTo(&a); err != nil {
		t.Fatal(err)
	}
	if _, err := newPayload(2 * mib).WriteTo(&b); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(a.Bytes(), b.Bytes()) {
		t.Error("two payloads of one size differ")
	}
	if bytes.Equal(a.Bytes()[:mib], a.Bytes()[mib:]) {
		t.Error("both halves are the same")
	}
}

func TestBytesThatNeverComeBackEndWithTheContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := throughput(ctx, newPayload(1), io.Discard, nil, func(io.Writer) error { <-ctx.Done(); return ctx.Err() })
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	_, err = throughput(t.Context(), newPayload(7), io.Discard, nil, func(w io.Writer) error { _, err := w.Write([]byte("four")); return err })
	if err == nil || err.Error() != "4 of 7 bytes came back" {
		t.Errorf("got %v", err)
	}
}
