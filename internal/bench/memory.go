package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/machine"
)

// copies is how many copies are alive while their memory is measured: what
// they share is divided among them.
const copies = 10

// settled is how long they are left alone first.
const settled = 2 * time.Second

// memory measures the memory of one copy, supervisor included, as its
// proportional share (PSS), against that of a plain QEMU.
func memory(name, title string, touched int) Benchmark {
	return Benchmark{
		Name:  name,
		Title: title,
		Floor: "plain QEMU, restored",
		Unit:  MiB,
		N:     2,
		Bars:  []Bar{{Of: "ratio", AtMost: 1.5}},
		open: func(ctx context.Context, b *bed) (pair, error) {
			p, err := fork(copies, 1, 0).open(ctx, b)
			if err != nil {
				return nil, err
			}
			return &memoryPair{p.(*forkPair), touched}, nil
		},
	}
}

type memoryPair struct {
	*forkPair
	touched int // MiB
}

// touch makes a guest write so many MiB of memory.
func touch(mib int) []string {
	return []string{"dd", "if=/dev/zero", "of=/dev/shm/touched", "bs=1M", "count=" + strconv.Itoa(mib), "status=none"}
}

func (p *memoryPair) subject(ctx context.Context, count int) ([]sample, error) {
	ctx, cancel := deadline(ctx, restoreDeadline)
	defer cancel()
	var out []sample
	for range count {
		s, err := p.measure(ctx)
		if err != nil {
			return nil, reason(ctx, err)
		}
		out = append(out, s)
	}
	return out, nil
}

func (p *memoryPair) measure(ctx context.Context) (s sample, err error) {
	forks, err := p.m.Fork(ctx, p.n, machine.Options{Label: "kosa8 bench"}, machine.ForkHooks{})
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, closeForks(forks)) }()
	err = each(p.n, func(i int) error {
		c := forks.Copies[i]
		if c.Err == nil && p.touched > 0 {
			return run(ctx, c.Machine, touch(p.touched)...)
		}
		return c.Err
	})
	if err != nil {
		return s, err
	}
	time.Sleep(settled)
	var qemu, vmm float64
	for _, c := range forks.Copies {
		status, err := c.Machine.Status(ctx)
		if err != nil {
			return s, err
		}
		q, err := pssMiB(status.QEMUPID)
		if err != nil {
			return s, err
		}
		v, err := pssMiB(status.SupervisorPID)
		if err != nil {
			return s, err
		}
		qemu, vmm = qemu+q/float64(p.n), vmm+v/float64(p.n)
	}
	return sample{qemu + vmm, map[string]float64{"qemu_mib": qemu, "supervisor_mib": vmm}}, nil
}

func (p *memoryPair) floor(ctx context.Context, count int) ([]float64, error) {
	ctx, cancel := deadline(ctx, restoreDeadline)
	defer cancel()
	var out []float64
	for range count {
		v, err := p.measurePlain(ctx)
		if err != nil {
			return nil, reason(ctx, err)
		}
		out = append(out, v)
	}
	return out, nil
}

func (p *memoryPair) measurePlain(ctx context.Context) (float64, error) {
	vms, err := p.plain.startMany(ctx, p.n)
	defer each(len(vms), func(i int) error { vms[i].end(); return nil })
	if err == nil && p.touched > 0 {
		err = each(p.n, func(i int) error { return vms[i].touch(ctx, p.touched) })
	}
	if err != nil {
		return 0, err
	}
	time.Sleep(settled)
	var total float64
	for _, v := range vms {
		pss, err := pssMiB(v.cmd.Process.Pid)
		if err != nil {
			return 0, err
		}
		total += pss / float64(p.n)
	}
	return total, nil
}

// touch makes the guest of a plain QEMU write so many MiB. SpawnTime needs no
// conversation.
func (v *restoredVM) touch(ctx context.Context, mib int) error {
	if _, err := ask(ctx, v.session, guestapi.Thaw, guestapi.ThawRequest{}); err != nil {
		return err
	}
	_, err := ask(ctx, v.session, guestapi.SpawnTime, guestapi.SpawnTimeRequest{Argv: touch(mib), Count: 1})
	return err
}

// pssMiB is the share of memory of a process, in MiB: what it has alone, and
// its part of what it shares.
func pssMiB(pid int) (float64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, fmt.Errorf("memory of process %d: %w", pid, err)
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "Pss:"); ok {
			kb, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 64)
			return kb / 1024, err
		}
	}
	return 0, fmt.Errorf("memory of process %d: it has none", pid)
}
