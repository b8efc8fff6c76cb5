package guest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/link"
)

// frozen starts an agent that was prepared and frozen.
func frozen(t *testing.T) *host {
	t.Helper()
	h := ready(t)
	_, err := do(h, guestapi.Freeze, guestapi.Empty{})
	ok(t, err)
	h.system.deeds()
	return h
}

// startsPrograms asks for a program in both ways there are.
func (h *host) startsPrograms() error {
	h.t.Helper()
	k, err := h.exec(guestapi.ExecRequest{Argv: []string{"true"}})
	_, spawnErr := do(h, guestapi.SpawnTime, guestapi.SpawnTimeRequest{Argv: []string{"true"}, Count: 1})
	if code(err) != code(spawnErr) {
		h.t.Errorf("exec says %v, spawn time %v", err, spawnErr)
	}
	if err == nil {
		k.finish()
	}
	return err
}

func (h *host) hello() guestapi.HelloInfo {
	h.t.Helper()
	info, err := do(h, guestapi.Hello, guestapi.Empty{})
	ok(h.t, err)
	return info
}

func TestNothingStartsWhileFrozen(t *testing.T) {
	h := ready(t)
	if h.hello().Frozen {
		t.Error("frozen from the start")
	}
	info, err := do(h, guestapi.Freeze, guestapi.Empty{})
	if err != nil || !info.Frozen || info.SettledUS != 7 {
		t.Errorf("freeze: %+v, %v", info, err)
	}
	if err := h.startsPrograms(); code(err) != guestapi.CodeConflict || !strings.Contains(err.Error(), "being captured; try again") {
		t.Errorf("while frozen: %v", err)
	}
	if h.fds() != 0 || h.agent.runs.count() != 0 {
		t.Error("the refused run holds descriptors")
	}
	if i := h.hello(); !i.Frozen || !i.Prepared {
		t.Errorf("hello: %+v", i)
	}
	_, err = do(h, guestapi.Thaw, guestapi.ThawRequest{UnixNano: 1_900_000_000_000_000_001})
	if err != nil || h.hello().Frozen || h.startsPrograms() != nil {
		t.Errorf("after thaw: %v", err)
	}
	if got := h.system.deeds(); got != "freeze clock thaw" || h.system.clock.Load() != 1_900_000_000_000_000_001 {
		t.Errorf("the system did %q, clock %d", got, h.system.clock.Load())
	}
}

func TestFilesAndSignalsGoOnWhileFrozen(t *testing.T) {
	h := ready(t)
	k := h.start(guestapi.ExecRequest{Argv: []string{"sleep", "600"}})
	_, err := do(h, guestapi.Freeze, guestapi.Empty{})
	ok(t, err)
	path := t.TempDir() + "/file"
	_, err = h.transfer("PUT", guestapi.FilePath, url.Values{"path": {path}}, strings.NewReader("text"))
	ok(t, err)
	data, err := h.transfer("GET", guestapi.FilePath, url.Values{"path": {path}}, nil)
	if err != nil || string(data) != "text" {
		t.Errorf("%q, %v", data, err)
	}
	_, err = do(h, guestapi.Signal, guestapi.SignalRequest{ID: k.id, Signal: 9})
	ok(t, err)
	if r := k.finish(); r.Signal != 9 {
		t.Errorf("got %+v", r.ExitStatus)
	}
}

func TestFreezeAndThawMayBeRepeated(t *testing.T) {
	h := ready(t)
	for range 2 {
		_, err := do(h, guestapi.Thaw, guestapi.ThawRequest{})
		ok(t, err)
	}
	for range 3 {
		_, err := do(h, guestapi.Freeze, guestapi.Empty{})
		ok(t, err)
	}
	if !h.hello().Frozen {
		t.Error("not frozen")
	}
	for range 2 {
		_, err := do(h, guestapi.Thaw, guestapi.ThawRequest{})
		ok(t, err)
	}
	if h.hello().Frozen || h.system.clock.Load() != 0 {
		t.Error("frozen, or the clock was touched")
	}
	ok(t, h.startsPrograms())
}

