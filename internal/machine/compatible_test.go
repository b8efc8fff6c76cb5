package machine

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/warren-vm/warren/internal/store/snapshots"
)

func TestASnapshotFitsOnlyAHostLikeItsOwn(t *testing.T) {
	here := snapshots.Machine{CPUs: 2, MemMB: 256, Accel: "tcg", QEMU: "7.2.22", CPUModel: "EPYC", Firmware: "qboot.rom"}
	for _, tt := range []struct {
		name   string
		change func(*snapshots.Machine)
		says   []string
	}{
		{"the same", func(*snapshots.Machine) {}, nil},
		{"another QEMU", func(m *snapshots.Machine) { m.QEMU = "9.1.0" }, []string{`made by QEMU "9.1.0", this host has "7.2.22"`}},
		{"another processor", func(m *snapshots.Machine) { m.CPUModel = "Xeon" }, []string{`made on the processor "Xeon"`}},
		{"another firmware", func(m *snapshots.Machine) { m.Firmware = "" }, []string{`made with the firmware ""`}},
		{"all at once", func(m *snapshots.Machine) { m.QEMU, m.CPUModel, m.Firmware = "9", "x", "y" },
			[]string{"QEMU", "processor", "firmware", "on a host like the one it was made on"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := snapshots.Manifest{ID: "s1", Machine: here}
			tt.change(&m.Machine)
			err := compatible(m, here)
			if (err != nil) != (len(tt.says) > 0) || err != nil && !errors.Is(err, ErrIncompatible) {
				t.Fatalf("err %v", err)
			}
			for _, want := range tt.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
		})
	}
}

func TestASnapshotOfKVMNeedsKVM(t *testing.T) {
	made := snapshots.Manifest{ID: "s1", Machine: snapshots.Machine{Accel: "kvm"}}
	err := compatible(made, snapshots.Machine{Accel: "kvm"})
	f, opened := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if opened == nil {
		f.Close()
	}
	if (err == nil) != (opened == nil) || err != nil && !errors.Is(err, ErrIncompatible) {
		t.Errorf("/dev/kvm: %v; the snapshot: %v", opened, err)
	}
}
