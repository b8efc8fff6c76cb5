package vm

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// writeFile makes a file that QEMU's user may read.
func writeFile(t *testing.T, name string, data []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestAGoodSpecHasNoFault(t *testing.T) {
	k := writeFile(t, "kernel", []byte("k"))
	s := Spec{CPUs: 2, MemMB: 128, Accel: TCG, Kernel: k, Initramfs: k, Cmdline: "a", RootDisk: k,
		DataDisk: k, DataBase: k, Memory: filepath.Join(t.TempDir(), "memory")}
	if err := s.Check(); err != nil {
		t.Error(err)
	}
	if err := (Spec{CPUs: 1, MemMB: 64, Accel: TCG, Paused: true}).Check(); err != nil {
		t.Error(err)
	}
}

func TestAllFaultsAreSaidAtOnce(t *testing.T) {
	err := Spec{CPUs: 0, MemMB: 1 << 40, Accel: "xen", QEMU: "/no/such/qemu", Firmware: "../x", RootDisk: "/no/such/disk",
		DataDisk: "relative", Cmdline: "a\nb", Initramfs: "/"}.Check()
	if err == nil {
		t.Fatal("no fault")
	}
	if !errors.Is(err, ErrNoQEMU) || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its kinds are lost: %v", err)
	}
	for _, want := range []string{
		"cpus 0: between 1 and 64 are possible",
		"memory 1099511627776 MiB: between 64 and the ",
		`accelerator "xen": there are kvm and tcg`,
		"QEMU not found: /no/such/qemu: ",
		`firmware "../x": only qboot.rom is known`,
		"kernel: none given; build the guest image with `kosa8 image build`",
		"initramfs and command line: of no use without a kernel",
		"kernel command line: at most 2047 characters, none of them a control character",
		"data disk: the overlay and the image under it must be given together",
		"initramfs /: not a regular file",
		"root disk: stat /no/such/disk: no such file or directory",
		"data disk relative: the path must be absolute",
	} {
		if !strings.Contains("\n"+err.Error(), "\n"+want) {
			t.Errorf("it does not say %q:\n%v", want, err)
		}
	}
}

func TestEveryFaultHasItsSentence(t *testing.T) {
	good := Spec{CPUs: 1, MemMB: 64, Accel: TCG, Paused: true}
	empty := writeFile(t, "empty", nil)
	short := writeFile(t, "short", []byte("x"))
	for _, c := range []struct {
		name   string
		change func(*Spec)
		want   string
	}{
		{"too many processors", func(s *Spec) { s.CPUs = 65 }, "cpus 65: between 1 and 64 are possible"},
		{"negative memory", func(s *Spec) { s.MemMB = -5 }, "memory -5 MiB: between 64 and the "},
		{"empty disk", func(s *Spec) { s.RootDisk = empty }, "root disk " + empty + ": empty"},
		{"memory of another size", func(s *Spec) { s.Memory = short }, "memory file " + short + ": 1 bytes, the VM has 67108864"},
		{"no folder for the memory", func(s *Spec) { s.Memory = "/no/such/memory" }, "memory file: folder /no/such: no such file or directory"},
		{"relative memory", func(s *Spec) { s.Memory = "memory" }, "memory file memory: the path must be absolute"},
		{"zero in the command line", func(s *Spec) { s.Kernel, s.Cmdline = short, "a\x00" }, "kernel command line: "},
	} {
		s := good
		c.change(&s)
		if err := s.Check(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

func TestQuickFirmwareIsTakenWhereQEMUHasIt(t *testing.T) {
	dir := t.TempDir()
	qemu := filepath.Join(dir, "bin", "qemu")
	data := filepath.Join(dir, "share", "qemu")
	for _, d := range []string{filepath.Dir(qemu), data} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(qemu, []byte("#!/bin/sh\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "qemu")
	if err := os.Symlink(qemu, link); err != nil {
		t.Fatal(err)
	}
	if got := QuickFirmware(link, TCG); got != "" {
		t.Errorf("without the file: %q", got)
	}
	if err := os.WriteFile(filepath.Join(data, quickFirmware), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := QuickFirmware(link, TCG); got != quickFirmware {
		t.Errorf("with the file: %q", got)
	}
	if got := QuickFirmware(link, KVM); got != "" {
		t.Errorf("with KVM: %q", got)
	}
	if got := QuickFirmware("/no/such/qemu", TCG); got != "" {
		t.Errorf("without QEMU: %q", got)
	}
}

func TestAMissingQEMUNamesThePackage(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	err := (Spec{CPUs: 1, MemMB: 64, Accel: TCG, Paused: true}).Check()
	want := "QEMU not found: no qemu-system-x86_64 in PATH; install it with `sudo apt-get install qemu-system-x86`"
	if err == nil || err.Error() != want {
		t.Errorf("got %v", err)
	}
}

func TestAFileThatQEMUMayNotUseIsNamed(t *testing.T) {
	path := writeFile(t, "kernel", []byte("k"))
	os.Chmod(path, 0o600)
	want := "may not read it (mode 0600); `chmod a+r` it, the folder above can stay private"
	if os.Geteuid() != 0 {
		os.Chmod(path, 0)
		want = "permission denied"
	}
	err := (Spec{CPUs: 1, MemMB: 64, Accel: TCG, Kernel: path}).Check()
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v", err)
	}
}

func TestKVMWithoutItsDeviceIsAFault(t *testing.T) {
	if _, err := os.Stat("/dev/kvm"); err == nil {
		t.Log("this machine has the device: nothing to show")
		return
	}
	err := (Spec{CPUs: 1, MemMB: 64, Accel: KVM, Paused: true}).Check()
	if err == nil || err.Error() != "accelerator kvm: open /dev/kvm: no such file or directory; use --accel tcg" {
		t.Errorf("got %v", err)
	}
}

func TestASpecSurvivesItsJSON(t *testing.T) {
	s := Spec{CPUs: 2, MemMB: 64, Accel: TCG, QEMU: "/q", Kernel: "/k", Initramfs: "/i", Cmdline: "c", Paused: true,
		RootDisk: "/r", DataDisk: "/d", DataBase: "/b", Memory: "/m", Overlays: []string{"/o"}, State: "/s", Differences: []string{"/f"}}
	data, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var got Spec
	if err := json.Unmarshal(data, &got); err != nil || !cmp.Equal(got, s) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, field := range []string{`"mem_mb":64`, `"root_disk":"/r"`, `"data_base":"/b"`} {
		if !strings.Contains(string(data), field) {
			t.Errorf("%s is not in %s", field, data)
		}
	}
}
