package bench

import (
	"context"
	"errors"
	"fmt"

	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/vm"
)

// The benchmarks of one snapshot. Their floor is the least that plain QEMU does
// for the same: it stops, saves its devices and goes on, and writes no memory.
func snapshotPause() Benchmark {
	return snapshotOf(Benchmark{
		Name:  "snapshot-pause-4mib",
		Title: "pause of a snapshot, 4 MiB changed",
		Floor: "in QEMU: stop, devices, go",
		Unit:  Milliseconds,
		N:     30,
		Bars:  []Bar{{Of: "p50", AtMost: 15}},
	}, changeMemory, func(i supervisor.SnapshotInfo) (float64, float64) {
		return float64(i.PauseUS) / 1000, devicesOnly(i)
	})
}

func snapshotNoChange() Benchmark {
	return snapshotOf(Benchmark{
		Name:  "snapshot-nochange",
		Title: "pause of a snapshot, nothing changed",
		Floor: "in QEMU: stop, devices, go",
		Unit:  Milliseconds,
		N:     30,
		Bars:  []Bar{{Of: "p50", AtMost: 10}, {Of: "disk_mib", AtMost: 0.293}},
	}, nothing, func(i supervisor.SnapshotInfo) (float64, float64) {
		return float64(i.PauseUS) / 1000, devicesOnly(i)
	})
}

// devicesOnly is the part of a snapshot's pause that QEMU's own commands for
// its devices took, in ms.
func devicesOnly(i supervisor.SnapshotInfo) float64 {
	p := phasesOf(i)
	return p["stop"] + p["devices"] + p["go"]
}

func diskPerSnapshot() Benchmark {
	return snapshotOf(Benchmark{
		Name:  "disk-per-snapshot",
		Title: "disk of a snapshot, 4 MiB changed",
		Floor: "changed pages + 273 KiB",
		Unit:  MiB,
		N:     10,
		Bars:  []Bar{{Of: "ratio", AtMost: 1.1}},
	}, changeMemory, func(i supervisor.SnapshotInfo) (float64, float64) {
		return inMiB(i.Bytes), inMiB(int64(i.DataPages)*ramPage) + fixedMiB
	})
}

const ramPage = 4096

// fixedMiB makes the bar of 1.1 one of 1.1 times what changed and 300 KiB.
const fixedMiB = 300.0 / 1024 / 1.1

func inMiB(bytes int64) float64 { return float64(bytes) / (1 << 20) }

// changeMemory writes 4 MiB that are new each time.
func changeMemory(ctx context.Context, m *machine.Machine) error {
	return run(ctx, m, "dd", "if=/dev/urandom", "of=/dev/shm/bench", "bs=1M", "count=4", "conv=notrunc", "status=none")
}

func nothing(context.Context, *machine.Machine) error { return nil }

// snapshotOf completes a benchmark whose samples are snapshots of one machine,
// each after a change; figures gives subject and floor of one.
func snapshotOf(b Benchmark, change func(context.Context, *machine.Machine) error,
	figures func(supervisor.SnapshotInfo) (subject, floor float64)) Benchmark {
	b.open = func(ctx context.Context, bed *bed) (pair, error) {
		m, err := machine.Create(ctx, bed.o.machine())
		if err != nil {
			return nil, err
		}
		p := &snapshotPair{bed: bed, m: m, change: change, figures: figures}
		// The first has all that happened since the template.
		if _, err := p.take(ctx); err != nil {
			return nil, errors.Join(err, p.close())
		}
		return p, nil
	}
	return b
}

type snapshotPair struct {
	bed     *bed
	m       *machine.Machine
	change  func(context.Context, *machine.Machine) error
	figures func(supervisor.SnapshotInfo) (subject, floor float64)
	made    []string
	floors  []float64
}

func (p *snapshotPair) take(ctx context.Context) (supervisor.SnapshotInfo, error) {
	if err := p.change(ctx, p.m); err != nil {
		return supervisor.SnapshotInfo{}, err
	}
	info, err := p.m.Save(ctx, "kosa8 bench")
	if err == nil {
		p.made = append(p.made, info.ID)
	}
	return info, err
}

func (p *snapshotPair) subject(ctx context.Context, count int) ([]sample, error) {
	ctx, cancel := deadline(ctx, restoreDeadline)
	defer cancel()
	var out []sample
	for range count {
		info, err := p.take(ctx)
		if err != nil {
			return nil, reason(ctx, err)
		}
		subject, floor := p.figures(info)
		s := sample{subject, phasesOf(info)}
		s.phases["disk_mib"] = inMiB(info.Bytes)
		s.phases["changed_mib"] = inMiB(int64(info.DataPages) * ramPage)
		out, p.floors = append(out, s), append(p.floors, floor)
	}
	return out, nil
}

// floor is of the same snapshots: both come out of one measurement.
func (p *snapshotPair) floor(_ context.Context, count int) ([]float64, error) {
	if len(p.floors) < count {
		return nil, fmt.Errorf("%d snapshots for %d floors", len(p.floors), count)
	}
	out := p.floors[:count]
	p.floors = p.floors[count:]
	return out, nil
}

func phasesOf(info supervisor.SnapshotInfo) map[string]float64 {
	phases := map[string]float64{"pause": float64(info.PauseUS) / 1000}
	for _, p := range info.Phases {
		phases[p.Name] = milliseconds(p.Duration())
	}
	return phases
}

func (p *snapshotPair) close() error {
	err := closeMachine(p.m)
	return errors.Join(err, p.bed.remove(p.made))
}

// remove deletes the snapshots of a run, the newest first.
func (b *bed) remove(ids []string) error {
	st := snapshots.In(b.home, snapshots.WithOwner(vm.Own))
	var errs []error
	for i := len(ids) - 1; i >= 0; i-- {
		errs = append(errs, st.Delete(context.Background(), ids[i]))
	}
	return errors.Join(errs...)
}
