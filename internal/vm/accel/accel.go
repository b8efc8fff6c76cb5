// Package accel decides what runs a guest's instructions: the processor
// through KVM, or QEMU's translator (TCG).
//
// /dev/kvm existing proves nothing. Some hosts that are themselves VMs accept
// a VM and then emulate every one of its instructions, some hundred times
// slower than QEMU's translator: an ordinary kernel never finishes
// decompressing. So KVM is measured: a throw-away VM of one page counts down
// in a loop, and only hardware speed is good enough.
//
// The measurement is made once per boot of the host and remembered; whether
// the device is there and may be used is looked at each time.
package accel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"time"
)

// Accel is an accelerator of QEMU.
type Accel string

// The accelerators.
const (
	KVM Accel = "kvm"
	TCG Accel = "tcg"
)

// Parse reads what a user may write: "kvm", "tcg", or "auto", which gives "",
// meaning: let Choose decide.
func Parse(s string) (Accel, error) {
	switch s {
	case "kvm", "tcg":
		return Accel(s), nil
	case "auto", "":
		return "", nil
	}
	return "", fmt.Errorf("accelerator %q: there are kvm, tcg and auto", s)
}

// Verdict is what was found out about KVM.
type Verdict string

// The verdicts. All but Good mean TCG.
const (
	NoDevice     Verdict = "no-device"
	NoPermission Verdict = "no-permission"
	Useless      Verdict = "useless"
	Good         Verdict = "good"
)

// Choice is the decision and why it was made.
type Choice struct {
	Accel   Accel
	Verdict Verdict
	// Evidence is one sentence with the figure or fault behind the verdict.
	Evidence string
	// Remedy is what the user can do to get KVM; empty when there is nothing.
	Remedy string
	// Remembered: the figure was taken earlier in this boot of the host.
	Remembered bool
}

// Choose decides. cacheDir holds what is remembered ("accel.json", 0600) and
// is created when missing; that it cannot be written is no error, the next
// Choose just measures again.
//
// It takes under two seconds whatever KVM does. The only error is that of ctx.
func Choose(ctx context.Context, cacheDir string) (Choice, error) {
	return chooser{probe: kvmProbe{}, cache: cache{dir: cacheDir}, host: readHost()}.choose(ctx)
}

// OpenKVM says why this process cannot open KVM's device, which is the least
// that using it takes.
func OpenKVM() error { return kvmProbe{}.open() }

// probe looks at KVM. It is an interface so that the decision can be tested
// on a machine without KVM.
type probe interface {
	// open says whether the device can be opened for use.
	open() error
	// measure runs the loop until ctx ends.
	measure(ctx context.Context) (measurement, error)
}

// measurement is how far the counted loop got.
type measurement struct {
	// Steps are turns of the loop, two instructions each.
	Steps int64 `json:"steps"`
	// Took is how long they took, in nanoseconds.
	Took time.Duration `json:"took_ns"`
	// Finished: the loop reached its end, and the result was right.
	Finished bool `json:"finished"`
}

func (m measurement) perSecond() float64 {
	if m.Took <= 0 {
		return 0
	}
	return float64(m.Steps) / m.Took.Seconds()
}

// Hardware does a turn of the loop in one or two cycles, so in some 7 to 20 ms
// for all of them; emulation of each instruction takes a microsecond or more,
// 40 s for all. The deadline leaves a busy machine fifty times what it needs.
const (
	loopSteps       = 20_000_000
	measureDeadline = time.Second
	// giveUp is when the answer is given although the measurement has not
	// come back at all.
	giveUp = 1800 * time.Millisecond
)

type chooser struct {
	probe probe
	cache cache
	host  host
}

func (c chooser) choose(ctx context.Context) (Choice, error) {
	if err := ctx.Err(); err != nil {
		return Choice{}, err
	}
	if err := c.probe.open(); err != nil {
		return cannotOpen(err), nil
	}
	if m, ok := c.cache.read(c.host); ok {
		choice := judge(m)
		choice.Remembered = true
		return choice, nil
	}
	m, err := c.measure(ctx)
	if ctx.Err() != nil {
		return Choice{}, ctx.Err()
	}
	if err != nil {
		// Not remembered: another program may be holding the hardware.
		return Choice{Accel: TCG, Verdict: Useless,
			Evidence: fmt.Sprintf("a throw-away KVM machine does not run: %v", err)}, nil
	}
	c.cache.write(c.host, m)
	return judge(m), nil
}

// measure bounds the probe in time even if the kernel does not let go of it;
// its thread is then lost, which is better than a command that hangs.
func (c chooser) measure(ctx context.Context) (measurement, error) {
	type result struct {
		m   measurement
		err error
	}
	loop, cancel := context.WithTimeout(ctx, measureDeadline)
	defer cancel()
	results := make(chan result, 1)
	begin := time.Now()
	go func() {
		m, err := c.probe.measure(loop)
		results <- result{m, err}
	}()
	timer := time.NewTimer(giveUp)
	defer timer.Stop()
	select {
	case r := <-results:
		return r.m, r.err
	case <-timer.C:
		return measurement{Took: time.Since(begin)}, nil
	case <-ctx.Done():
		// The probe ends by itself: its context is a child of this one.
		return measurement{}, ctx.Err()
	}
}

func judge(m measurement) Choice {
	figure := fmt.Sprintf("a KVM machine counted to %s in %s (%s per second)",
		count(float64(m.Steps)), m.Took.Round(time.Millisecond/10), count(m.perSecond()))
	if m.Finished {
		return Choice{Accel: KVM, Verdict: Good, Evidence: figure}
	}
	return Choice{Accel: TCG, Verdict: Useless,
		Evidence: figure + "; hardware does more than 500 million, so this host emulates instructions and QEMU's translator is faster",
		Remedy:   "none on this machine; a host with (nested) hardware virtualization has it"}
}

func cannotOpen(err error) Choice {
	c := Choice{Accel: TCG, Verdict: NoDevice, Evidence: "/dev/kvm: " + reason(err),
		Remedy: "enable virtualization in the firmware, or nested virtualization on the host of this machine, and load kvm_intel or kvm_amd"}
	if errors.Is(err, fs.ErrPermission) {
		c.Verdict = NoPermission
		c.Remedy = "join its group: `sudo usermod -aG kvm $USER`, then log in again"
	}
	return c
}

// reason is err without the path, which the sentence round it names.
func reason(err error) string {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}

// count writes a number the way a person reads it.
func count(n float64) string {
	switch {
	case n >= 1e9:
		return fmt.Sprintf("%.1f billion", n/1e9)
	case n >= 1e6:
		return fmt.Sprintf("%.1f million", n/1e6)
	case n >= 1e3:
		return fmt.Sprintf("%.0f thousand", n/1e3)
	}
	return fmt.Sprintf("%.0f", n)
}

// host is what a measurement is bound to: it is taken anew when the host was
// booted again or other KVM modules are loaded.
type host struct {
	BootID  string `json:"boot_id"`
	Modules string `json:"modules"`
}

func readHost() host {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return host{} // nothing is remembered then
	}
	h := host{BootID: strings.TrimSpace(string(id))}
	var modules []string
	for _, m := range []string{"kvm", "kvm_amd", "kvm_intel", "kvm_pvm"} {
		if _, err := os.Stat("/sys/module/" + m); err == nil {
			modules = append(modules, m)
		}
	}
	h.Modules = strings.Join(modules, " ")
	return h
}
