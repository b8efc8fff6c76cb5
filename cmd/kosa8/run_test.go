package main

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/creack/pty"

	"github.com/warren-vm/warren/internal/store"
)

func TestRunPassesOutputErrorsAndExitCodeThroughExactly(t *testing.T) {
	home := vmHome(t)
	t.Setenv("PASSED", "from outside")
	k := newKosa8(t, home, "run", "-e", "PASSED", "-e", "GIVEN=a b", "-w", "/tmp", "-u", "agent", "base", "--",
		"sh", "-c", `printf 'out\000\377\r\n'; printf 'err\033[1m' >&2; echo "$PASSED, $GIVEN, $PWD, $(id -un)"; exit 7`)
	k.run(t, 7, "out\x00\xff\r\nfrom outside, a b, /tmp, agent\n", "err\x1b[1m")
}

func TestRunWithoutInteractiveReadsNothing(t *testing.T) {
	home := vmHome(t)
	r, w, err := os.Pipe() // never written, never closed: must not be waited for
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	k := newKosa8(t, home, "run", "base", "cat")
	k.Stdin = r
	k.run(t, 0, "", "")
}

func TestSixtyFourMiBComeBackUnaltered(t *testing.T) {
	home := vmHome(t)
	size := int64(64 << 20)
	if os.Getenv("WARREN_SOAK") != "" {
		size = 1 << 30
	}
	k := newKosa8(t, home, "run", "-i", "base", "cat")
	sent, got := sha256.New(), sha256.New()
	k.Stdin = io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{1}), size), sent)
	count := &counter{w: got}
	k.Stdout = count
	if code := k.start(t).end(t); code != 0 || k.errs.Len() > 0 {
		t.Fatalf("code %d, stderr %q", code, k.errs.String())
	}
	if count.n != size || !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
		t.Errorf("%d bytes came back of %d, or not the same", count.n, size)
	}
}

type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	return c.w.Write(p)
}

func TestAFloodOfErrorsComesThroughWhole(t *testing.T) {
	home := vmHome(t)
	k := newKosa8(t, home, "run", "base", "--", "sh", "-c", "head -c 33554432 /dev/zero >&2; echo done")
	count := &counter{w: io.Discard}
	k.Stderr = count
	if code := k.start(t).end(t); code != 0 || k.out.String() != "done\n" || count.n != 32<<20 {
		t.Errorf("code %d, stdout %q, %d bytes on stderr, want all of %d", code, k.out.String(), count.n, 32<<20)
	}
}

func TestProgramsThatCannotRunAre127And126(t *testing.T) {
	home := vmHome(t)
	newKosa8(t, home, "run", "base", "--", "tru").run(t, 127, "",
		"kosa8: cannot run \"tru\": no such program in image base\n  the image has: tr, true, truncate (kosa8 run base -- ls /usr/bin)\n")
	k := newKosa8(t, home, "run", "base", "/etc/passwd")
	if code := k.start(t).end(t); code != 126 || !strings.HasPrefix(k.errs.String(), "kosa8: cannot run /etc/passwd") {
		t.Errorf("code %d, stderr %q", code, k.errs.String())
	}
}

func TestAProgramThatDiesBySignalIs128PlusIt(t *testing.T) {
	home := vmHome(t)
	newKosa8(t, home, "run", "base", "--", "sh", "-c", "echo bye; kill -SEGV $$").run(t, 128+11, "bye\n", "")
}

func TestTimeoutIs124AndReachesTheWholeGroup(t *testing.T) {
	home := vmHome(t)
	// The child in the background and the shell both ignore SIGTERM.
	newKosa8(t, home, "run", "--timeout", "2s", "base", "--", "sh", "-c", `trap '' TERM; echo on; sleep 1000 & while :; do sleep 1; done`).
		run(t, 124, "on\n", "kosa8: \"sh\" was stopped after 2s (--timeout)\n")
}

func TestBackgroundChildrenDoNotHoldTheCommand(t *testing.T) {
	home := vmHome(t)
	newKosa8(t, home, "run", "base", "--", "sh", "-c", "sleep 1000 & sleep 1000 >/dev/null 2>&1 & echo parent done").
		run(t, 0, "parent done\n", "")
}

func TestAProgramThatClosesItsOutputEarlyRunsOn(t *testing.T) {
	home := vmHome(t)
	newKosa8(t, home, "run", "base", "--", "sh", "-c", "echo one; exec >&-; sleep 1; exit 9").run(t, 9, "one\n", "")
}

