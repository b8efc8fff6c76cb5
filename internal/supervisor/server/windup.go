package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

const (
	// exitGrace is how long a VM may take to be gone after its link broke or
	// its guest promised to power off.
	exitGrace = 10 * time.Second
	// stopLimit bounds QEMU's end, every escalation included.
	stopLimit = 15 * time.Second
	// hardLimit is when the process gives up cleaning up after itself.
	hardLimit = 45 * time.Second
)

// windUp waits for the VM's end, or brings it about, and leaves nothing
// behind. bootErr is what boot returned.
func (s *server) windUp(bootErr error) control.End {
	s.mu.Lock()
	m, g := s.machine, s.guest
	s.mu.Unlock()
	var end control.End
	switch {
	case m == nil || g == nil || bootErr != nil:
		end.Reason = fmt.Sprintf("it did not start: %v", bootErr)
	default:
		end = s.await(m, g)
	}
	s.mu.Lock()
	s.state = control.Stopping
	s.mu.Unlock()

	if s.GiveUp != nil {
		defer time.AfterFunc(hardLimit, s.GiveUp).Stop()
	}
	gone := control.Faultf(control.Gone, "the VM ended: %s", end.Reason)
	s.stop(&ending{end})
	s.kill(gone)
	if m != nil {
		s.stopMachine(m)
	}
	if g != nil {
		g.link.Close()
		g.close()
	}
	if s.consoleLog != nil {
		s.consoleLog.Close()
	}
	s.aside.Wait()
	s.letGo()
	s.end = end
	s.leave(end, bootErr == nil)
	close(s.told)
	return end
}

// await returns when the VM has ended or must be ended by force.
func (s *server) await(m Machine, g *guest) control.End {
	select {
	case <-m.Exited():
		return s.endOf(m)
	case <-g.link.Done():
		// A VM that ends takes its link along; only one that stays has
		// broken it.
		select {
		case <-m.Exited():
			return s.endOf(m)
		case <-s.now.Done():
		case <-time.After(s.wait(exitGrace / 5)):
		}
		if err := context.Cause(s.stopping); err != nil {
			return s.asked()
		}
		return control.End{Reason: fmt.Sprintf("the guest broke the link: %v", g.link.Err())}
	case <-s.stopping.Done():
	}
	s.mu.Lock()
	s.state = control.Stopping
	s.mu.Unlock()
	if s.now.Err() == nil {
		s.askToStop(m, g)
	}
	return s.asked()
}

func (s *server) endOf(m Machine) control.End {
	if s.stopping.Err() != nil {
		return s.asked()
	}
	return control.End{Reason: s.exitReason(m)}
}

// asked is the reason given with the first stop request.
func (s *server) asked() control.End {
	var why *ending
	if errors.As(context.Cause(s.stopping), &why) {
		return why.End
	}
	return control.End{Reason: "it was stopped", Asked: true}
}

// askToStop lets the guest end its programs, sync and power off. It returns
// when the VM is gone, has had its time, or is to end now.
func (s *server) askToStop(m Machine, g *guest) {
	if _, err := call(s.now, g, guestapi.Shutdown, guestapi.Empty{}); err != nil {
		s.Log.Warn("the guest does not shut down", "error", err)
		return
	}
	select {
	case <-m.Exited():
	case <-s.now.Done():
	case <-time.After(s.wait(exitGrace)):
		s.Log.Warn("the guest said it would power off and does not")
	}
}

func (s *server) stopMachine(m Machine) {
	ctx, cancel := context.WithTimeout(context.Background(), stopLimit)
	defer cancel()
	if err := m.Stop(ctx); err != nil {
		s.Log.Error("stop QEMU", "error", err)
	}
}

// leave removes the VM's folder. That of a VM without an owner which ended
// unasked stays until the next sweep, with the reason in its record, for
// whoever looks for it.
func (s *server) leave(end control.End, ran bool) {
	if s.Config.Outlive && !end.Asked && ran {
		err := s.writeRecord(func(r *store.Record) { r.Ended = end.Reason })
		if err := errors.Join(err, s.Dir.Close()); err != nil {
			s.Log.Error("leave the VM's folder", "error", err)
		}
		return
	}
	if err := s.Dir.Remove(); err != nil {
		s.Log.Error("remove the VM's folder", "error", err)
	}
}