func TestOnlyAPreparedGuestIsFrozen(t *testing.T) {
	h := idle(t)
	_, freezeErr := do(h, guestapi.Freeze, guestapi.Empty{})
	_, thawErr := do(h, guestapi.Thaw, guestapi.ThawRequest{})
	_, renewErr := do(h, guestapi.Renew, identity())
	for _, err := range []error{freezeErr, thawErr, renewErr} {
		if code(err) != guestapi.CodeNotPrepared {
			t.Errorf("error %v", err)
		}
	}
	_, err := do(h, guestapi.Prepare, identity())
	ok(t, err)
	ok(t, h.startsPrograms())
	if got := h.system.deeds(); got != "" {
		t.Errorf("the system did %q", got)
	}
}

func TestFreezeThatFailsLeavesTheGuestRunning(t *testing.T) {
	h := ready(t)
	h.system.fail("freeze", errors.New("freeze programs: no such device"))
	if _, err := do(h, guestapi.Freeze, guestapi.Empty{}); code(err) != guestapi.CodeInternal || !strings.Contains(err.Error(), "no such device") {
		t.Errorf("error %v", err)
	}
	if h.hello().Frozen {
		t.Error("says it is frozen")
	}
	ok(t, h.startsPrograms())

	h.system.succeed()
	_, err := do(h, guestapi.Freeze, guestapi.Empty{})
	ok(t, err)
	h.system.fail("freeze", errors.New("freeze programs: no such device"))
	if _, err := do(h, guestapi.Freeze, guestapi.Empty{}); err == nil {
		t.Error("no error")
	}
	if !h.hello().Frozen {
		t.Error("a second order that failed undid the first")
	}
}

func TestThawThatFailsLeavesTheGuestFrozenAndMayBeTriedAgain(t *testing.T) {
	for _, deed := range []string{"clock", "thaw"} {
		h := frozen(t)
		h.system.fail(deed, errors.New("no"))
		if _, err := do(h, guestapi.Thaw, guestapi.ThawRequest{UnixNano: 1}); code(err) != guestapi.CodeInternal {
			t.Errorf("%s: error %v", deed, err)
		}
		if got := h.system.deeds(); deed == "clock" && got != "clock" {
			t.Errorf("the system did %q: programs saw the old clock", got)
		}
		if err := h.startsPrograms(); code(err) != guestapi.CodeConflict || !h.hello().Frozen {
			t.Errorf("%s: run: error %v", deed, err)
		}
		h.system.succeed()
		_, err := do(h, guestapi.Thaw, guestapi.ThawRequest{UnixNano: 1})
		ok(t, err)
		ok(t, h.startsPrograms())
	}
	if _, err := do(frozen(t), guestapi.Thaw, guestapi.ThawRequest{UnixNano: -1}); code(err) != guestapi.CodeBadRequest {
		t.Errorf("clock before 1970: error %v", err)
	}
}

func TestCopyIsRenewedAndRunsOn(t *testing.T) {
	h := frozen(t)
	id := identity()
	id.Hostname = "copy-1"
	info, err := do(h, guestapi.Renew, id)
	if err != nil || info.PhasesUS["all"] != 1 || len(info.Hooks) != 1 || info.Hooks[0] != (guestapi.HookResult{Name: "10-keys", Code: 3}) {
		t.Errorf("%+v, %v", info, err)
	}
	if i := h.hello(); i.Frozen || !i.Prepared {
		t.Errorf("hello: %+v", i)
	}
	ok(t, h.startsPrograms())
	// And a copy can be captured again.
	_, err = do(h, guestapi.Freeze, guestapi.Empty{})
	ok(t, err)
	_, err = do(h, guestapi.Renew, id)
	ok(t, err)
	ok(t, h.startsPrograms())
	if got := h.system.deeds(); got != "renew:copy-1 freeze renew:copy-1" {
		t.Errorf("the system did %q", got)
	}
}

