package machine

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/warren-vm/warren/internal/guestimage"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/vm"
)

// parts are what every start needs, whichever way the VM comes to be.
type parts struct {
	home  store.Home
	image *guestimage.Image
	// release lets a build remove the image again.
	release func()
	vmm     string
	machine snapshots.Machine
}

// ready checks the options and finds the parts. The Options it returns have
// their defaults.
func ready(ctx context.Context, o Options) (parts, Options, error) {
	if err := o.Check(); err != nil {
		return parts{}, o, err
	}
	o = o.withDefaults()
	home, err := o.homeOf()
	if err != nil {
		return parts{}, o, err
	}
	p, err := prepare(ctx, o, home, "")
	return p, o, err
}

// prepare finds the parts side by side and reports everything that is
// missing at once. imageID is the guest image wanted, "" the one in use.
func prepare(ctx context.Context, o Options, home store.Home, imageID string) (parts, error) {
	p := parts{home: home}
	var imageErr, accelErr, vmmErr, qemuErr error
	var qemu string
	var wg sync.WaitGroup
	wg.Go(func() { p.image, p.release, imageErr = openImage(ctx, home, imageID) })
	wg.Go(func() { p.vmm, vmmErr = supervisor.FindVMM(o.VMM) })
	wg.Go(func() { qemu, qemuErr = vm.Version(ctx, o.QEMU, home.Cache()) })
	accel, accelErr := chooseAccel(ctx, o, home)
	wg.Wait()
	if err := errors.Join(vmmErr, imageErr, accelErr, qemuErr); err != nil {
		if p.release != nil {
			p.release()
		}
		return parts{}, err
	}
	p.machine = snapshots.Machine{
		CPUs: o.CPUs, MemMB: o.MemMB, Accel: string(accel), QEMU: qemu, CPUModel: vm.HostCPU(),
		Firmware: vm.QuickFirmware(o.QEMU, accel),
	}
	return p, nil
}

// openImage opens the image of that id, or the one in use, and keeps it from
// being removed.
func openImage(ctx context.Context, home store.Home, id string) (*guestimage.Image, func(), error) {
	open := func() (*guestimage.Image, error) { return guestimage.OpenContext(ctx, home.Dir()) }
	if id != "" {
		open = func() (*guestimage.Image, error) { return guestimage.OpenGeneration(ctx, home.Dir(), id) }
	}
	for try := 0; ; try++ {
		image, err := open()
		if err != nil {
			return nil, nil, err
		}
		release, err := image.Hold()
		if err == nil {
			return image, release, nil
		}
		// A build may have put a new one in its place just now; that it did
		// so again and again is not believable.
		if try == 3 || !errors.Is(err, guestimage.ErrNotBuilt) {
			return nil, nil, err
		}
	}
}

func chooseAccel(ctx context.Context, o Options, home store.Home) (vm.Accel, error) {
	if o.Accel != "" {
		return vm.Accel(o.Accel), nil
	}
	choice, err := vm.ChooseAccel(ctx, home.Cache())
	if err != nil {
		return "", fmt.Errorf("choose an accelerator: %w", err)
	}
	return choice.Accel, nil
}

// config is the supervisor's for a machine with its folder at dir.
func (p parts) config(o Options, dir *store.VMDir) supervisor.Config {
	return supervisor.Config{
		ID:    dir.ID,
		Dir:   dir.Path,
		Label: clip(o.Label, maxLabel),
		VM: vm.Spec{
			CPUs:      p.machine.CPUs,
			MemMB:     p.machine.MemMB,
			Accel:     vm.Accel(p.machine.Accel),
			QEMU:      o.QEMU,
			Firmware:  p.machine.Firmware,
			Kernel:    p.image.Kernel,
			Initramfs: p.image.Initramfs,
			Cmdline:   cmdline(p.image, vm.Accel(p.machine.Accel)),
			RootDisk:  p.image.Disk,
			DataDisk:  dir.Data(),
			DataBase:  p.image.DataBase,
			// No memory file: nothing is restored from a VM that is booted, and
			// a private mapping of one is filled 4 KiB at a time, which made a
			// boot a third slower.
		},
		ImageID:      p.image.Manifest.ImageID,
		Machine:      p.machine,
		Identity:     supervisor.Identity{Hostname: o.Hostname},
		DataTemplate: p.image.DataTemplate,
		BootTimeout:  o.BootTimeout,
		Outlive:      o.Outlive,
	}
}

// maxLabel is well below what a supervisor takes.
const maxLabel = 200

// clip shortens s to n bytes at most, in one piece of UTF-8.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "")
}

// cmdline is the guest kernel's. Every line on the console costs the guest
// time, so the kernel says nothing below a warning. A panic resets the VM at
// once, which ends QEMU. Virtio devices use message-signalled interrupts;
// routing their unused wires through ACPI's interpreter costs an emulated
// processor 140 ms for each (docs/decisions/0005).
func cmdline(image *guestimage.Image, accel vm.Accel) string {
	line := "console=ttyS0 quiet panic=-1 acpi=noirq warren.image=" + image.Manifest.ImageID
	if accel == vm.TCG {
		line += " " + emulated
	}
	return line
}

// emulated is for a guest whose processors are emulated (docs/decisions/0006
// and 0007). Their time stamp counters are one and the same, which the kernel
// cannot know; left alone it asks an emulated timer chip for every time of day,
// and waits there for all that QEMU does. Mitigations against speculation
// protect nothing in code that is translated anyway. The kernel boots on one
// processor, with its code as for several, and the agent starts the others:
// QEMU can lose what the kernel patches while another processor runs. Checking
// each cipher against known answers on every boot takes 220 ms, reading the
// certificates for signatures of modules, of which there are none, 60 ms.
const emulated = "tsc=reliable mitigations=off maxcpus=1 noreplace-smp cryptomgr.notests=1" +
	" initcall_blacklist=load_system_certificate_list"

// newDir makes the folder of a machine with an empty overlay of the data disk
// in it. When it fails nothing is left.
func newDir(home store.Home, image *guestimage.Image) (*store.VMDir, error) {
	dir, err := home.CreateVM(store.NewID())
	if err != nil {
		return nil, err
	}
	if err := store.CopySparse(image.DataTemplate, dir.Data()); err != nil {
		return nil, errors.Join(store.WithRemedy(err), dir.Remove())
	}
	return dir, nil
}
