package guest

import (
	"context"
	"sync"
	"time"

	"github.com/warren-vm/warren/internal/guest/proc"
	"github.com/warren-vm/warren/internal/guestapi"
)

// gate is what programs are started through. It is shut while the guest is
// frozen.
//
// A start must not meet the freezer: the new process is frozen before it has
// executed its program, and until it has, the agent's thread that made it
// waits in the kernel (vfork), with the reaper's lock. So the gate is shut
// first, and shutting waits for starts that are under way.
type gate struct {
	mu       sync.Mutex
	isShut   bool
	starting int
	quiet    chan struct{} // closed when starting is 0; nil if nobody waits
}

// startsEnd is how long shutting the gate waits for starts under way. They
// take milliseconds; one that takes longer reads its program from a disk that
// does not answer, or from a file system that a program of the guest provides.
const startsEnd = 2 * time.Second

// enter asks to start a program. Without an error, leave follows when the
// program has been executed or could not be.
func (g *gate) enter() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.isShut {
		return refuse(guestapi.CodeConflict, "the guest is being captured; try again")
	}
	g.starting++
	return nil
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.starting--
	if g.starting == 0 && g.quiet != nil {
		close(g.quiet)
		g.quiet = nil
	}
}

// shut closes the gate and returns when no start is under way, or opens it
// again and returns an error when one still is after the given time. A gate
// that is shut stays so, without an error.
func (g *gate) shut(within time.Duration) error {
	g.mu.Lock()
	if g.isShut {
		g.mu.Unlock()
		return nil
	}
	g.isShut = true
	if g.starting == 0 {
		g.mu.Unlock()
		return nil
	}
	quiet := make(chan struct{})
	g.quiet = quiet
	g.mu.Unlock()
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-quiet:
		return nil
	case <-timer.C:
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.starting == 0 {
		return nil
	}
	g.isShut, g.quiet = false, nil
	return refuse(guestapi.CodeConflict, "a program has been starting for %v and cannot be frozen on its way; try again", within)
}

func (g *gate) open() {
	g.mu.Lock()
	g.isShut = false
	g.mu.Unlock()
}

func (g *gate) frozen() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.isShut
}

// launch starts a command among the programs. An error is worded for the one
// who asked for it.
func (a *Agent) launch(c *proc.Command, files []uintptr, tty bool) (*proc.Process, error) {
	if err := a.gate.enter(); err != nil {
		return nil, err
	}
	defer a.gate.leave()
	attr := c.Attr(files, tty)
	if a.opt.Cgroup != 0 {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, a.opt.Cgroup
	}
	p, err := a.opt.Reaper.Start(c.Path, c.Argv, attr)
	if err != nil {
		return nil, c.Explain(err)
	}
	return p, nil
}

func (a *Agent) freeze(context.Context, guestapi.Empty) (info guestapi.FreezeInfo, err error) {
	a.changing.Lock()
	defer a.changing.Unlock()
	if err := a.ready(); err != nil {
		return info, err
	}
	was := a.gate.frozen()
	if err := a.gate.shut(startsEnd); err != nil {
		return info, err
	}
	info, err = a.opt.System.Freeze()
	if err != nil && !was {
		a.gate.open()
	}
	return info, err
}

func (a *Agent) thaw(_ context.Context, req guestapi.ThawRequest) (none guestapi.Empty, err error) {
	if req.UnixNano < 0 {
		return none, refuse(guestapi.CodeBadRequest, "clock is not after 1970")
	}
	a.changing.Lock()
	defer a.changing.Unlock()
	// Also under the lock: after a Renew that failed nothing may run.
	if err := a.ready(); err != nil {
		return none, err
	}
	if req.UnixNano != 0 {
		if err := a.opt.System.SetClock(time.Unix(0, req.UnixNano)); err != nil {
			return none, err
		}
	}
	if err := a.opt.System.Thaw(); err != nil {
		return none, err
	}
	a.gate.open()
	return none, nil
}

func (a *Agent) renew(_ context.Context, req guestapi.RenewRequest) (info guestapi.RenewInfo, err error) {
	if err := checkIdentity(req); err != nil {
		return info, err
	}
	a.changing.Lock()
	defer a.changing.Unlock()
	if err := a.ready(); err != nil {
		return info, err
	}
	if !a.gate.frozen() {
		return info, refuse(guestapi.CodeConflict, "the guest is not frozen; only a copy of a frozen guest is renewed")
	}
	// As in prepare: a copy that is not wholly renewed is somebody's twin.
	a.state.Store(stateBroken)
	info, err = a.opt.System.Renew(req)
	if err != nil {
		return info, err
	}
	a.state.Store(statePrepared)
	a.gate.open()
	return info, nil
}
