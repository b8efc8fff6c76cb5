package bench

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"time"

	"github.com/warren-vm/warren/internal/guestimage"
	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/vm"
)

// bed is what all benchmarks of a run stand on.
type bed struct {
	o     Options
	home  store.Home
	image *guestimage.Image
	qemu  string
	host  Machine
}

func newBed(ctx context.Context, o Options) (*bed, error) {
	b := &bed{o: o, home: store.Home(o.Home), host: describeHost(time.Now())}
	var err error
	if b.home == "" {
		if b.home, err = store.DefaultHome(); err != nil {
			return nil, err
		}
	}
	if b.image, err = guestimage.OpenContext(ctx, b.home.Dir()); err != nil {
		return nil, err
	}
	if b.qemu, err = exec.LookPath(vm.DefaultQEMU); err != nil {
		return nil, fmt.Errorf("%w: %w", vm.ErrNoQEMU, err)
	}
	accel := o.Accel
	if accel == "" || accel == "auto" {
		choice, err := vm.ChooseAccel(ctx, b.home.Cache())
		if err != nil {
			return nil, fmt.Errorf("choose an accelerator: %w", err)
		}
		accel = string(choice.Accel)
	}
	b.o.Accel, b.o.Home = accel, b.home.Dir()
	b.host.Accel = accel
	if b.host.QEMU, err = vm.Version(ctx, b.qemu, b.home.Cache()); err != nil {
		return nil, err
	}
	b.host.GuestImage = b.image.Manifest.ImageID
	b.host.GuestCPUs, b.host.GuestMemoryMiB = o.CPUs, o.MemMB
	return b, nil
}

// machine boots a machine that serves as a subject, and tells what a plain
// QEMU beside it has to look like.
func (b *bed) machine(ctx context.Context) (*machine.Machine, plain, error) {
	m, err := machine.Boot(ctx, b.o.machine())
	if err != nil {
		return nil, plain{}, err
	}
	p, err := b.plain(ctx, m)
	if err != nil {
		return nil, plain{}, errors.Join(err, closeMachine(m))
	}
	return m, p, nil
}

func (b *bed) plain(ctx context.Context, m *machine.Machine) (plain, error) {
	status, err := m.Status(ctx)
	if err != nil {
		return plain{}, err
	}
	p, err := asStarted(status.QEMUPID)
	if err != nil {
		return plain{}, err
	}
	p.QEMU, p.CPUs, p.MemMB = b.qemu, b.o.CPUs, b.o.MemMB
	p.Kernel, p.Initramfs = b.image.Kernel, b.image.Initramfs
	return p, nil
}

// byTheBook is a QEMU as its manual would have it started with our kernel and
// initramfs. The flags of the processor and the parameters of the kernel that
// make a guest quicker are what Warren knows, and not in the floor.
func (b *bed) byTheBook() plain {
	cpu := "max"
	if b.o.Accel == string(vm.KVM) {
		cpu = "host"
	}
	return plain{
		QEMU: b.qemu, CPUs: b.o.CPUs, MemMB: b.o.MemMB, Accel: []string{"-accel", b.o.Accel, "-cpu", cpu},
		Kernel: b.image.Kernel, Initramfs: b.image.Initramfs, Cmdline: "console=ttyS0 quiet panic=-1",
	}
}

// closeMachine ends a machine whatever ended the run.
func closeMachine(m *machine.Machine) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	return m.Close(ctx)
}

// deadline bounds one turn of a benchmark, so that a guest that hangs ends
// the run with an error. It is far above what a busy machine needs.
func deadline(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, d, fmt.Errorf("nothing came for %v", d))
}

// milliseconds is d as figures are counted.
func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
