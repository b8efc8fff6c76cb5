package supervisor

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/warren-vm/warren/internal/vm"
)

func goodConfig() Config {
	return Config{
		ID: "one", Dir: "/vms/one", ImageID: "image-1",
		VM:       vm.Spec{CPUs: 1, MemMB: 64, Accel: vm.TCG, Paused: true},
		Identity: Identity{Hostname: "one", MachineID: strings.Repeat("0a", 16)},
	}
}

func TestConfigComesBackAsWritten(t *testing.T) {
	want := goodConfig()
	want.BootTimeout, want.Outlive, want.SpawnedUnixNano = 7*time.Second, true, 12
	data, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ReadConfig(strings.NewReader(string(data)))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestConfigTellsAllItsFaultsAtOnce(t *testing.T) {
	c := Config{
		ID: "../x", Dir: "relative", Label: strings.Repeat("l", 1001), ImageID: "a b",
		Identity: Identity{Hostname: "-", MachineID: "xyz"}, BootTimeout: time.Millisecond,
		VM: vm.Spec{CPUs: 0, MemMB: 64, Accel: vm.TCG, Paused: true},
	}
	err := c.Check()
	if err == nil {
		t.Fatal("no fault")
	}
	for _, want := range []string{
		`VM id "../x"`, `VM folder "relative"`, "a label of 1001 bytes", `image id "a b"`,
		`host name "-"`, `machine id "xyz"`, "a boot timeout of 1ms", "cpus 0",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in\n%v", want, err)
		}
	}
}

func TestConfigWithoutABootTimeoutGetsOne(t *testing.T) {
	data, err := json.Marshal(goodConfig())
	if err != nil {
		t.Fatal(err)
	}
	c, err := ReadConfig(strings.NewReader(string(data)))
	if err != nil || c.BootTimeout != DefaultBootTimeout {
		t.Errorf("%v, %v", c.BootTimeout, err)
	}
}

func TestTheSupervisorsProgramIsFoundInOrder(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, Name)
	if err := os.WriteFile(program, []byte("#!/bin/sh\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", "/nowhere")
	if got, err := FindVMM(program); err != nil || got != program {
		t.Errorf("configured: %q, %v", got, err)
	}
	if _, err := FindVMM(dir); err == nil || !strings.Contains(err.Error(), "abox-vmm not found") || !strings.Contains(err.Error(), "configured path") {
		t.Errorf("a folder: %v", err)
	}
	if _, err := FindVMM(filepath.Join(dir, "none")); err == nil || !strings.Contains(err.Error(), "abox-vmm not found") {
		t.Errorf("nothing there: %v", err)
	}
	if _, err := FindVMM(""); err == nil || !strings.Contains(err.Error(), "abox-vmm not found: it is neither in PATH nor beside this program") {
		t.Errorf("nowhere: %v", err)
	}
	t.Setenv("PATH", dir)
	if got, err := FindVMM(""); err != nil || got != program {
		t.Errorf("in PATH: %q, %v", got, err)
	}
}
