package vm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/vm/accel"
)

// Spec is a VM as it should be. It travels as JSON in the supervisor's
// configuration.
type Spec struct {
	// CPUs is how many processors the guest has, 1 to MaxCPUs.
	CPUs int `json:"cpus"`
	// MemMB is the guest's RAM in MiB, from MinMemMB to what the host has.
	MemMB int `json:"mem_mb"`
	// Accel runs the guest's instructions: KVM or TCG.
	Accel Accel `json:"accel"`
	// QEMU is the program; "" finds DefaultQEMU in PATH.
	QEMU string `json:"qemu,omitempty"`
	// Firmware is the name of a file in QEMU's own data folder, as
	// QuickFirmware gives it; "" is the machine's usual one.
	Firmware string `json:"firmware,omitempty"`

	// Kernel (an uncompressed ELF image starts fastest), Initramfs and
	// Cmdline boot the guest. A VM that starts Paused needs no kernel.
	Kernel    string `json:"kernel,omitempty"`
	Initramfs string `json:"initramfs,omitempty"`
	Cmdline   string `json:"cmdline,omitempty"`
	// Paused: the guest's processors do not run before QMP "cont".
	Paused bool `json:"paused,omitempty"`

	// RootDisk is a raw image, which the guest can only read; "" is none.
	RootDisk string `json:"root_disk,omitempty"`
	// DataDisk is a qcow2 overlay over the raw image DataBase, which is only
	// read. Both or neither are set.
	DataDisk string `json:"data_disk,omitempty"`
	DataBase string `json:"data_base,omitempty"`
	// Overlays are frozen qcow2 overlays between DataBase and DataDisk, oldest
	// first. They are only read.
	Overlays []string `json:"overlays,omitempty"`

	// Memory is the file behind the guest's RAM. It is mapped privately: the
	// guest's writes never reach it. Start creates it, sparse, when it is not
	// there; otherwise it has exactly MemMB. "" is anonymous memory.
	Memory string `json:"memory,omitempty"`
	// SharedMemory lets the guest's writes reach Memory: it is what a template
	// is made of.
	SharedMemory bool `json:"shared_memory,omitempty"`

	// State is the file with the device state of a snapshot. The VM then goes
	// on where the snapshot was made, once Resume is called; it needs no
	// kernel, and its RAM is Memory with Differences applied, oldest first.
	State       string   `json:"state,omitempty"`
	Differences []string `json:"differences,omitempty"`
}

// Limits of a Spec.
const (
	MaxCPUs  = 64
	MinMemMB = 64
	// maxCmdline is the kernel's COMMAND_LINE_SIZE on amd64, less its
	// terminating zero.
	maxCmdline = 2047
	// maxOverlays bounds what QEMU opens for one disk.
	maxOverlays = 200
)

// DefaultQEMU is the program looked for in PATH.
const DefaultQEMU = "qemu-system-x86_64"

// ErrNoQEMU is part of Check's error when there is no QEMU.
var ErrNoQEMU = errors.New("QEMU not found")

// Check returns every fault of s at once, or nil. It looks at the files
// and devices as well, with the eyes of the user that QEMU will run as.
func (s Spec) Check() error {
	user, err := vmUser(s.Accel)
	if err != nil {
		return err
	}
	c := checker{user: user}
	if s.CPUs < 1 || s.CPUs > MaxCPUs {
		c.fault("cpus %d: between 1 and %d are possible", s.CPUs, MaxCPUs)
	}
	if host := hostMemMB(); s.MemMB < MinMemMB || s.MemMB > host {
		c.fault("memory %d MiB: between %d and the %d MiB of this machine are possible", s.MemMB, MinMemMB, host)
	}
	switch s.Accel {
	case KVM:
		c.kvm()
	case TCG:
	default:
		c.fault("accelerator %q: there are kvm and tcg", s.Accel)
	}
	if _, err := findQEMU(s.QEMU); err != nil {
		c.add(err)
	}
	if s.Firmware != "" && s.Firmware != quickFirmware {
		c.fault("firmware %q: only %s is known", s.Firmware, quickFirmware)
	}
	if s.Kernel == "" && !s.Paused && s.State == "" {
		c.fault("kernel: none given; build the guest image with `kosa8 image build`")
	}
	if s.Kernel == "" && (s.Initramfs != "" || s.Cmdline != "") {
		c.fault("initramfs and command line: of no use without a kernel")
	}
	if len(s.Cmdline) > maxCmdline || strings.ContainsFunc(s.Cmdline, func(r rune) bool { return r < ' ' }) {
		c.fault("kernel command line: at most %d characters, none of them a control character", maxCmdline)
	}
	if (s.DataDisk == "") != (s.DataBase == "") {
		c.fault("data disk: the overlay and the image under it must be given together")
	}
	switch {
	case len(s.Overlays) > maxOverlays:
		c.fault("data disk: %d overlays one on the other, at most %d are possible", len(s.Overlays), maxOverlays)
	case len(s.Overlays) > 0 && s.DataDisk == "":
		c.fault("data disk: overlays without a disk on them")
	}
	if s.State != "" && (s.Memory == "" || s.SharedMemory) {
		c.fault("state: a VM is restored with a memory file of its own, privately mapped")
	}
	if s.State == "" && len(s.Differences) > 0 {
		c.fault("memory: differences without a state to restore")
	}
	for _, path := range s.Overlays {
		c.file("data overlay", path, reads)
	}
	// These two are read by us alone.
	for _, path := range append([]string{s.State}, s.Differences...) {
		c.ownFile("snapshot", path)
	}
	c.file("kernel", s.Kernel, reads)
	c.file("initramfs", s.Initramfs, reads)
	c.file("root disk", s.RootDisk, reads)
	c.file("data base", s.DataBase, reads)
	c.file("data disk", s.DataDisk, writes)
	c.memory(s)
	return errors.Join(c.faults...)
}

