package vm

import (
	"fmt"
	"strconv"
)

// Paths are the VM's files as QEMU sees them. A file that the Spec does not
// name is not used.
type Paths struct {
	Kernel, Initramfs, RootDisk, DataDisk, DataBase, Memory string
	// Overlay is where the overlay of that place in Spec.Overlays is.
	Overlay func(place int) string
}

// FDs are the inherited descriptors, as QEMU sees them.
type FDs struct{ QMP, Link, Console int }

// inJail is where Start puts the files.
var inJail = Paths{
	Kernel:    "/vm/kernel",
	Initramfs: "/vm/initramfs",
	RootDisk:  "/vm/root.img",
	DataDisk:  "/vm/data.qcow2",
	DataBase:  "/vm/data.img",
	Memory:    "/vm/memory",
	Overlay:   func(place int) string { return fmt.Sprintf("/vm/frozen%d.qcow2", place) },
}

// LinkPort is the name of the link's virtio-serial port in the guest.
const LinkPort = "warren.link"

// tcgCacheMB bounds TCG's translation cache, in MiB. Left alone it takes up to
// 1 GiB in each busy VM.
const tcgCacheMB = 128

// modern virtio devices have no registers for drivers from before virtio 1.0.
// Each region that the guest's kernel does not have to probe saves an emulated
// one milliseconds.
const modern = "disable-legacy=on"

// Args is QEMU's command line, without argv[0]. It is pure: the same Spec
// gives the same machine, as a restore of it must.
func Args(s Spec, in Paths, fds FDs) []string {
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-machine", "pc,suppress-vmdesc=on,dump-guest-core=off,memory-backend=ram",
		"-smp", strconv.Itoa(s.CPUs),
		"-m", strconv.Itoa(s.MemMB) + "M",
	}
	if s.Accel == KVM {
		args = append(args, "-accel", "kvm", "-cpu", "host")
	} else {
		args = append(args, "-accel", fmt.Sprintf("tcg,thread=multi,tb-size=%d", tcgCacheMB), "-cpu", "max,-erms")
	}
	if s.Firmware != "" {
		args = append(args, "-bios", s.Firmware)
	}
	args = append(args, "-object", memory(s, in))
	if s.Paused || s.State != "" {
		args = append(args, "-S")
	}
	if s.State != "" {
		// The state is loaded when the memory is right; its file has no section
		// that describes the machine it is from.
		args = append(args, "-incoming", "defer", "-global", "migration.send-configuration=off")
	}
	if s.Kernel != "" {
		args = append(args, "-kernel", in.Kernel)
		if s.Initramfs != "" {
			args = append(args, "-initrd", in.Initramfs)
		}
		if s.Cmdline != "" {
			args = append(args, "-append", s.Cmdline)
		}
	}
	args = append(args, channels(fds)...)
	args = append(args, disks(s, in)...)
	return append(args, "-device", "virtio-rng-pci,id=rng,"+modern)
}

// memory is the guest's RAM.
func memory(s Spec, in Paths) string {
	if s.Memory == "" {
		return fmt.Sprintf("memory-backend-ram,id=ram,size=%dM", s.MemMB)
	}
	share := "off"
	if s.SharedMemory {
		share = "on"
	}
	return fmt.Sprintf("memory-backend-file,id=ram,size=%dM,mem-path=%s,share=%s", s.MemMB, in.Memory, share)
}

// channels are the monitor, the console and the link.
func channels(fds FDs) []string {
	return []string{
		"-chardev", fmt.Sprintf("socket,id=qmp,fd=%d", fds.QMP),
		"-mon", "chardev=qmp,mode=control",
		"-chardev", fmt.Sprintf("socket,id=console,fd=%d", fds.Console),
		"-device", "isa-serial,chardev=console,id=serial",
		"-chardev", fmt.Sprintf("socket,id=link,fd=%d", fds.Link),
		"-device", "virtio-serial-pci,id=ports,max_ports=2," + modern,
		"-device", "virtserialport,bus=ports.0,chardev=link,id=link-port,name=" + LinkPort,
	}
}

// disks are the root disk and the data disk. A host disk that is broken shows
// in the guest as an I/O error. For one that is full QEMU pauses the VM and
// says so, see watch.
func disks(s Spec, in Paths) []string {
	var args []string
	if s.RootDisk != "" {
		args = append(args,
			"-blockdev", "driver=file,node-name=root-file,filename="+in.RootDisk+",read-only=on",
			"-blockdev", "driver=raw,node-name=root,file=root-file,read-only=on",
			"-device", "virtio-blk-pci,drive=root,id=root-disk,serial=root,"+modern,
		)
	}
	if s.DataDisk == "" {
		return args
	}
	args = append(args,
		"-blockdev", "driver=file,node-name=data-base-file,filename="+in.DataBase+",read-only=on",
		"-blockdev", "driver=raw,node-name=data-base,file=data-base-file,read-only=on",
	)
	// Frozen overlays have many readers, and the one writer of the last is
	// alone in its folder: locks would say nothing new.
	backing := "data-base"
	for i := range s.Overlays {
		node := fmt.Sprintf("frozen%d", i)
		args = append(args,
			"-blockdev", fmt.Sprintf("driver=file,node-name=%s-file,filename=%s,read-only=on,locking=off", node, in.Overlay(i)),
			"-blockdev", fmt.Sprintf("driver=qcow2,node-name=%s,file=%s-file,backing=%s,read-only=on", node, node, backing),
		)
		backing = node
	}
	return append(args,
		"-blockdev", "driver=file,node-name=data-file,filename="+in.DataDisk+",discard=unmap,locking=off",
		"-blockdev", "driver=qcow2,node-name=data,file=data-file,backing="+backing+",discard=unmap",
		"-device", "virtio-blk-pci,drive=data,id="+dataDevice+",serial=data,werror=enospc,rerror=report,"+modern,
	)
}

// dataDevice is the qdev id of the data disk.
const dataDevice = "data-disk"
