package guest

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
)

func TestRunGivesOutputAndExitCode(t *testing.T) {
	r := ready(t).sh("echo out; echo err >&2; exit 7").finish()
	if string(r.out) != "out\n" || string(r.err) != "err\n" || r.ExitStatus != (guestapi.ExitStatus{Code: 7}) {
		t.Errorf("got %+v", r)
	}
}

func TestExitBySignalIsReported(t *testing.T) {
	r := ready(t).sh("kill -USR1 $$").finish()
	if r.ExitStatus != (guestapi.ExitStatus{Signal: int(syscall.SIGUSR1)}) || r.ExitCode() != 128+int(syscall.SIGUSR1) {
		t.Errorf("got %+v", r.ExitStatus)
	}
}

func TestBytesPassExactly(t *testing.T) {
	data := make([]byte, 5<<20+123)
	rand.Read(data)
	k := ready(t).start(guestapi.ExecRequest{Argv: []string{"cat"}, Stdin: true})
	go func() {
		// Pieces of every size, an empty one among them.
		for rest, n := data, 0; len(rest) > 0; n = (n*7 + 1) % guestapi.MaxFrame {
			n = min(n, len(rest))
			k.send(guestapi.FrameStdin, rest[:n])
			rest = rest[n:]
		}
		k.send(guestapi.FrameStdinEnd, nil)
	}()
	if r := k.finish(); !bytes.Equal(r.out, data) || r.Code != 0 {
		t.Errorf("%d bytes of %d came back; %+v", len(r.out), len(data), r.ExitStatus)
	}
}

func TestWithoutStdinTheProgramReadsAnEmptyInput(t *testing.T) {
	if r := ready(t).sh("wc -c").finish(); strings.TrimSpace(string(r.out)) != "0" || r.Code != 0 {
		t.Errorf("got %+v", r)
	}
}

func TestInputEndsWhenTheHostGoes(t *testing.T) {
	mark := t.TempDir() + "/mark"
	k := ready(t).start(guestapi.ExecRequest{Argv: []string{"sh", "-c", "cat >" + mark + ".new; mv " + mark + ".new " + mark}, Stdin: true})
	ok(t, k.send(guestapi.FrameStdin, []byte("half")))
	k.conn.Close()
	eventually(t, "the program saw the end of its input", func() bool { _, err := os.Stat(mark); return err == nil })
	if data, err := os.ReadFile(mark); err != nil || string(data) != "half" {
		t.Errorf("it read %q, %v", data, err)
	}
}

func TestInputThatIsNotReadDoesNotHoldTheHost(t *testing.T) {
	k := ready(t).start(guestapi.ExecRequest{Argv: []string{"sh", "-c", "exec <&-; echo closed; sleep 0.3; exit 3"}, Stdin: true})
	k.until("closed")
	// Far more than a pipe and a socket hold.
	for range 200 {
		if err := k.send(guestapi.FrameStdin, make([]byte, guestapi.MaxFrame)); err != nil {
			break // the run has ended
		}
	}
	if r := k.finish(); r.Code != 3 {
		t.Errorf("got %+v", r.ExitStatus)
	}
}

func TestRunEndsWhileInputIsStuck(t *testing.T) {
	k := ready(t).start(guestapi.ExecRequest{Argv: []string{"sh", "-c", "sleep 0.3; exit 4"}, Stdin: true})
	go func() {
		for k.send(guestapi.FrameStdin, make([]byte, guestapi.MaxFrame)) == nil {
		}
	}()
	if r := k.finish(); r.Code != 4 {
		t.Errorf("got %+v", r.ExitStatus)
	}
}

func TestBadFramesEndTheInputAndNothingElse(t *testing.T) {
	for name, frame := range map[string][]byte{
		"huge length":  {byte(guestapi.FrameStdin), 0xff, 0xff, 0xff, 0xff},
		"unknown kind": {0x77, 0, 0, 0, 0},
		"guest's kind": {byte(guestapi.FrameExit), 0, 0, 0, 1, 'x'},
	} {
		k := ready(t).start(guestapi.ExecRequest{Argv: []string{"cat"}, Stdin: true})
		ok(t, k.send(guestapi.FrameStdin, []byte("before")))
		_, err := k.conn.Write(frame)
		ok(t, err)
		if r := k.finish(); string(r.out) != "before" || r.Code != 0 {
			t.Errorf("%s: got %+v", name, r)
		}
	}
}