type access int

const (
	reads access = iota
	writes
)

type checker struct {
	user   *vmIdentity
	faults []error
}

func (c *checker) add(err error) { c.faults = append(c.faults, err) }

func (c *checker) fault(format string, args ...any) { c.add(fmt.Errorf(format, args...)) }

// file checks that path is a regular file that can be used; "" is fine.
func (c *checker) file(what, path string, a access) {
	info := c.ownFile(what, path)
	if info == nil {
		return
	}
	mode := uint32(unix.R_OK)
	if a == writes {
		mode |= unix.W_OK
	}
	if err := unix.Access(path, mode); err != nil {
		c.fault("%s %s: %w", what, path, err)
		return
	}
	// What QEMU writes is given to its user by Start; what it only reads
	// belongs to many VMs and stays as it is.
	if a == reads && c.user != nil && !c.user.canRead(info) {
		c.fault("%s %s: QEMU runs as user %d, who may not read it (mode %04o); `chmod a+r` it, the folder above can stay private",
			what, path, c.user.UID, info.Mode().Perm())
	}
}

// ownFile is file for one that QEMU does not see. It returns nil for one that
// is of no use.
func (c *checker) ownFile(what, path string) os.FileInfo {
	if path == "" {
		return nil
	}
	if !filepath.IsAbs(path) {
		c.fault("%s %s: the path must be absolute", what, path)
		return nil
	}
	info, err := os.Stat(path)
	switch {
	case err != nil:
		c.fault("%s: %w", what, err)
	case !info.Mode().IsRegular():
		c.fault("%s %s: not a regular file", what, path)
	case info.Size() == 0:
		c.fault("%s %s: empty", what, path)
	default:
		return info
	}
	return nil
}

func (c *checker) memory(s Spec) {
	if s.Memory == "" {
		return
	}
	info, err := os.Stat(s.Memory)
	if errors.Is(err, os.ErrNotExist) && filepath.IsAbs(s.Memory) {
		if err := unix.Access(filepath.Dir(s.Memory), unix.W_OK); err != nil {
			c.fault("memory file: folder %s: %w", filepath.Dir(s.Memory), err)
		}
		return
	}
	c.file("memory file", s.Memory, writes)
	if err == nil && info.Mode().IsRegular() && info.Size() != s.MemBytes() {
		c.fault("memory file %s: %d bytes, the VM has %d", s.Memory, info.Size(), s.MemBytes())
	}
}

func (c *checker) kvm() {
	switch err := CanUse(KVM); {
	case errors.Is(err, os.ErrPermission):
		c.fault("accelerator kvm: %w; join its group with `sudo usermod -aG kvm $USER` and log in again, or use --accel tcg", err)
	case err != nil:
		c.fault("accelerator kvm: %w; use --accel tcg", err)
	}
}

// CanUse says why this process cannot use an accelerator at all. That it can
// does not mean that it is of use: see ChooseAccel.
func CanUse(a Accel) error {
	if a != KVM {
		return nil
	}
	return accel.OpenKVM()
}

// MemBytes is the size of the guest's RAM.
func (s Spec) MemBytes() int64 { return int64(s.MemMB) << 20 }

// hostMemMB is how much memory the host has, in MiB.
func hostMemMB() int {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 1 << 20 // a TiB: then QEMU says it
	}
	return int(uint64(info.Totalram) * uint64(info.Unit) >> 20)
}
