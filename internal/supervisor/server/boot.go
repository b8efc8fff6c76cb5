package server

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/supervisor/control"
	"github.com/warren-vm/warren/internal/vm"
)

// boot brings the VM from nothing to prepared. What it started is in s, for
// windUp to end, also when it fails. A stop request ends it.
func (s *server) boot() error {
	began := s.started
	if at := s.Config.SpawnedUnixNano; at != 0 {
		began = time.Unix(0, at)
	}
	s.phase(control.PhaseSpawn, began)
	if err := s.writeRecord(func(*store.Record) {}); err != nil {
		return fmt.Errorf("write the VM's record: %w", store.WithRemedy(err))
	}
	if err := s.adoptSnapshot(s.stopping); err != nil {
		return err
	}
	m, err := s.startQEMU()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(s.stopping, s.Config.BootTimeout, errBootTimeout)
	defer cancel()
	ctx, exited := context.WithCancelCause(ctx)
	defer exited(nil)
	go func() { // the VM's end ends the wait for its guest
		select {
		case <-m.Exited():
			exited(errExited)
		case <-ctx.Done():
		}
	}()
	if err := s.meet(ctx, m); err != nil {
		return s.bootError(ctx, m, err)
	}
	return nil
}

var (
	errBootTimeout = errors.New("boot timeout")
	errExited      = errors.New("VM exited")
)

// maxConsole bounds what is kept of the guest's console on disk.
const maxConsole = 1 << 20

func (s *server) startQEMU() (Machine, error) {
	since := time.Now()
	log, err := vm.BoundedLog(s.Dir.Console(), maxConsole)
	if err != nil {
		return nil, fmt.Errorf("start the VM: %w", store.WithRemedy(err))
	}
	s.consoleLog = log
	m, err := s.Launch(s.stopping, s.Config, io.MultiWriter(s.console, log))
	if err != nil {
		if s.stopping.Err() != nil {
			err = context.Cause(s.stopping)
		}
		return nil, fmt.Errorf("start the VM: %w", err)
	}
	s.mu.Lock()
	s.machine = m
	s.mu.Unlock()
	s.phase(control.PhaseQEMU, since)
	process, err := store.FindProcess(m.PID())
	if err == nil {
		err = s.writeRecord(func(r *store.Record) { r.QEMU = process })
	}
	select {
	case <-m.Exited(): // then its process is not to be found, and boot says why
		err = nil
	default:
	}
	if err != nil {
		return nil, fmt.Errorf("write the VM's record: %w", store.WithRemedy(err))
	}
	return m, s.goOn(m)
}

// goOn lets a restored guest run; its programs are frozen until it is renewed.
func (s *server) goOn(m Machine) error {
	if s.Config.Snapshot == "" {
		return nil
	}
	if v, ok := m.(interface{ Version() string }); ok && v.Version() != s.Config.Machine.QEMU {
		return fmt.Errorf("restore snapshot %s: made by QEMU %s, this is %s; start afresh, or install that version",
			s.Config.Snapshot, s.Config.Machine.QEMU, v.Version())
	}
	c, ok := m.(capturer)
	if !ok {
		return errors.New("this VM cannot be restored")
	}
	return c.Resume(s.stopping)
}

// meet opens the link and makes the guest's acquaintance.
func (s *server) meet(ctx context.Context, m Machine) error {
	since := time.Now()
	l, err := s.Dial(ctx, m.Link())
	if err != nil {
		return fmt.Errorf("reach the guest agent: %w", err)
	}
	s.phase(control.PhaseBoot, since)
	g := newGuest(s, l)
	s.mu.Lock()
	s.guest = g // not yet offered to clients: the state is still Starting
	s.mu.Unlock()

	hello, err := s.greet(ctx, g)
	if err != nil {
		return err
	}
	since = time.Now()
	phases, err := s.settle(ctx, g)
	if err != nil {
		return err
	}
	s.phase(control.PhasePrepare, since)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hello, s.prepare = hello, cleanPhases(phases)
	s.hello.Kernel = oneLine(hello.Kernel, 200)
	s.hello.Prepared, s.hello.Frozen = !s.Config.VM.SharedMemory, false
	s.state = control.Running
	return nil
}

// greet asks the agent who it is. That of a copy is known from its snapshot,
// and every call it has to answer first takes milliseconds.
func (s *server) greet(ctx context.Context, g *guest) (guestapi.HelloInfo, error) {
	if s.Config.Snapshot != "" {
		return guestapi.HelloInfo{Protocol: guestapi.Protocol, ImageID: s.Config.ImageID}, nil
	}
	since := time.Now()
	hello, err := call(ctx, g, guestapi.Hello, guestapi.Empty{})
	if err != nil {
		return hello, fmt.Errorf("ask the guest agent who it is: %w", err)
	}
	s.phase(control.PhaseLink, since)
	return hello, s.checkHello(hello)
}