func TestEverythingWrittenBeforeTheEndIsDelivered(t *testing.T) {
	h := ready(t)
	for i := range 60 {
		n := i * 1777 // up to more than a pipe holds
		r := h.sh(fmt.Sprintf("head -c %d /dev/zero; head -c %d /dev/zero >&2", n, n/2)).finish()
		if len(r.out) != n || len(r.err) != n/2 {
			t.Fatalf("%d and %d bytes of %d and %d", len(r.out), len(r.err), n, n/2)
		}
	}
}

func TestFloodOnOneOutputLosesNothingOnTheOther(t *testing.T) {
	r := ready(t).sh("(head -c 5000000 /dev/zero >&2) & for i in 1 2 3 4 5; do echo $i; done; wait").finish()
	if string(r.out) != "1\n2\n3\n4\n5\n" || len(r.err) != 5000000 || r.Code != 0 {
		t.Errorf("%q, %d bytes, %+v", r.out, len(r.err), r.ExitStatus)
	}
}

func TestProgramMayCloseItsOutputEarly(t *testing.T) {
	r := ready(t).sh("echo one; exec >&- 2>&-; sleep 0.3; exit 9").finish()
	if string(r.out) != "one\n" || r.Code != 9 {
		t.Errorf("got %+v", r)
	}
}

func TestBackgroundChildrenDoNotHoldTheEndUp(t *testing.T) {
	r := ready(t).sh("echo before; sleep 600 & echo $!").finish()
	lines := strings.Fields(string(r.out))
	if len(lines) != 2 || lines[0] != "before" {
		t.Fatalf("got %q", r.out)
	}
	child := atoi(t, lines[1])
	if !alive(child) {
		t.Error("the child was stopped with its parent")
	}
	syscall.Kill(child, syscall.SIGKILL)
}

func TestBackgroundFloodDoesNotHoldTheEndUp(t *testing.T) {
	r := ready(t).sh("yes & echo $! >&2; sleep 0.2; exit 5").finish()
	if r.Code != 5 {
		t.Errorf("got %+v", r.ExitStatus)
	}
	syscall.Kill(atoi(t, string(r.err)), syscall.SIGKILL)
}

func TestWhatIsLeftIsNeverStoppedByItsOutput(t *testing.T) {
	mark := t.TempDir() + "/mark"
	h := ready(t)
	// More than a pipe holds, after the end of the run: without somebody
	// reading it would block, with nobody there it would die of SIGPIPE.
	h.sh("(sleep 0.3; head -c 1000000 /dev/zero && echo ok >" + mark + ") & exit 0").finish()
	eventually(t, "the child wrote all of it", func() bool { _, err := os.Stat(mark); return err == nil })
	eventually(t, "its descriptors are given back", func() bool { return h.fds() == 0 })
}

func (h *host) fds() int {
	h.agent.runs.mu.Lock()
	defer h.agent.runs.mu.Unlock()
	return h.agent.runs.fds
}

func TestClientThatLeavesDoesNotStopTheProgram(t *testing.T) {
	mark := t.TempDir() + "/mark"
	h := ready(t)
	k := h.sh("head -c 3000000 /dev/zero && head -c 3000000 /dev/zero >&2 && echo ok >" + mark)
	k.conn.Close()
	eventually(t, "the program ran to its end", func() bool { _, err := os.Stat(mark); return err == nil })
}

func TestTimeoutStopsTheWholeGroup(t *testing.T) {
	k := ready(t).start(guestapi.ExecRequest{Argv: []string{"sh", "-c", "sleep 600 & echo $!; wait"}, TimeoutMS: 500})
	r := k.finish()
	if !r.TimedOut || r.Signal != int(syscall.SIGTERM) || r.ExitCode() != 124 {
		t.Errorf("got %+v", r.ExitStatus)
	}
	child := atoi(t, string(r.out))
	eventually(t, "the child is gone too", func() bool { return !alive(child) })
}

func TestProgramThatIgnoresTermIsKilled(t *testing.T) {
	k := ready(t).start(guestapi.ExecRequest{Argv: []string{"sh", "-c", "trap 'echo asked' TERM; while :; do sleep 0.1; done"}, TimeoutMS: 300})
	r := k.finish()
	if !r.TimedOut || r.Signal != int(syscall.SIGKILL) || string(r.out) != "asked\n" || r.OOMKilled {
		t.Errorf("got %+v", r)
	}
}

