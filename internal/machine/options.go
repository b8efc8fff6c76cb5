package machine

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// What a machine gets when nobody says otherwise.
const (
	DefaultCPUs  = 2
	DefaultMemMB = 1024
)

// Limits of a machine.
const (
	// MinMemMB is the least memory a guest boots with and has some left.
	MinMemMB = 128
	// MaxCPUs bounds virtual processors.
	MaxCPUs = 64
	// DefaultBootTimeout is generous: a host that is busy building or testing
	// boots a guest ten times slower than an idle one.
	DefaultBootTimeout = 2 * time.Minute
)

// Options say what machine is wanted. The zero Options is a good one.
type Options struct {
	// Home is where Warren keeps its state; empty is store.Home's choice.
	Home string
	// CPUs is the number of virtual processors, from 1 to 8 or four for each
	// that the host has, at most MaxCPUs; 0 is DefaultCPUs.
	CPUs int
	// MemMB is the guest's memory in MiB, from MinMemMB to what the host has;
	// 0 is DefaultMemMB.
	MemMB int
	// Hostname is the guest's name: a DNS label; empty is "warren".
	Hostname string
	// Accel is "kvm", "tcg", or "auto" or empty for what this host is best at.
	Accel string
	// VMM is the path of abox-vmm; empty looks in PATH and beside the running
	// program.
	VMM string
	// QEMU is the path of QEMU; empty finds it in PATH.
	QEMU string
	// Label is kept in the VM's record, for whoever looks at it.
	Label string
	// Outlive lets the machine live on when this process ends.
	Outlive bool
	// BootTimeout bounds the time until the machine is ready; 0 is
	// DefaultBootTimeout.
	BootTimeout time.Duration
	// Step, if set, is told what begins now, in words for a person. It is
	// called from one goroutine and must not block.
	Step func(step string)
}

// withDefaults fills in what was left open.
func (o Options) withDefaults() Options {
	if o.CPUs == 0 {
		o.CPUs = DefaultCPUs
	}
	if o.MemMB == 0 {
		o.MemMB = DefaultMemMB
	}
	if o.Hostname == "" {
		o.Hostname = "warren"
	}
	if o.Accel == "auto" {
		o.Accel = ""
	}
	if o.BootTimeout == 0 {
		o.BootTimeout = DefaultBootTimeout
	}
	if o.Step == nil {
		o.Step = func(string) {}
	}
	return o
}

// A DNS label, as the kernel and every program accept it.
var hostname = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?$`)

// Check reports everything that is wrong with the options, joined by
// errors.Join. It looks at nothing but the options and the size of the host.
func (o Options) Check() error {
	o = o.withDefaults()
	var faults []error
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf(format, args...))
	}
	if most := mostCPUs(runtime.NumCPU()); o.CPUs < 1 || o.CPUs > most {
		fault("%d CPUs are not possible; a VM on this host, which has %d, gets 1 to %d", o.CPUs, runtime.NumCPU(), most)
	}
	host := HostMemMB()
	switch {
	case o.MemMB < MinMemMB:
		fault("%d MiB of memory is too little; a VM needs at least %d MiB", o.MemMB, MinMemMB)
	case host > 0 && o.MemMB > host:
		fault("%d MiB of memory is more than this host has (%d MiB); ask for less", o.MemMB, host)
	}
	if !hostname.MatchString(o.Hostname) {
		fault("host name %q is none; use up to 63 letters, digits and hyphens", o.Hostname)
	}
	switch o.Accel {
	case "", "kvm", "tcg":
	default:
		fault("no accelerator %q; there are kvm, tcg and auto", o.Accel)
	}
	if o.BootTimeout < 0 {
		fault("a boot timeout of %v is no time; leave it out for %v", o.BootTimeout, DefaultBootTimeout)
	}
	return errors.Join(faults...)
}

// mostCPUs is how many processors a VM can have on a host with so many. They
// may share, but dozens on one are dozens that never get anywhere.
func mostCPUs(host int) int { return min(MaxCPUs, max(8, 4*host)) }

// HostMemMB is the memory of the host in MiB, or 0 when it cannot be told.
func HostMemMB() int {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "MemTotal:"); ok {
			kb, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(rest), " kB"))
			if err != nil {
				return 0
			}
			return kb / 1024
		}
	}
	return 0
}
