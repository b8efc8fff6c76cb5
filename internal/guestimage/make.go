package guestimage

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/warren-vm/warren/internal/guestimage/debian"
	"github.com/warren-vm/warren/internal/guestimage/initramfs"
	"github.com/warren-vm/warren/internal/guestimage/kernel"
	"github.com/warren-vm/warren/internal/guestimage/rootdisk"
	"github.com/warren-vm/warren/internal/guestimage/tool"
)

// whole builds everything from packages. The root disk's packages take most
// of the time; the kernel is made beside them.
func (b *build) whole(ctx context.Context, m *Manifest) error {
	if err := space(b.staging, spaceWhole); err != nil {
		return err
	}
	b.Progress("fetching package lists")
	apt, err := debian.Open(ctx, b.tools, b.rel, filepath.Join(b.staging, "apt"))
	if err != nil {
		return err
	}
	rootTar := filepath.Join(b.staging, "root.tar")
	var onDisk []kernel.Module
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		b.Progress("installing packages into the root disk (the longest step)")
		scratch := filepath.Join(b.staging, "root")
		if err := os.Mkdir(scratch, 0o700); err != nil {
			return err
		}
		if err := rootdisk.Bootstrap(gctx, b.tools, apt, packages, scratch, rootTar); err != nil {
			return fmt.Errorf("build the root disk: %w", err)
		}
		return nil
	})
	g.Go(func() (err error) {
		if err := b.dataDisk(gctx); err != nil {
			return fmt.Errorf("build the data disk: %w", err)
		}
		onDisk, err = b.kernel(gctx, apt)
		return err
	})
	if err := g.Wait(); err != nil {
		return err
	}
	b.Progress("writing the root disk")
	contents, err := rootdisk.Write(ctx, b.tools, rootTar, imageIn(b.out()).Disk, b.record.Kernel, onDisk)
	if err != nil {
		return fmt.Errorf("build the root disk: %w", err)
	}
	b.record.PackagesSHA256 = contents.Status
	b.Progress("computing digests")
	return b.sums(ctx, m)
}

// kernel makes the kernel and the initramfs, and returns the modules that
// belong on the root disk.
func (b *build) kernel(ctx context.Context, apt *debian.Apt) ([]kernel.Module, error) {
	b.Progress("fetching the kernel")
	root, version, err := apt.Kernel(ctx, "linux-image-"+b.rel.Arch, b.staging)
	if err != nil {
		return nil, err
	}
	b.record.Kernel = version
	b.Progress("unpacking the kernel " + version)
	packed, err := os.ReadFile(filepath.Join(root, "boot", "vmlinuz-"+version))
	if err != nil {
		return nil, err
	}
	vmlinux, err := kernel.Vmlinux(ctx, b.tools, packed)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(imageIn(b.out()).Kernel, vmlinux, 0o600); err != nil {
		return nil, err
	}
	// Newer packages have their modules below /usr.
	dir := filepath.Join(root, "lib", "modules", version)
	if _, err := os.Stat(dir); err != nil {
		dir = filepath.Join(root, "usr", "lib", "modules", version)
	}
	tree, err := kernel.OpenTree(b.tools, dir)
	if err != nil {
		return nil, err
	}
	boot, err := selectModules(ctx, tree, bootModules)
	if err != nil {
		return nil, err
	}
	onDisk, err := selectModules(ctx, tree, diskModules)
	if err != nil {
		return nil, err
	}
	return onDisk, b.writeInitramfs(func(w *bytes.Buffer) (err error) {
		b.record.ModulesBytes, err = initramfs.Write(w, boot, b.agent)
		return err
	})
}

func selectModules(ctx context.Context, tree *kernel.Tree, list []string) ([]kernel.Module, error) {
	var names []string
	for _, n := range list {
		name, optional := strings.CutPrefix(n, "?")
		if !optional || tree.Has(name) {
			names = append(names, name)
		}
	}
	return tree.Select(ctx, names)
}

func (b *build) writeInitramfs(write func(*bytes.Buffer) error) error {
	var buf bytes.Buffer
	if err := write(&buf); err != nil {
		return fmt.Errorf("build the initramfs: %w", err)
	}
	return os.WriteFile(imageIn(b.out()).Initramfs, buf.Bytes(), 0o600)
}

// dataDisk makes the empty file system and the empty overlay over it.
func (b *build) dataDisk(ctx context.Context) error {
	img := imageIn(b.out())
	f, err := os.OpenFile(img.DataBase, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(DataSize), f.Close()); err != nil {
		return err
	}
	// Both names of the same wish: versions differ in which they know. The
	// configuration is ours, not the host's: it changes the format's defaults.
	tools := &tool.Runner{Log: b.Log, Temp: b.tools.Temp, Env: []string{
		"SOURCE_DATE_EPOCH=1000000000", "E2FSPROGS_FAKE_TIME=1000000000", "MKE2FS_SYNC=0",
	}}
	if err := tools.Run(ctx, tool.Command{Name: "mke2fs", Args: append(dataOptions[:len(dataOptions):len(dataOptions)], img.DataBase)}); err != nil {
		return err
	}
	if err := tools.Run(ctx, tool.Command{Name: "debugfs", Args: []string{"-w", "-f", "-", img.DataBase}, Stdin: strings.NewReader(dataFolders)}); err != nil {
		return err
	}
	// The overlay names its base without a folder; whoever uses it names the
	// base itself.
	return tools.Run(ctx, tool.Command{Name: "qemu-img", Dir: b.out(), Args: []string{
		"create", "-q", "-f", "qcow2", "-o", overlayOptions, "-F", "raw", "-b", dataName, overlayName}})
}

// reuse makes a generation with the packages of old and another agent.
func (b *build) reuse(ctx context.Context, old *Image, was buildRecord, m *Manifest) error {
	if err := space(b.staging, spaceReused); err != nil {
		return err
	}
	b.Progress("putting the new agent into the initramfs")
	img := imageIn(b.out())
	for from, to := range map[string]string{
		old.Disk: img.Disk, old.Kernel: img.Kernel, old.DataBase: img.DataBase, old.DataTemplate: img.DataTemplate,
	} {
		if err := os.Link(from, to); err != nil {
			return err
		}
	}
	b.record.Kernel, b.record.PackagesSHA256, b.record.ModulesBytes = was.Kernel, was.PackagesSHA256, was.ModulesBytes
	f, err := os.Open(old.Initramfs)
	if err != nil {
		return err
	}
	defer f.Close()
	err = b.writeInitramfs(func(w *bytes.Buffer) error {
		return initramfs.Replace(w, f, was.ModulesBytes, b.agent)
	})
	if err != nil {
		return err
	}
	is := old.Manifest
	m.SHA256, m.KernelSHA256, m.DataSHA256, m.OverlaySHA256 = is.SHA256, is.KernelSHA256, is.DataSHA256, is.OverlaySHA256
	return b.sums(ctx, m)
}

// checkStatic says what keeps a program from being a guest's PID 1.
func checkStatic(program []byte) error {
	machine := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[runtime.GOARCH]
	f, err := elf.NewFile(bytes.NewReader(program))
	if err != nil {
		return fmt.Errorf("is not an ELF program (%w)", err)
	}
	if f.Machine != machine {
		return fmt.Errorf("is for %v, the guest is %v", f.Machine, machine)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return errors.New("is linked dynamically, and the initramfs has no libraries (CGO_ENABLED=0)")
		}
	}
	return nil
}

func sha256Hex(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}
