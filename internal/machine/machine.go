package machine

import (
	"context"
	"errors"
	"time"

	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/supervisor"
)

// Machine is one VM ready for use. The embedded client runs programs, moves
// files and asks for figures; see its methods.
//
// A machine is running or gone; Gone tells when. All methods may be called
// from any goroutine. A call that finds the machine gone, or is in flight
// when it goes, returns an error that says why it went.
type Machine struct {
	*supervisor.Client

	id     string
	dir    string
	phases []Phase
}

// Phase is a part of the time a machine took to be ready.
type Phase struct {
	Name string
	Took time.Duration
}

// Boot starts a machine and returns when programs can run in it.
//
// The image, the accelerator and the supervisor are looked for side by side;
// what is wrong with several of them is reported at once. When Boot returns
// an error, also that of ctx, nothing of the machine is left: no process, no
// file. The machine ends with this process unless o.Outlive is set.
func Boot(ctx context.Context, o Options) (*Machine, error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	o = o.withDefaults()
	began := time.Now()
	home := store.Home(o.Home)
	if home == "" {
		var err error
		if home, err = store.DefaultHome(); err != nil {
			return nil, err
		}
	}
	o.Step("preparing a VM")
	p, err := prepare(ctx, o, home)
	if err != nil {
		return nil, err
	}
	dir, err := newDir(home, p.image)
	if err != nil {
		return nil, err
	}
	o.Step("starting a VM (" + string(p.accel) + ")")
	prepared := time.Since(began)
	client, err := supervisor.Start(ctx, supervisor.Options{
		VMM:    p.vmm,
		Dir:    dir,
		Config: p.config(o, dir),
	})
	if err != nil {
		return nil, errors.Join(err, dir.Remove())
	}
	if err := dir.Close(); err != nil { // the supervisor holds the lock now
		return nil, errors.Join(err, client.Stop(ctx))
	}
	m := &Machine{Client: client, id: dir.ID, dir: dir.Path}
	m.phases = append(m.phases, Phase{"prepare", prepared})
	return m, nil
}

// ID is the machine's name among those of this home; Dir its folder, which
// goes when the machine does.
func (m *Machine) ID() string  { return m.id }
func (m *Machine) Dir() string { return m.dir }