func TestChildThatIgnoresTermIsKilledAfterItsParent(t *testing.T) {
	k := ready(t).start(guestapi.ExecRequest{
		Argv: []string{"bash", "-c", "(trap '' TERM; echo $BASHPID; while :; do sleep 0.1; done) & wait"}, TimeoutMS: 500})
	r := k.finish()
	if !r.TimedOut || r.Signal != int(syscall.SIGTERM) {
		t.Errorf("got %+v", r.ExitStatus)
	}
	child := atoi(t, string(r.out))
	eventually(t, "the child is killed", func() bool { return !alive(child) })
}

func TestTimeoutWorksWhileNobodyReads(t *testing.T) {
	h := ready(t)
	k := h.start(guestapi.ExecRequest{Argv: []string{"yes"}, TimeoutMS: 500})
	// Nothing is read until the program must be gone.
	eventually(t, "the program was stopped", func() bool {
		run, err := h.agent.runs.find(k.id)
		return err != nil || run.process.Ended()
	})
	if r := k.finish(); !r.TimedOut {
		t.Errorf("got %+v", r.ExitStatus)
	}
}

func TestRunWithinItsTimeoutIsNotTouched(t *testing.T) {
	k := ready(t).start(guestapi.ExecRequest{Argv: []string{"sh", "-c", "exit 3"}, TimeoutMS: 3_600_000})
	if r := k.finish(); r.ExitStatus != (guestapi.ExitStatus{Code: 3}) {
		t.Errorf("got %+v", r.ExitStatus)
	}
}

func TestSignalReachesTheGroup(t *testing.T) {
	h := ready(t)
	k := h.sh("sleep 600 & echo $!; wait")
	child := atoi(t, k.until("\n"))
	_, err := do(h, guestapi.Signal, guestapi.SignalRequest{ID: k.id, Signal: int(syscall.SIGKILL)})
	ok(t, err)
	if r := k.finish(); r.Signal != int(syscall.SIGKILL) || r.OOMKilled || h.system.oomAsked.Load() != 0 {
		t.Errorf("got %+v", r.ExitStatus)
	}
	eventually(t, "the child is gone too", func() bool { return !alive(child) })
	for _, req := range []guestapi.SignalRequest{{ID: k.id, Signal: 15}, {ID: "never-was", Signal: 15}} {
		if _, err := do(h, guestapi.Signal, req); code(err) != guestapi.CodeNotFound {
			t.Errorf("%+v: error %v", req, err)
		}
	}
	if _, err := do(h, guestapi.Signal, guestapi.SignalRequest{ID: "x", Signal: 65}); code(err) != guestapi.CodeBadRequest {
		t.Errorf("signal 65: error %v", err)
	}
}

func TestKillForWantOfMemoryIsTold(t *testing.T) {
	h := ready(t)
	h.system.oom.Store(true)
	if r := h.sh("kill -KILL $$").finish(); r.Signal != 9 || !r.OOMKilled {
		t.Errorf("killed by the kernel: got %+v", r.ExitStatus)
	}
	if r := h.sh("exit 137").finish(); r.OOMKilled || h.system.oomAsked.Load() != 1 {
		t.Errorf("ended by itself: got %+v", r.ExitStatus)
	}
}

func TestRefusedRunsSayWhy(t *testing.T) {
	h := ready(t)
	script := t.TempDir() + "/script"
	ok(t, os.WriteFile(script, []byte("#!/nonexistent/interpreter\n"), 0o755))
	binary := t.TempDir() + "/binary"
	ok(t, os.WriteFile(binary, []byte{0, 1, 2, 3}, 0o755))
	for _, c := range []struct {
		name string
		req  guestapi.ExecRequest
		code guestapi.Code
		text string
	}{
		{"no program", guestapi.ExecRequest{}, guestapi.CodeBadRequest, "no program"},
		{"unknown program", guestapi.ExecRequest{Argv: []string{"tru"}}, guestapi.CodeNotFound, "tru"},
		{"not executable", guestapi.ExecRequest{Argv: []string{"/etc/passwd"}}, guestapi.CodeNotExecutable, "permission"},
		{"interpreter missing", guestapi.ExecRequest{Argv: []string{script}}, guestapi.CodeNotExecutable, "interpreter"},
		{"no binary", guestapi.ExecRequest{Argv: []string{binary}}, guestapi.CodeNotExecutable, "not a program"},
		{"unknown user", guestapi.ExecRequest{Argv: []string{"true"}, User: "nobody-here"}, guestapi.CodeNotFound, "nobody-here"},
		{"unknown folder", guestapi.ExecRequest{Argv: []string{"true"}, Dir: "/no/where"}, guestapi.CodeNotFound, "/no/where"},
		{"bad id", guestapi.ExecRequest{ID: "A/b", Argv: []string{"true"}}, guestapi.CodeBadRequest, "id"},
		{"bad timeout", guestapi.ExecRequest{Argv: []string{"true"}, TimeoutMS: -1}, guestapi.CodeBadRequest, "timeout"},
		{"absurd timeout", guestapi.ExecRequest{Argv: []string{"true"}, TimeoutMS: 1 << 62}, guestapi.CodeBadRequest, "timeout"},
		{"too much", guestapi.ExecRequest{Argv: []string{"true", strings.Repeat("x", 1<<20)}}, guestapi.CodeBadRequest, "too long"},
	} {
		_, err := h.exec(c.req)
		if code(err) != c.code || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: error %v, want %s with %q", c.name, err, c.code, c.text)
		}
	}
	if n := h.fds(); n != 0 || h.agent.runs.count() != 0 {
		t.Errorf("refused runs hold %d descriptors", n)
	}
}

