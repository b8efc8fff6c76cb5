package boot

import (
	"fmt"
	"time"

	"github.com/warren-vm/warren/internal/guest/hooks"
	"github.com/warren-vm/warren/internal/guestapi"
)

// Renew makes a frozen copy of another VM one of its own, then lets its
// programs run.
func (m *machine) Renew(id guestapi.Identity) (guestapi.RenewInfo, error) {
	runner := hooks.Runner{
		Dir: guestapi.HooksDir, Reaper: m.reaper, Parent: m.cgroups.top,
		Each: hooks.Each, All: hooks.All,
	}
	return renewal{reseed: reseed, clock: m.SetClock, identify: m.identity.put, hooks: runner.Run, thaw: m.freezer.thaw}.run(id)
}

// renewal is what Renew does, its deeds apart so that tests can stand in for
// the kernel.
type renewal struct {
	reseed   func(entropy []byte) error
	clock    func(time.Time) error
	identify func(guestapi.Identity) error
	hooks    func(guestapi.Identity) (results []guestapi.HookResult, left int)
	thaw     func() error
}

// run does it. The order matters: hooks are the guest's code too, so that they
// come after everything that makes the copy unlike others, and the thaw comes
// last. The first step that fails is the last one tried.
func (r renewal) run(id guestapi.Identity) (info guestapi.RenewInfo, err error) {
	info.PhasesUS, err = walk("renew", []step{
		{"reseed", func() error { return r.reseed(id.Entropy) }},
		{"clock", func() error { return r.clock(time.Unix(0, id.UnixNano)) }},
		{"identity", func() error { return r.identify(id) }},
		{"hooks", func() error { info.Hooks, info.HooksLeft = r.hooks(id); return nil }},
		{"thaw", func() error { return r.thaw() }},
	})
	return info, err
}

// step is a part of Prepare or Renew.
type step struct {
	name string
	do   func() error
}

// walk takes the steps one after the other until one fails, and returns how
// long each took in microseconds.
func walk(what string, steps []step) (phases map[string]int64, err error) {
	watch := stopwatch{last: time.Now()}
	for _, s := range steps {
		if err := s.do(); err != nil {
			return nil, fmt.Errorf("%s, %s: %w", what, s.name, err)
		}
		watch.lap(s.name)
	}
	return watch.phases, nil
}
