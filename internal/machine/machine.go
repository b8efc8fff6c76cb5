package machine

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// Machine is one VM ready for use. The embedded client runs programs, moves
// files and asks for figures; see its methods.
//
// A machine is running or gone; Gone tells when. All methods may be called
// from any goroutine. A call that finds the machine gone, or is in flight
// when it goes, returns an error that says why it went.
type Machine struct {
	*supervisor.Client

	id      string
	dir     string
	phases  []Phase
	release func() // of the guest image
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
func Boot(ctx context.Context, o Options) (_ *Machine, err error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	o = o.withDefaults()
	began := time.Now()
	home := store.Home(o.Home)
	if home == "" {
		if home, err = store.DefaultHome(); err != nil {
			return nil, err
		}
	}
	p, err := prepare(ctx, o, home)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			p.release()
		}
	}()
	dir, err := newDir(home, p.image)
	if err != nil {
		return nil, err
	}
	m := &Machine{dir: dir.Path, id: dir.ID, release: p.release}
	m.phase("find", time.Since(began))
	o.Step("starting a VM")
	m.Client, err = supervisor.Start(ctx, supervisor.Options{
		VMM:    p.vmm,
		Dir:    dir,
		Config: p.config(o, dir),
		Phase: func(ended supervisor.Phase) {
			m.phase(ended.Name, ended.Duration())
			if next, ok := after[ended.Name]; ok {
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

// Close ends the machine and returns when nothing of it is left; one that may
// outlive this process runs on. QEMU has the guest image open then, so that a
// build may remove it.
func (m *Machine) Close(ctx context.Context) error {
	defer m.release()
	return m.Client.Close(ctx)
}

// after says in words what begins when a phase has ended.
var after = map[string]string{
	control.PhaseQEMU: "booting the guest",
	control.PhaseBoot: "preparing the guest",
}

func (m *Machine) phase(name string, took time.Duration) {
	m.phases = append(m.phases, Phase{name, took})
}

// Phases are what the boot spent its time on, in order: "find" until the
// parts were found and the folder made, then those of package supervisor.
func (m *Machine) Phases() []Phase { return slices.Clone(m.phases) }

// ID is the machine's name among those of this home; Dir its folder, which
// goes when the machine does.
func (m *Machine) ID() string  { return m.id }
func (m *Machine) Dir() string { return m.dir }