func TestOnlyAFrozenGuestIsRenewed(t *testing.T) {
	h := ready(t)
	_, err := do(h, guestapi.Renew, identity())
	if code(err) != guestapi.CodeConflict || !strings.Contains(err.Error(), "is not frozen; only a copy of a frozen guest is renewed") {
		t.Errorf("error %v", err)
	}
	if got := h.system.deeds(); got != "" {
		t.Errorf("the system did %q", got)
	}
	ok(t, h.startsPrograms())
}

func TestBadIdentityOfACopyMayBeCorrected(t *testing.T) {
	h := frozen(t)
	for name, change := range map[string]func(*guestapi.Identity){
		"hostname":       func(id *guestapi.Identity) { id.Hostname = "a b" },
		"machine id":     func(id *guestapi.Identity) { id.MachineID = "ab" },
		"little entropy": func(id *guestapi.Identity) { id.Entropy = nil },
		"no clock":       func(id *guestapi.Identity) { id.UnixNano = 0 },
	} {
		id := identity()
		change(&id)
		if _, err := do(h, guestapi.Renew, id); code(err) != guestapi.CodeBadRequest {
			t.Errorf("%s: error %v", name, err)
		}
	}
	if !h.hello().Frozen || h.system.deeds() != "" {
		t.Error("a bad identity did something")
	}
	_, err := do(h, guestapi.Renew, identity())
	ok(t, err)
}

func TestCopyThatCouldNotBeRenewedStaysFrozenForEver(t *testing.T) {
	for name, fault := range map[string]error{"an error": errors.New("renew, reseed: no such device"), "a panic": nil} {
		t.Run(name, func(t *testing.T) {
			h := frozen(t)
			h.system.fail("renew:box-1", fault)
			if _, err := do(h, guestapi.Renew, identity()); code(err) != guestapi.CodeInternal {
				t.Errorf("error %v", err)
			}
			h.system.succeed()
			h.system.deeds()
			_, renewErr := do(h, guestapi.Renew, identity())
			_, thawErr := do(h, guestapi.Thaw, guestapi.ThawRequest{UnixNano: 1})
			_, freezeErr := do(h, guestapi.Freeze, guestapi.Empty{})
			_, prepareErr := do(h, guestapi.Prepare, identity())
			_, statErr := do(h, guestapi.Stat, guestapi.StatRequest{Path: "/"})
			for i, err := range []error{renewErr, thawErr, freezeErr, prepareErr, statErr, h.startsPrograms()} {
				if code(err) != guestapi.CodeNotPrepared || !strings.Contains(err.Error(), "start a new one") {
					t.Errorf("call %d: error %v", i, err)
				}
			}
			if got := h.system.deeds(); got != "" {
				t.Errorf("the system did %q", got)
			}
			if i := h.hello(); !i.Frozen || i.Prepared {
				t.Errorf("hello: %+v", i)
			}
			_, err := do(h, guestapi.Shutdown, guestapi.Empty{})
			ok(t, err)
			eventually(t, "it can be shut down", func() bool { return h.system.shutdowns.Load() == 1 })
		})
	}
}

func TestFreezeNeverMeetsAStart(t *testing.T) {
	var g gate
	ok(t, g.enter())
	done := make(chan error)
	go func() { done <- g.shut(time.Minute) }()
	eventually(t, "the gate is shut", g.frozen)
	if err := g.enter(); code(err) != guestapi.CodeConflict {
		t.Errorf("a start behind the gate: error %v", err)
	}
	select {
	case err := <-done:
		t.Fatalf("shut (%v) while a start is under way", err)
	case <-time.After(50 * time.Millisecond):
	}
	g.leave()
	ok(t, <-done)
	g.open()
	ok(t, g.enter())
	g.leave()
}

func TestStartThatDoesNotEndDoesNotHoldFreezeForEver(t *testing.T) {
	var g gate
	ok(t, g.enter())
	if err := g.shut(10 * time.Millisecond); code(err) != guestapi.CodeConflict || g.frozen() {
		t.Errorf("error %v", err)
	}
	ok(t, g.enter())
	g.leave()
	g.leave()
	ok(t, g.shut(time.Minute))
}