// settle brings the guest to where it is of use: a VM that will be a template
// to where it is idle, a copy to its own identity, any other to an identity
// and a disk. It returns the guest's account of the time, in microseconds.
func (s *server) settle(ctx context.Context, g *guest) (map[string]int64, error) {
	switch {
	case s.Config.VM.SharedMemory:
		return nil, s.awaitIdle(ctx)
	case s.Config.Prepared:
		since := time.Now()
		info, err := call(ctx, g, guestapi.Renew, s.identity())
		if err != nil {
			return nil, fmt.Errorf("give the copy its own identity: %w", err)
		}
		own := time.Duration(0) // what the guest did after it had the time
		for _, us := range cleanPhases(info.PhasesUS) {
			own += time.Duration(us) * time.Microsecond
		}
		s.mendClock(ctx, g, time.Since(since)-min(own, guestapi.Renew.Deadline))
		for _, hook := range info.Hooks {
			if hook.Code != 0 || hook.Error != "" {
				s.Log.Warn("a hook of the guest failed", "hook", oneLine(hook.Name, 100), "code", hook.Code, "error", oneLine(hook.Error, 200))
			}
		}
		return info.PhasesUS, nil
	}
	info, err := call(ctx, g, guestapi.Prepare, s.identity())
	if err != nil {
		return nil, fmt.Errorf("prepare the guest: %w", err)
	}
	return info.PhasesUS, nil
}

// clockSlack is how late a guest may get the time. On a host that is busy with
// the starts of other VMs it can be seconds.
const clockSlack = 25 * time.Millisecond

// mendClock sets the guest's clock once more when what set it took so long to
// arrive that it was set to the past.
func (s *server) mendClock(ctx context.Context, g *guest, late time.Duration) {
	for try := 0; late > clockSlack && try < 5; try++ {
		since := time.Now()
		if _, err := call(ctx, g, guestapi.SetClock, guestapi.SetClockRequest{UnixNano: since.UnixNano()}); err != nil {
			s.Log.Warn("set the guest's clock", "error", err)
			return
		}
		late = time.Since(since)
	}
}

// checkHello refuses an agent that this supervisor was not made for. What it
// says of itself is no proof of anything: this finds mistakes, not attacks.
func (s *server) checkHello(h guestapi.HelloInfo) error {
	switch {
	case h.Protocol != guestapi.Protocol:
		return fmt.Errorf("the guest image speaks protocol %d, this program %d; run `kosa8 image build`", h.Protocol, guestapi.Protocol)
	case h.ImageID != s.Config.ImageID:
		return fmt.Errorf("the guest says its image is %q, but its manifest says %q; run `kosa8 image build`",
			oneLine(h.ImageID, 200), s.Config.ImageID)
	case h.Prepared:
		return errors.New("the guest says it has an identity already; a VM gets one exactly once, start another VM")
	}
	return nil
}

// identity is made at the last moment, for the clock's sake.
func (s *server) identity() guestapi.Identity {
	id := s.Config.Identity.MachineID
	if id == "" {
		var b [16]byte
		rand.Read(b[:])
		id = fmt.Sprintf("%x", b)
	}
	entropy := make([]byte, 64+3)
	rand.Read(entropy)
	now := time.Now().UnixNano()
	// The time makes it grow, to a millisecond or so; the rest makes that of
	// copies which are made at once differ.
	generation := uint64(now)&^(1<<24-1) | uint64(entropy[64])<<16 | uint64(entropy[65])<<8 | uint64(entropy[66])
	return guestapi.Identity{
		Hostname:   s.Config.Identity.Hostname,
		MachineID:  id,
		Generation: generation,
		Entropy:    entropy[:64],
		UnixNano:   now,
	}
}

// cleanPhases keeps of the guest's account what looks like one.
func cleanPhases(in map[string]int64) map[string]int64 {
	const most = 32
	out := make(map[string]int64)
	for name, us := range in {
		if len(out) < most && len(name) <= 32 && us >= 0 && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789_-") == "" {
			out[name] = us
		}
	}
	return out
}

// bootError says why the guest was not reached: the VM's own end before
// whatever came of it, and what its console shows.
func (s *server) bootError(ctx context.Context, m Machine, err error) error {
	// QEMU closes the link a moment before it is gone.
	if link := s.linkDone(); ctx.Err() == nil && (link == nil || isDone(link)) {
		select {
		case <-m.Exited():
		case <-time.After(time.Second):
		}
	}
	switch {
	case s.stopping.Err() != nil:
		return fmt.Errorf("the start was given up: %w", context.Cause(s.stopping))
	case isDone(m.Exited()):
		err = fmt.Errorf("the VM ended while it booted: %s", s.exitReason(m))
	case context.Cause(ctx) == errBootTimeout:
		err = fmt.Errorf("the guest did not get ready within %v; is this machine very busy? try again, or allow more time", s.Config.BootTimeout)
	}
	lines := s.console.Lines()
	if len(lines) == 0 {
		return fmt.Errorf("%w (its console shows nothing)", err)
	}
	return fmt.Errorf("%w\nthe last lines of its console:\n  %s", err, strings.Join(lines, "\n  "))
}

// linkDone is the link's end, nil before there is one.
func (s *server) linkDone() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.guest == nil {
		return nil
	}
	return s.guest.link.Done()
}

// exitReason puts the kernel's own words, if it panicked, before QEMU's.
func (s *server) exitReason(m Machine) string {
	if line := s.console.Panic(); line != "" {
		return "the guest's kernel gave up: " + line
	}
	return m.Reason()
}

func isDone(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}
