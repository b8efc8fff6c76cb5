package bench

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/vm"
)

// Machine describes where the figures were taken, without saying whose it
// is: no host name, no user, no path.
type Machine struct {
	CPU       string `json:"cpu"`
	Cores     int    `json:"cores"`
	MemoryMiB int    `json:"memory_mib"`
	Arch      string `json:"arch"`
	Kernel    string `json:"kernel"`
	QEMU      string `json:"qemu"`
	// Accel is how QEMU ran the guests: "kvm" or "tcg".
	Accel string `json:"accel"`
	// GuestCPUs and GuestMemoryMiB are the size of the VMs measured.
	GuestCPUs      int `json:"guest_cpus"`
	GuestMemoryMiB int `json:"guest_memory_mib"`
	// GuestImage is the id of the guest image.
	GuestImage string `json:"guest_image"`
	// Load is the average number of runnable processes in the minute before
	// the run. Figures of a machine with other work are worth little.
	Load float64 `json:"load"`
	// Date is when the run began, UTC, RFC 3339.
	Date string `json:"date"`
}

// String is the machine in two lines.
func (m Machine) String() string {
	return fmt.Sprintf("%s, %d cores, %d MiB, Linux %s (%s), %s\n"+
		"QEMU %s with %s, guests of %d CPUs and %d MiB, image %s, load before %.2f",
		m.CPU, m.Cores, m.MemoryMiB, m.Kernel, m.Arch, m.Date,
		m.QEMU, m.Accel, m.GuestCPUs, m.GuestMemoryMiB, m.GuestImage, m.Load)
}

// describeHost fills in what is known without a VM. A figure that cannot be
// read stays "unknown" or 0: a benchmark is no place to fail over it.
func describeHost(now time.Time) Machine {
	m := Machine{
		CPU:    vm.HostCPU(),
		Cores:  runtime.NumCPU(),
		Arch:   runtime.GOARCH,
		Kernel: "unknown",
		Date:   now.UTC().Format(time.RFC3339),
	}
	if kb, err := strconv.Atoi(strings.TrimSuffix(procField("/proc/meminfo", "MemTotal"), " kB")); err == nil {
		m.MemoryMiB = kb / 1024
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	if data, err := os.ReadFile("/proc/loadavg"); err == nil {
		first, _, _ := strings.Cut(string(data), " ")
		m.Load, _ = strconv.ParseFloat(first, 64)
	}
	return m
}

// procField returns the value of the first "name: value" line of a file of
// /proc, or "".
func procField(path, name string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		key, value, ok := strings.Cut(s.Text(), ":")
		if ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// peakMiB is the most memory process pid ever held (VmHWM), in MiB.
func peakMiB(pid int) (float64, error) {
	field := procField(fmt.Sprintf("/proc/%d/status", pid), "VmHWM")
	kb, err := strconv.ParseFloat(strings.TrimSuffix(field, " kB"), 64)
	if err != nil {
		return 0, fmt.Errorf("memory of process %d: it is gone or has none", pid)
	}
	return kb / 1024, nil
}