func TestIDIsFreeAsSoonAsTheEndIsTold(t *testing.T) {
	h := ready(t)
	k := h.start(guestapi.ExecRequest{ID: "same", Argv: []string{"cat"}, Stdin: true})
	if _, err := h.exec(guestapi.ExecRequest{ID: "same", Argv: []string{"true"}}); code(err) != guestapi.CodeConflict {
		t.Errorf("used twice at once: error %v", err)
	}
	ok(t, k.send(guestapi.FrameStdinEnd, nil))
	k.finish()
	for range 50 {
		h.start(guestapi.ExecRequest{ID: "same", Argv: []string{"true"}}).finish()
	}
}

func TestTooManyRunsAreRefusedAndThenFit(t *testing.T) {
	h := ready(t)
	var all []*talk
	for range maxRuns {
		all = append(all, h.start(guestapi.ExecRequest{Argv: []string{"cat"}, Stdin: true}))
	}
	if _, err := h.exec(guestapi.ExecRequest{Argv: []string{"true"}}); code(err) != guestapi.CodeTooMany {
		t.Errorf("error %v", err)
	}
	for _, k := range all {
		ok(t, k.send(guestapi.FrameStdinEnd, nil))
		k.finish()
	}
	h.start(guestapi.ExecRequest{Argv: []string{"true"}}).finish()
}

func TestRunsAreAsTheUserAsked(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can run programs as others; the guest's agent is root")
	}
	r := ready(t).start(guestapi.ExecRequest{Argv: []string{"sh", "-c", "id -u; id -g; id -G; pwd; umask"}, User: "12345:54321"}).finish()
	if string(r.out) != "12345\n54321\n54321\n/\n0022\n" {
		t.Errorf("got %q %q", r.out, r.err)
	}
}

func TestProgramsAreFreeOfTheAgentsTraces(t *testing.T) {
	// No descriptors but three, a session of its own, no signal blocked, none
	// ignored that was not before the agent.
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, ignored, _ := strings.Cut(string(status), "\nSigIgn:\t")
	ignored, _, _ = strings.Cut(ignored, "\n")
	script := `ls /proc/self/fd | wc -l; ps -o sid= -p $$ | tr -d ' '; echo $$; grep -E 'Sig(Blk|Ign)' /proc/self/status`
	r := ready(t).sh(script).finish()
	f := strings.Fields(string(r.out))
	if len(f) < 7 || f[0] != "4" /* and the folder itself */ || f[1] != f[2] ||
		strings.Trim(f[4], "0") != "" || f[6] != ignored {
		t.Errorf("got %q", r.out)
	}
}

