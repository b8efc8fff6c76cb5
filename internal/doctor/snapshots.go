package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/guestimage"
	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store"
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

// shelf is what lookSnapshots finds in a home.
type shelf struct {
	kept, damaged []string
	drafts        int // left by killed processes, or half removed
	forks         []string
	flats         int64 // bytes of flat memory made in other boots
}

func (s shelf) clean() bool { return s.drafts == 0 && len(s.forks) == 0 && s.flats == 0 }

// lookSnapshots looks at manifests, sizes and names; it reads no memory and
// changes nothing unless asked to repair.
func lookSnapshots(ctx context.Context, o Options) Check {
	s, err := readShelf(ctx, o.Home)
	if err != nil {
		return warn(err.Error(), "what snapshots there are cannot be told", "look at the folder's permissions")
	}
	repaired := ""
	if o.Repair && !s.clean() {
		done, err := snapshots.In(o.Home).Collect(ctx, machine.KeepTemplate(ctx, o.Home))
		if err != nil {
			return warn(err.Error(), "what nobody needs takes up space", "remove it by hand")
		}
		repaired = fmt.Sprintf("; removed what nobody needs (%s)", cli.FormatBytes(done.Bytes))
		if s, err = readShelf(ctx, o.Home); err != nil {
			return warn(err.Error(), "what snapshots there are cannot be told", "look at the folder's permissions")
		}
	}
	found := cli.Count(len(s.kept), "snapshot") + repaired
	if len(s.damaged) > 0 {
		return warn(fmt.Sprintf("%s; damaged or unreadable: %s", found, strings.Join(s.damaged, ", ")),
			"no VM can go on from those or from what needs them, and no fork or template is removed",
			"see `kosa8 snapshot verify`; kosa8 snapshot rm "+strings.Join(s.damaged, " "))
	}
	if s.clean() {
		return ok(found)
	}
	var left []string
	if s.drafts > 0 {
		left = append(left, cli.Count(s.drafts, "unfinished or half removed one"))
	}
	if len(s.forks) > 0 {
		left = append(left, cli.Count(len(s.forks), "fork")+" that nobody needs ("+strings.Join(s.forks, ", ")+")")
	}
	if s.flats > 0 {
		left = append(left, cli.FormatBytes(s.flats)+" of cached memory from before the last reboot")
	}
	return warn(found+"; left over: "+strings.Join(left, ", "), "it takes up space until a later command removes it", "kosa8 doctor --repair")
}

func readShelf(ctx context.Context, home store.Home) (shelf, error) {
	var s shelf
	all, problems, err := snapshots.In(home).List(ctx)
	if err != nil {
		return s, err
	}
	needed := map[string]bool{}
	for _, m := range all {
		for _, id := range append([]string{m.Parent}, m.Disks...) {
			needed[id] = needed[id] || id != m.ID
		}
	}
	for _, p := range problems {
		s.damaged = append(s.damaged, p.ID)
	}
	for _, m := range all {
		dir := filepath.Join(home.SnapshotsDir(), m.ID)
		switch {
		case !whole(dir, m):
			s.damaged = append(s.damaged, m.ID)
		case m.Kind == snapshots.KindSnapshot:
			s.kept = append(s.kept, m.ID)
		// What a damaged one needs is not known.
		case m.Kind == snapshots.KindFork && !needed[m.ID] && len(problems) == 0 && free(dir):
			s.forks = append(s.forks, m.ID)
		}
	}
	slices.Sort(s.damaged)
	if s.drafts, err = drafts(home); err != nil {
		return s, err
	}
	s.flats = oldFlats(home)
	return s, nil
}

// whole says whether a snapshot's files are there with their sizes.
func whole(dir string, m snapshots.Manifest) bool {
	for _, f := range m.Files {
		info, err := os.Lstat(filepath.Join(dir, f.Name))
		if err != nil || !info.Mode().IsRegular() || info.Size() != f.Size {
			return false
		}
	}
	return true
}

// drafts counts the folders of killed makers and removers.
func drafts(home store.Home) (int, error) {
	entries, err := os.ReadDir(home.SnapshotsDir())
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	n := 0
	for _, e := range entries {
		known := strings.HasPrefix(e.Name(), ".new-") || strings.HasPrefix(e.Name(), ".dead-")
		if known && free(filepath.Join(home.SnapshotsDir(), e.Name())) {
			n++
		}
	}
	return n, err
}

// free says whether nobody holds a folder. It has the lock for an instant.
func free(dir string) bool {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	defer f.Close()
	return store.TryLock(f, store.LockAlone) == nil
}

// oldFlats is the size of the flat memory that other boots of the host made.
func oldFlats(home store.Home) (bytes int64) {
	boot, err := store.BootID()
	if err != nil {
		return 0
	}
	ram := filepath.Join(home.Cache(), "ram")
	entries, _ := os.ReadDir(ram)
	for _, e := range entries {
		if e.Name() == boot {
			continue
		}
		filepath.WalkDir(filepath.Join(ram, e.Name()), func(path string, _ fs.DirEntry, err error) error {
			var st unix.Stat_t
			if err == nil && unix.Lstat(path, &st) == nil {
				bytes += st.Blocks * 512
			}
			return nil
		})
	}
	return bytes
}