func TestStartsAndFreezesInAnyOrderHarmNothing(t *testing.T) {
	h := ready(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				k, err := h.exec(guestapi.ExecRequest{Argv: []string{"true"}})
				if err == nil {
					k.finish()
				} else if code(err) != guestapi.CodeConflict {
					t.Error(err)
				}
			}
		})
	}
	for range 50 {
		_, err := do(h, guestapi.Freeze, guestapi.Empty{})
		ok(t, err)
		h.agent.gate.mu.Lock()
		starting := h.agent.gate.starting
		h.agent.gate.mu.Unlock()
		if starting != 0 {
			t.Errorf("%d starts are under way while frozen", starting)
		}
		_, err = do(h, guestapi.Thaw, guestapi.ThawRequest{})
		ok(t, err)
	}
	wg.Wait()
	ok(t, h.startsPrograms())
}

// overLink is a host that talks to h's agent as in a VM, over a link. next is
// another host on the same port; the one before it has gone without a word.
func (h *host) overLink() (first *link.Session, next func() *link.Session) {
	h.t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	ok(h.t, err)
	conn := func(fd int) net.Conn {
		f := os.NewFile(uintptr(fd), "port")
		defer f.Close()
		c, err := net.FileConn(f)
		ok(h.t, err)
		h.t.Cleanup(func() { c.Close() })
		return c
	}
	guest := conn(fds[1])
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = link.Serve(ctx, guest, func(s *link.Session) { _ = h.agent.Serve(s) })
	}()
	h.t.Cleanup(func() { cancel(); <-done })
	dial := func(fd int) *link.Session {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		s, err := link.Dial(ctx, conn(fd))
		ok(h.t, err)
		h.t.Cleanup(func() { s.Close() })
		return s
	}
	again, err := syscall.Dup(fds[0])
	ok(h.t, err)
	syscall.CloseOnExec(again)
	first = dial(fds[0])
	return first, func() *link.Session {
		first.Close()
		return dial(again)
	}
}

func TestProgramsOfACopyGoOnUnderItsNewHost(t *testing.T) {
	for _, tty := range []bool{false, true} {
		t.Run(fmt.Sprintf("terminal %v", tty), func(t *testing.T) {
			h := ready(t)
			mark := t.TempDir() + "/mark"
			first, next := h.overLink()
			// It writes more than pipe, window and port hold, which nobody reads:
			// when the copy is made it is blocked. Then it reads its input.
			script := "echo begun; head -c 8000000 /dev/zero || exit 1; cat >/dev/null; echo $? >" + mark + ".new; mv " + mark + ".new " + mark
			k := execOver(t, first, guestapi.ExecRequest{ID: "old", Argv: []string{"sh", "-c", script}, Dir: "/", Stdin: true, TTY: tty})
			k.until("begun")
			_, err := do(h, guestapi.Freeze, guestapi.Empty{})
			ok(t, err)
			second := next()
			_, err = do(h, guestapi.Renew, identity())
			ok(t, err)
			eventually(t, "it wrote everything and saw the end of its input", func() bool { _, err := os.Stat(mark); return err == nil })
			if data, err := os.ReadFile(mark); err != nil || string(data) != "0\n" {
				t.Errorf("%q, %v", data, err)
			}
			eventually(t, "its run has ended", func() bool { return h.agent.runs.count() == 0 })
			if r := execOver(t, second, guestapi.ExecRequest{ID: "old", Argv: []string{"echo", "new"}, Dir: "/"}).finish(); string(r.out) != "new\n" {
				t.Errorf("got %+v", r)
			}
		})
	}
}

// execOver is exec on a stream of a link's session.
func execOver(t *testing.T, s *link.Session, req guestapi.ExecRequest) *talk {
	t.Helper()
	conn, err := s.Open(t.Context())
	ok(t, err)
	k, err := converse(t, conn, req)
	ok(t, err)
	return k
}
