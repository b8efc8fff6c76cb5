package machine

import (
	"context"
	"errors"
	"time"

	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// launch makes a VM's folder with an empty overlay of the data disk in it and
// starts a supervisor with the config that complete gives. It takes over p,
// also when it fails; nothing is left then.
func launch(ctx context.Context, p parts, o Options, began time.Time,
	complete func(c *supervisor.Config, dir *store.VMDir)) (_ *Machine, err error) {
	defer func() {
		if err != nil {
			p.release()
		}
	}()
	dir, err := newDir(p.home, p.image)
	if err != nil {
		return nil, err
	}
	m := &Machine{dir: dir.Path, id: dir.ID, home: p.home, options: o, release: p.release}
	config := p.config(o, dir)
	complete(&config, dir)
	m.phase("find", time.Since(began))
	m.Client, err = supervisor.Start(ctx, supervisor.Options{
		VMM:    p.vmm,
		Dir:    dir,
		Config: config,
		Phase: func(ended supervisor.Phase) {
			m.phase(ended.Name, ended.Duration())
			if next, ok := after[ended.Name]; ok && config.Snapshot == "" {
				o.Step(next)
			}
		},
	})
	if err != nil {
		return nil, errors.Join(err, dir.Remove())
	}
	if err := dir.Close(); err != nil { // the supervisor holds the lock now
		return nil, errors.Join(err, m.Client.Close(context.WithoutCancel(ctx)))
	}
	return m, nil
}

// after says in words what begins when a phase of a boot has ended.
var after = map[string]string{
	control.PhaseQEMU: "booting the guest",
	control.PhaseBoot: "preparing the guest",
}

// homeOf is the home that o names, or the default one.
func (o Options) homeOf() (store.Home, error) {
	if o.Home != "" {
		return store.Home(o.Home), nil
	}
	return store.DefaultHome()
}
