package vm

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTheCommandLineIsTheSpecAndNothingElse(t *testing.T) {
	full := Spec{
		CPUs: 2, MemMB: 1024, Accel: TCG,
		Kernel: "/h/kernel", Initramfs: "/h/initramfs", Cmdline: "console=ttyS0 panic=-1",
		RootDisk: "/h/root", DataDisk: "/h/data", DataBase: "/h/base", Memory: "/h/memory",
	}
	with := func(change func(*Spec)) Spec {
		s := full
		change(&s)
		return s
	}
	const (
		head    = "-nodefaults -no-user-config -display none -no-reboot -sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny -machine pc,suppress-vmdesc=on,dump-guest-core=off,memory-backend=ram "
		tcg     = "-accel tcg,thread=multi,tb-size=128 -cpu max,-erms "
		file    = "-object memory-backend-file,id=ram,size=1024M,mem-path=/vm/memory,share=off "
		boot    = "-kernel /vm/kernel -initrd /vm/initramfs -append console=ttyS0 panic=-1 "
		sockets = "-chardev socket,id=qmp,fd=4 -mon chardev=qmp,mode=control -chardev socket,id=console,fd=6 -device isa-serial,chardev=console,id=serial -chardev socket,id=link,fd=5 -device virtio-serial-pci,id=ports,max_ports=2,disable-legacy=on -device virtserialport,bus=ports.0,chardev=link,id=link-port,name=warren.link "
		root    = "-blockdev driver=file,node-name=root-file,filename=/vm/root.img,read-only=on -blockdev driver=raw,node-name=root,file=root-file,read-only=on -device virtio-blk-pci,drive=root,id=root-disk,serial=root,disable-legacy=on "
		data    = "-blockdev driver=file,node-name=data-base-file,filename=/vm/data.img,read-only=on -blockdev driver=raw,node-name=data-base,file=data-base-file,read-only=on -blockdev driver=file,node-name=data-file,filename=/vm/data.qcow2,discard=unmap,locking=off -blockdev driver=qcow2,node-name=data,file=data-file,backing=data-base,discard=unmap -device virtio-blk-pci,drive=data,id=data-disk,serial=data,werror=enospc,rerror=report,disable-legacy=on "
		frozen  = "-blockdev driver=file,node-name=data-base-file,filename=/vm/data.img,read-only=on -blockdev driver=raw,node-name=data-base,file=data-base-file,read-only=on " +
			"-blockdev driver=file,node-name=frozen0-file,filename=/vm/frozen0.qcow2,read-only=on,locking=off -blockdev driver=qcow2,node-name=frozen0,file=frozen0-file,backing=data-base,read-only=on " +
			"-blockdev driver=file,node-name=frozen1-file,filename=/vm/frozen1.qcow2,read-only=on,locking=off -blockdev driver=qcow2,node-name=frozen1,file=frozen1-file,backing=frozen0,read-only=on " +
			"-blockdev driver=file,node-name=data-file,filename=/vm/data.qcow2,discard=unmap,locking=off -blockdev driver=qcow2,node-name=data,file=data-file,backing=frozen1,discard=unmap -device virtio-blk-pci,drive=data,id=data-disk,serial=data,werror=enospc,rerror=report,disable-legacy=on "
		tailEnd = "-device virtio-rng-pci,id=rng,disable-legacy=on"
	)
	for _, c := range []struct {
		name string
		spec Spec
		want string
	}{
		{"everything, translated", full,
			head + "-smp 2 -m 1024M " + tcg + file + boot + sockets + root + data + tailEnd},
		{"KVM", with(func(s *Spec) { s.Accel = KVM }),
			head + "-smp 2 -m 1024M -accel kvm -cpu host " + file + boot + sockets + root + data + tailEnd},
		{"quick firmware", with(func(s *Spec) { s.Firmware = quickFirmware }),
			head + "-smp 2 -m 1024M " + tcg + "-bios qboot.rom " + file + boot + sockets + root + data + tailEnd},
		{"no data disk", with(func(s *Spec) { s.DataDisk, s.DataBase = "", "" }),
			head + "-smp 2 -m 1024M " + tcg + file + boot + sockets + root + tailEnd},
		{"anonymous memory", with(func(s *Spec) { s.Memory = "" }),
			head + "-smp 2 -m 1024M " + tcg + "-object memory-backend-ram,id=ram,size=1024M " + boot + sockets + root + data + tailEnd},
		{"paused, with nothing to boot", Spec{CPUs: 1, MemMB: 64, Accel: TCG, Paused: true},
			head + "-smp 1 -m 64M " + tcg + "-object memory-backend-ram,id=ram,size=64M -S " + sockets + tailEnd},
		{"a memory that others will start from", with(func(s *Spec) { s.SharedMemory = true }),
			head + "-smp 2 -m 1024M " + tcg + strings.Replace(file, "share=off", "share=on", 1) + boot + sockets + root + data + tailEnd},
		{"a restore", with(func(s *Spec) {
			s.Kernel, s.Initramfs, s.Cmdline, s.State, s.Overlays = "", "", "", "/h/state", []string{"/h/one", "/h/two"}
		}),
			head + "-smp 2 -m 1024M " + tcg + file + "-S -incoming defer -global migration.send-configuration=off " + sockets + root + frozen + tailEnd},
		{"no initramfs, no command line", with(func(s *Spec) { s.Initramfs, s.Cmdline = "", "" }),
			head + "-smp 2 -m 1024M " + tcg + file + "-kernel /vm/kernel " + sockets + root + data + tailEnd},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := strings.Join(Args(c.spec, inJail, FDs{QMP: 4, Link: 5, Console: 6}), " ")
			if diff := cmp.Diff(strings.Split(c.want, " -"), strings.Split(got, " -")); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestTheKernelCommandLineIsOneArgument(t *testing.T) {
	s := Spec{CPUs: 1, MemMB: 64, Accel: TCG, Kernel: "/k", Cmdline: `a="b c",d -device evil`}
	args := Args(s, inJail, FDs{})
	found := false
	for i, a := range args {
		found = found || a == "-append" && args[i+1] == s.Cmdline
	}
	if !found {
		t.Errorf("%q", args)
	}
}