func TestAReaderThatGoesAwayEndsTheRunQuietlyWith141(t *testing.T) {
	home := vmHome(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	k := newKosa8(t, home, "run", "base", "yes")
	k.Stdout = w
	k.start(t)
	w.Close()
	line, err := bufio.NewReader(r).ReadString('\n')
	if line != "y\n" || err != nil {
		t.Errorf("read %q, %v", line, err)
	}
	r.Close()
	if code := k.end(t); code != 141 || k.errs.Len() > 0 {
		t.Errorf("code %d, stderr %q, want 141 and silence", code, k.errs.String())
	}
}

func TestSignalsGoToTheProgramAndASecondEndsTheVM(t *testing.T) {
	home := vmHome(t)
	k, out := runScript(t, home, `exec 2>/dev/null; trap 'echo got INT' INT; trap 'echo got USR1' USR1; trap '' TERM; echo ready; while :; do sleep 0.1; done`)
	k.Process.Signal(syscall.SIGUSR1)
	awaitLine(t, out, "got USR1")
	k.Process.Signal(syscall.SIGINT)
	awaitLine(t, out, "got INT")
	k.Process.Signal(syscall.SIGTERM) // ignored by the program, and the second to end it
	if code := k.end(t); code != 143 || k.errs.String() != "kosa8: interrupted twice\n  the command was killed\n" {
		t.Errorf("code %d, stderr %q, want 143", code, k.errs.String())
	}
}

func TestASignalThatEndsTheProgramGivesItsCode(t *testing.T) {
	home := vmHome(t)
	k, _ := runScript(t, home, "echo ready; exec sleep 1000")
	k.Process.Signal(syscall.SIGTERM)
	if code := k.end(t); code != 143 || k.errs.Len() > 0 {
		t.Errorf("code %d, stderr %q, want 143 and silence", code, k.errs.String())
	}
}

func TestASignalDuringTheBootLeavesNothing(t *testing.T) {
	home := vmHome(t)
	k := newKosa8(t, home, "run", "base", "true").start(t)
	for len(vmFolders(t, home)) == 0 {
		if err := k.Process.Signal(syscall.Signal(0)); err != nil {
			t.Fatalf("ended before it had a VM: %q", k.errs.String())
		}
	}
	k.Process.Signal(syscall.SIGINT)
	if code := k.end(t); code != 130 || k.errs.Len() > 0 {
		t.Errorf("code %d, stderr %q, want 130 and silence", code, k.errs.String())
	}
	if left := vmFolders(t, home); len(left) > 0 {
		t.Errorf("left when kosa8 had ended: %q", left)
	}
}

func TestTerminalHasItsSizeFollowsTheWindowAndTakesControlCharacters(t *testing.T) {
	home := vmHome(t)
	master, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	defer tty.Close()
	pty.Setsize(master, &pty.Winsize{Rows: 33, Cols: 111})
	// A shell that waits for a program in the foreground forgets an interrupt that
	// comes just after that has ended. So it waits for none when it comes.
	k := newKosa8(t, home, "run", "-it", "base", "--", "bash", "--norc", "-c",
		`trap 'stty size; echo resized' WINCH; trap 'echo interrupted; exit 5' INT; tty; stty size; echo "TERM $TERM"; sleep 1000 & while :; do wait; done`)
	k.Env = append(k.Env, "TERM=xterm-test")
	k.Stdin, k.Stdout, k.Stderr = tty, tty, tty
	k.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	k.start(t)
	awaitLine(t, master, "/dev/pts/0")
	awaitLine(t, master, "33 111")
	awaitLine(t, master, "TERM xterm-test")
	pty.Setsize(master, &pty.Winsize{Rows: 44, Cols: 122})
	awaitLine(t, master, "44 122")
	awaitLine(t, master, "resized")
	io.WriteString(master, "\x03")
	awaitLine(t, master, "interrupted")
	if code := k.end(t); code != 5 {
		t.Errorf("code %d, want 5", code)
	}
}

// runScript is kosa8 running a script that has said that it is ready, and the
// rest of its output.
func runScript(t *testing.T, home store.Home, script string) (*kosa8, io.Reader) {
	t.Helper()
	k := newKosa8(t, home, "run", "base", "--", "sh", "-c", script)
	k.Stdout = nil
	out, err := k.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	k.start(t)
	awaitLine(t, out, "ready")
	return k, out
}

func TestAKilledKosa8LeavesNothing(t *testing.T) {
	home := vmHome(t)
	k, _ := runScript(t, home, "echo ready; sleep 1000")
	pids := vmProcesses(t, home)
	if len(pids) < 2 {
		t.Fatalf("the VM's processes are %v, want a supervisor and QEMU", pids)
	}
	k.Process.Kill()
	k.Wait()
	wantNoVMs(t, home)
	wantGone(t, pids)
}

func TestWhatAKilledSupervisorLeftTheNextCommandRemoves(t *testing.T) {
	home := vmHome(t)
	k, _ := runScript(t, home, "echo ready; sleep 1000")
	pids := vmProcesses(t, home)
	supervisor := supervisorOf(t, home)
	if err := syscall.Kill(supervisor, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if code := k.end(t); code != 1 || !strings.HasPrefix(k.errs.String(), "kosa8: ") {
		t.Errorf("code %d, stderr %q, want 1 and why", code, k.errs.String())
	}
	wantGone(t, pids)
	next := newKosa8(t, home, "run", "base", "true")
	next.run(t, 0, "", "")
	if left := vmFolders(t, home); len(left) > 0 {
		t.Errorf("left after the next command: %q", left)
	}
}

func TestFourAtOnce(t *testing.T) {
	home := vmHome(t)
	var wg sync.WaitGroup
	for i := range 4 {
		k := newKosa8(t, home, "run", "--memory", "256m", "base", "--", "sh", "-c", fmt.Sprintf("echo VM %d; exit %d", i, i))
		wg.Go(func() { k.run(t, i, fmt.Sprintf("VM %d\n", i), "") })
	}
	wg.Wait()
}

func TestTimingsAreDrawnOnStandardError(t *testing.T) {
	home := vmHome(t)
	k := newKosa8(t, home, "run", "--boot", "--timings", "base", "echo", "hello")
	if code := k.start(t).end(t); code != 0 || k.out.String() != "hello\n" {
		t.Errorf("code %d, stdout %q", code, k.out.String())
	}
	for _, phase := range []string{"spawn", "qemu", "boot", "link", "prepare", "exec", "total"} {
		if !strings.Contains("\n"+k.errs.String(), "\n"+phase+" ") {
			t.Errorf("no phase %s in\n%s", phase, k.errs.String())
		}
	}
}
