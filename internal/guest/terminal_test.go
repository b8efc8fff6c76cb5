package guest

import (
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/warren-vm/warren/internal/guestapi"
)

// terminal starts a shell script on a terminal of 30 × 90.
func (h *host) terminal(script string) *talk {
	h.t.Helper()
	return h.start(guestapi.ExecRequest{Argv: []string{"bash", "--norc", "-c", script}, TTY: true, Stdin: true, Rows: 30, Cols: 90})
}

func TestTerminalIsTheProgramsOwn(t *testing.T) {
	r := ready(t).terminal(`stty size; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo $TERM; echo to-tty >/dev/tty; echo to-stderr >&2; exit 6`).finish()
	want := "30 90\r\nxterm-256color\r\nto-tty\r\nto-stderr\r\n"
	if string(r.out) != want || len(r.err) != 0 || r.Code != 6 {
		t.Errorf("got %q, %q, %+v", r.out, r.err, r.ExitStatus)
	}
}

func TestResizeReachesTheProgram(t *testing.T) {
	h := ready(t)
	k := h.terminal(`trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.05; done`)
	k.until("ready")
	_, err := do(h, guestapi.Resize, guestapi.ResizeRequest{ID: k.id, Rows: 50, Cols: 200})
	ok(t, err)
	if r := k.finish(); !strings.Contains(string(r.out), "50 200") {
		t.Errorf("got %q", r.out)
	}
	if _, err := do(h, guestapi.Resize, guestapi.ResizeRequest{ID: k.id, Rows: 1, Cols: 1}); code(err) != guestapi.CodeNotFound {
		t.Errorf("after the end: error %v", err)
	}
	plain := h.start(guestapi.ExecRequest{Argv: []string{"cat"}, Stdin: true})
	if _, err := do(h, guestapi.Resize, guestapi.ResizeRequest{ID: plain.id, Rows: 1, Cols: 1}); code(err) != guestapi.CodeBadRequest {
		t.Errorf("without a terminal: error %v", err)
	}
	ok(t, plain.send(guestapi.FrameStdinEnd, nil))
	plain.finish()
}

func TestControlCStopsTheForeground(t *testing.T) {
	k := ready(t).terminal(`echo ready; exec sleep 600`)
	k.until("ready")
	ok(t, k.send(guestapi.FrameStdin, []byte{3}))
	if r := k.finish(); r.Signal != int(syscall.SIGINT) {
		t.Errorf("got %+v", r.ExitStatus)
	}
}

func TestEndOfInputEndsReadingFromATerminal(t *testing.T) {
	for _, input := range []string{"", "line\n", "half a line"} {
		k := ready(t).terminal(`stty -echo; echo ready; n=$(cat | wc -c); echo "read $n"`)
		k.until("ready\r\n")
		if input != "" {
			ok(t, k.send(guestapi.FrameStdin, []byte(input)))
		}
		ok(t, k.send(guestapi.FrameStdinEnd, nil))
		if r := k.finish(); !strings.Contains(string(r.out), fmt.Sprintf("read %d", len(input))) {
			t.Errorf("%q: got %q", input, r.out)
		}
	}
}

func TestTerminalWithoutInputReadsAsEmpty(t *testing.T) {
	r := ready(t).start(guestapi.ExecRequest{Argv: []string{"sh", "-c", "cat; echo end"}, TTY: true}).finish()
	if !strings.Contains(string(r.out), "end") || r.Code != 0 {
		t.Errorf("got %q, %+v", r.out, r.ExitStatus)
	}
}

func TestEverythingWrittenToATerminalBeforeTheEndIsDelivered(t *testing.T) {
	h := ready(t)
	for i := range 30 {
		n := i * 1777
		r := h.terminal(fmt.Sprintf("head -c %d /dev/zero", n)).finish()
		if len(r.out) != n {
			t.Fatalf("%d bytes of %d", len(r.out), n)
		}
	}
}

func TestProgramMayCloseItsTerminalEarly(t *testing.T) {
	h := ready(t)
	r := h.terminal(`echo one; exec 0<&- 1>&- 2>&-; sleep 0.5; exit 8`).finish()
	if string(r.out) != "one\r\n" || r.Code != 8 {
		t.Errorf("got %q, %+v", r.out, r.ExitStatus)
	}
}

func TestJobsOfATerminalEndWithItsTimeout(t *testing.T) {
	h := ready(t)
	k := h.start(guestapi.ExecRequest{Argv: []string{"bash", "--norc", "-c", `set -m; trap '' HUP; sleep 600 & echo "job $!."; wait`},
		TTY: true, TimeoutMS: 500})
	text := k.until(".")
	job := atoi(t, text[strings.Index(text, "job ")+4:strings.Index(text, ".")])
	if r := k.finish(); !r.TimedOut {
		t.Errorf("got %+v", r.ExitStatus)
	}
	eventually(t, "the job is gone", func() bool { return !alive(job) })
}

func TestTerminalsLeakNothing(t *testing.T) {
	h := ready(t)
	h.terminal("true").finish()
	before := settled(t, h)
	for range 50 {
		h.terminal("echo x").finish()
	}
	eventually(t, "descriptors and goroutines are as before", func() bool {
		after, err := do(h, guestapi.Figures, guestapi.Empty{})
		ok(t, err)
		return after.AgentFDs <= before.AgentFDs && after.AgentGoroutines <= before.AgentGoroutines
	})
	if n := h.fds(); n != 0 {
		t.Errorf("%d descriptors are still counted", n)
	}
}
