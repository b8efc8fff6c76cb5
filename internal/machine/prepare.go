package machine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestimage"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/vm"
)

// parts are what every start needs, whichever way the VM comes to be.
type parts struct {
	image *guestimage.Image
	accel vm.Accel
	vmm   string
}

// prepare finds the parts side by side and reports everything that is
// missing at once.
func prepare(ctx context.Context, o Options, home store.Home) (parts, error) {
	var p parts
	var imageErr, accelErr, vmmErr error
	var wg sync.WaitGroup
	wg.Go(func() { p.image, imageErr = guestimage.Open(home.Dir()) })
	wg.Go(func() { p.vmm, vmmErr = supervisor.FindVMM(o.VMM) })
	p.accel, accelErr = chooseAccel(ctx, o, home)
	wg.Wait()
	if err := errors.Join(vmmErr, imageErr, accelErr); err != nil {
		return parts{}, err
	}
	return p, nil
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
		Label: o.Label,
		VM: vm.Spec{
			CPUs:      o.CPUs,
			MemMB:     o.MemMB,
			Accel:     p.accel,
			QEMU:      o.QEMU,
			Kernel:    p.image.Kernel,
			Initramfs: p.image.Initramfs,
			Cmdline:   cmdline(p.image),
			RootDisk:  p.image.Disk,
			DataDisk:  dir.Data(),
			DataBase:  p.image.DataBase,
			Memory:    dir.Memory(),
		},
		ImageID:     p.image.Manifest.ImageID,
		Identity:    supervisor.Identity{Hostname: o.Hostname},
		BootTimeout: o.BootTimeout,
		Outlive:     o.Outlive,
	}
}

// newDir makes the folder of a machine with an empty overlay of the data disk
// in it. When it fails nothing is left.
func newDir(home store.Home, image *guestimage.Image) (*store.VMDir, error) {
	dir, err := home.CreateVM(store.NewID())
	if err != nil {
		return nil, err
	}
	if err := copyFile(image.DataTemplate, dir.Data()); err != nil {
		return nil, errors.Join(store.WithRemedy(err), dir.Remove())
	}
	return dir, nil
}

// copyFile copies a small file to a new one: as a reflink where the file
// system has them, else its bytes.
func copyFile(from, to string) (err error) {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	if unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())) == nil {
		return nil
	}
	_, err = io.Copy(dst, src)
	return err
}
