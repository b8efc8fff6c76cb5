package bench

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTheFloorHasWhatWarrensOwnQEMUHas(t *testing.T) {
	got, err := fromCommandLine([]string{
		"/usr/bin/qemu-system-x86_64", "-machine", "pc,memory-backend=ram", "-accel", "tcg,thread=multi,tb-size=256",
		"-cpu", "max", "-smp", "2", "-append", "console=ttyS0 warren.image=x -cpu y", "-no-reboot",
	})
	want := plain{Accel: []string{"-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max"}, Cmdline: "console=ttyS0 warren.image=x -cpu y"}
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for _, argv := range [][]string{nil, {"qemu"}, {"qemu", "-accel"}, {"qemu", "-accel", "tcg", "-append", "x"}} {
		if p, err := fromCommandLine(argv); err == nil {
			t.Errorf("%v: %+v", argv, p)
		}
	}
}

func TestThePlainCommandLineIsPlain(t *testing.T) {
	p := plain{
		QEMU: "qemu", Accel: []string{"-accel", "tcg", "-cpu", "max"}, CPUs: 2, MemMB: 1024,
		Kernel: "/k", Initramfs: "/i", Cmdline: "console=ttyS0",
	}
	boot := []string{
		"-machine", "pc", "-accel", "tcg", "-cpu", "max", "-smp", "2", "-m", "1024",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
		"-kernel", "/k", "-initrd", "/i", "-append", "console=ttyS0",
	}
	if diff := cmp.Diff(boot, p.args()); diff != "" {
		t.Error(diff)
	}
	p.RootDisk, p.DataDisk, p.Ports = "/a,b", "/d", []string{"warren.link", "warren.floor"}
	devices := append(boot,
		"-drive", "if=none,id=root,format=raw,readonly=on,file=/a,,b", "-device", "virtio-blk-pci,drive=root,serial=root",
		"-drive", "if=none,id=data,format=raw,snapshot=on,file=/d", "-device", "virtio-blk-pci,drive=data,serial=data",
		"-device", "virtio-serial-pci",
		"-chardev", "socket,id=port0,fd=3", "-device", "virtserialport,name=warren.link,chardev=port0",
		"-chardev", "socket,id=port1,fd=4", "-device", "virtserialport,name=warren.floor,chardev=port1")
	if diff := cmp.Diff(devices, p.args()); diff != "" {
		t.Error(diff)
	}
}

func TestOptionsAreCheckedAllAtOnce(t *testing.T) {
	if err := (Options{}).Check(); err != nil {
		t.Errorf("the zero options: %v", err)
	}
	o := Options{Names: []string{"boat"}, N: -1, StdioMiB: -1, MemMB: 1}
	err := o.Check()
	want := `no benchmark "boat"; there are ` + strings.Join(Names(), ", ") + `
-1 samples; take 1 to 100000
-1 MiB for stdio; take 1 to 1048576
` + o.machine().Check().Error()
	if err == nil || err.Error() != want {
		t.Errorf("got:\n%v\nwant:\n%s", err, want)
	}
}
