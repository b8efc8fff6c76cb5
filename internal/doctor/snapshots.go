package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/guestimage"
	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/vm"
)

// lookTemplate looks for the template of the usual size of VM. It makes none.
func lookTemplate(ctx context.Context, o Options) Check {
	const consequence = "the next `kosa8 run` makes it first, which takes seconds"
	const remedy = "kosa8 template build"
	if _, err := guestimage.OpenContext(ctx, o.Home.Dir()); err != nil {
		return warn("none, for want of a guest image", consequence, "build the guest image, then: "+remedy)
	}
	all, _, err := snapshots.In(o.Home).List(ctx)
	if err != nil {
		return warn(err.Error(), "whether there is one cannot be told", "look at the folder's permissions")
	}
	choice, err := vm.ChooseAccel(ctx, o.Home.Cache())
	if err != nil {
		return warn(err.Error(), "which one is wanted is not known", "choose with `kosa8 run --accel tcg`")
	}
	keep := machine.KeepTemplate(ctx, o.Home)
	stale := 0
	for _, m := range slices.Backward(all) {
		// An idle one is only on the way to one that is ready.
		if m.Kind != snapshots.KindTemplate || !m.Prepared || m.Machine.CPUs != machine.DefaultCPUs ||
			m.Machine.MemMB != machine.DefaultMemMB || m.Machine.Accel != string(choice.Accel) {
			continue
		}
		if keep(m) {
			return ok(fmt.Sprintf("%s: %s, %s, %s", m.ID, cli.FormatMB(int64(m.Machine.MemMB)), cli.Count(m.Machine.CPUs, "CPU"), m.Machine.Accel))
		}
		stale++
	}
	if stale > 0 {
		return warn("the one there is was made of another guest image, QEMU or processor", consequence, remedy)
	}
	return warn("none of the usual size", consequence, remedy)
}

// lookSnapshots looks at manifests, sizes and names; it reads no memory and
// changes nothing unless asked to repair.
func lookSnapshots(ctx context.Context, o Options) Check {
	st := snapshots.In(o.Home)
	s, err := st.Survey(ctx)
	if err != nil {
		return warn(err.Error(), "what snapshots there are cannot be told", "look at the folder's permissions")
	}
	repaired := ""
	if o.Repair && !s.Clean() {
		done, err := st.Collect(ctx, machine.KeepTemplate(ctx, o.Home))
		if err != nil {
			return warn(err.Error(), "what nobody needs takes up space", "remove it by hand")
		}
		repaired = fmt.Sprintf("; removed what nobody needs (%s)", cli.FormatBytes(done.Bytes))
		if s, err = st.Survey(ctx); err != nil {
			return warn(err.Error(), "what snapshots there are cannot be told", "look at the folder's permissions")
		}
	}
	found := cli.Count(len(s.Kept), "snapshot") + repaired
	if bad := slices.Concat(s.Unusable, s.Damaged); len(bad) > 0 { // what needs others goes first
		if len(s.Damaged) > 0 {
			found += "; damaged or unreadable: " + strings.Join(s.Damaged, ", ")
		}
		if len(s.Unusable) > 0 {
			found += "; of no use without what they need: " + strings.Join(s.Unusable, ", ")
		}
		return warn(found, "no VM can go on from those, and while one is unreadable no fork or template is removed",
			"see `kosa8 snapshot verify`; kosa8 snapshot rm "+strings.Join(bad, " "))
	}
	if s.Clean() {
		return ok(found)
	}
	var left []string
	if s.Leftovers > 0 {
		left = append(left, cli.Count(s.Leftovers, "unfinished or half removed one"))
	}
	if len(s.Forks) > 0 {
		left = append(left, cli.Count(len(s.Forks), "fork")+" that nobody needs ("+strings.Join(s.Forks, ", ")+")")
	}
	if s.OldCache > 0 {
		left = append(left, cli.FormatBytes(s.OldCache)+" of cache from before the last reboot")
	}
	return warn(found+"; left over: "+strings.Join(left, ", "), "it takes up space until a later command removes it", "kosa8 doctor --repair")
}
