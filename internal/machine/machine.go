package machine

import (
	"context"
	"slices"
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

	id      string
	dir     string
	home    store.Home
	options Options // with defaults
	phases  []Phase
	release func() // of the guest image
}

// Phase is a part of the time a machine took to be ready.
type Phase struct {
	Name string
	Took time.Duration
}

// Boot starts a machine from nothing and returns when programs can run in it.
// It takes seconds, and the machine cannot be snapshotted: Create is for users,
// Boot for what they are compared with.
//
// The image, the accelerator and the supervisor are looked for side by side;
// what is wrong with several of them is reported at once. When Boot returns
// an error, also that of ctx, nothing of the machine is left: no process, no
// file. The machine ends with this process unless o.Outlive is set.
func Boot(ctx context.Context, o Options) (*Machine, error) {
	began := time.Now()
	p, o, err := ready(ctx, o)
	if err != nil {
		return nil, err
	}
	o.Step("starting a VM")
	return launch(ctx, p, o, began, func(*supervisor.Config, *store.VMDir) {})
}

// Close ends the machine and returns when nothing of it is left; one that may
// outlive this process runs on. QEMU has the guest image open then, so that a
// build may remove it.
func (m *Machine) Close(ctx context.Context) error {
	defer m.release()
	return m.Client.Close(ctx)
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