func TestLeakNothingAfterManyRuns(t *testing.T) {
	h := ready(t)
	_, err := do(h, guestapi.Figures, guestapi.Empty{})
	ok(t, err)
	h.start(guestapi.ExecRequest{Argv: []string{"true"}}).finish()
	before := settled(t, h)
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			want := fmt.Sprintf("out-%d\n", i)
			k, err := h.exec(guestapi.ExecRequest{Argv: []string{"sh", "-c", "cat; echo err-$0 >&2; exit $0", fmt.Sprint(i)}, Stdin: true})
			if err != nil {
				t.Error(err)
				return
			}
			k.send(guestapi.FrameStdin, []byte(want))
			k.send(guestapi.FrameStdinEnd, nil)
			if r := k.finish(); string(r.out) != want || string(r.err) != fmt.Sprintf("err-%d\n", i) || r.Code != i {
				t.Errorf("run %d: %+v", i, r)
			}
		})
	}
	wg.Wait()
	for i := range 500 {
		if r := h.start(guestapi.ExecRequest{Argv: []string{"echo", fmt.Sprint(i)}}).finish(); string(r.out) != fmt.Sprintln(i) {
			t.Fatalf("run %d: %+v", i, r)
		}
	}
	eventually(t, "descriptors and goroutines are as before", func() bool {
		after, err := do(h, guestapi.Figures, guestapi.Empty{})
		ok(t, err)
		return after.AgentFDs <= before.AgentFDs && after.AgentGoroutines <= before.AgentGoroutines && after.Execs == 0
	})
	if n := h.fds(); n != 0 {
		t.Errorf("%d descriptors are still counted", n)
	}
	select {
	case <-reaper.None():
	case <-time.After(30 * time.Second):
		t.Error("a child is left")
	}
}

// settled is the figures once they have stopped to change.
func settled(t *testing.T, h *host) guestapi.FiguresInfo {
	t.Helper()
	var last guestapi.FiguresInfo
	for same := 0; same < 5; {
		f, err := do(h, guestapi.Figures, guestapi.Empty{})
		ok(t, err)
		if f.AgentFDs == last.AgentFDs && f.AgentGoroutines == last.AgentGoroutines {
			same++
		} else {
			same = 0
		}
		last = f
		time.Sleep(20 * time.Millisecond)
	}
	return last
}

func TestSpawnTimeMeasuresEachRun(t *testing.T) {
	h := ready(t)
	info, err := do(h, guestapi.SpawnTime, guestapi.SpawnTimeRequest{Argv: []string{"sleep", "0.01"}, Count: 5})
	if err != nil || len(info.Microseconds) != 5 {
		t.Fatalf("%+v, %v", info, err)
	}
	for _, us := range info.Microseconds {
		if us < 10_000 {
			t.Errorf("%d µs for a program of 10 ms", us)
		}
	}
	for _, bad := range []guestapi.SpawnTimeRequest{{Argv: []string{"true"}}, {Argv: []string{"true"}, Count: 1001}, {Count: 1}} {
		if _, err := do(h, guestapi.SpawnTime, bad); code(err) != guestapi.CodeBadRequest {
			t.Errorf("%+v: error %v", bad, err)
		}
	}
}

func FuzzExecRequest(f *testing.F) {
	f.Add([]byte(`{"id":"a","argv":["true"],"env":["A=b"],"dir":"/","user":"1:2","tty":true,"rows":1,"cols":2,"stdin":true,"timeout_ms":5}`))
	f.Add([]byte(`{"id":"a","argv":[],"x":1}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		req, err := decodeExec(body)
		if (req == nil) == (err == nil) {
			t.Fatalf("%v with %v", req, err)
		}
		if err != nil && code(err) != guestapi.CodeBadRequest {
			t.Fatalf("code of %v", err)
		}
	})
}

// FuzzInputFrames holds the splitter against the decoder that defines frames.
func FuzzInputFrames(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 2, 'h', 'i', 1, 0, 0, 0, 0, 2, 0, 0, 0, 0}, uint8(3))
	f.Add([]byte{1, 0, 1, 0, 1, 'h'}, uint8(1))
	f.Fuzz(func(t *testing.T, stream []byte, piece uint8) {
		var want []byte
		goes := true
		buf := make([]byte, guestapi.MaxFrame)
		for r := bytes.NewReader(stream); goes; {
			rest := r.Len()
			kind, data, err := guestapi.ReadFrame(r, buf)
			if err != nil {
				// A frame that is cut off is passed on as far as it came.
				if part := stream[len(stream)-rest:]; len(part) > guestapi.FrameHeader {
					if k, n, ok := parseHeader(part); ok && k == guestapi.FrameStdin && n > len(part)-guestapi.FrameHeader {
						want = append(want, part[guestapi.FrameHeader:]...)
					}
				}
				break
			}
			if goes = kind == guestapi.FrameStdin; goes {
				want = append(want, data...)
			}
		}
		var got []byte
		var s frameSplitter
		for rest := stream; len(rest) > 0; {
			n := min(len(rest), int(piece)+1)
			if !s.split(rest[:n], func(p []byte) { got = append(got, p...) }) {
				break
			}
			rest = rest[n:]
		}
		if !bytes.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}
