package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// Record says who runs a VM.
type Record struct {
	ID      string    `json:"id"`
	Label   string    `json:"label,omitempty"`
	Created time.Time `json:"created"`
	// Outlive is true when the VM does not end with the process that
	// started it.
	Outlive    bool    `json:"outlive"`
	Supervisor Process `json:"supervisor"`
	// QEMU is zero before it was started.
	QEMU Process `json:"qemu"`
	// Snapshot is what the VM was restored from; "" for one that was booted.
	Snapshot string `json:"snapshot,omitempty"`
	// Ended is why the VM ended, when it did and the folder is still there.
	Ended string `json:"ended,omitempty"`
}

// WriteRecord replaces the record. It does not wait for the disk: after a
// reboot no pid in it means anything.
func (d *VMDir) WriteRecord(r Record) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return WriteVolatile(filepath.Join(d.Path, recordName), append(data, '\n'), 0o600)
}

const maxRecord = 64 << 10

// ReadRecord reads the record in a VM's folder. It needs no lock.
func ReadRecord(path string) (Record, error) {
	var r Record
	f, err := os.Open(filepath.Join(path, recordName))
	if err != nil {
		return r, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxRecord+1))
	if err == nil && len(data) > maxRecord {
		err = fmt.Errorf("longer than %d bytes", maxRecord)
	}
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	if err != nil {
		return r, fmt.Errorf("read %s: %w", f.Name(), err)
	}
	return r, nil
}

// VM is one entry of VMs.
type VM struct {
	ID, Path string
	// Held is true when a process holds the VM's lock: it lives, or is being
	// created. A VM that is not held is left over, for Sweep to remove.
	Held bool
	// Record is zero when none can be read.
	Record Record
}

// VMs lists the VM folders, sorted by id. It changes nothing.
func (h Home) VMs() ([]VM, error) {
	entries, err := os.ReadDir(h.VMsDir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var vms []VM
	for _, e := range entries {
		if !e.IsDir() || CheckID(e.Name()) != nil {
			continue
		}
		vm := VM{ID: e.Name(), Path: h.VMDir(e.Name())}
		vm.Record, _ = ReadRecord(vm.Path) // none, or half of one, is no reason not to list it
		lock, free := claim(vm.Path)
		corpse{vm.Path, lock}.release()
		if _, err := os.Stat(vm.Path); err != nil {
			continue // removed in the meantime
		}
		vm.Held = !free
		vms = append(vms, vm)
	}
	return vms, nil
}
