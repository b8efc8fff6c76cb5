package machine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/guestimage"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/vm"
)

// templateVersion goes up when what a template holds changes in a way that
// its key does not see.
const templateVersion = 2

// key names the templates of a machine, host and image. Whatever differs gives
// another key, so that a template that no longer matches is never found.
func (p parts) key() string {
	data, err := json.Marshal(struct {
		Version int
		Machine snapshots.Machine
		Image   string
		Cmdline string
		Args    []string
	}{
		templateVersion, p.machine, p.image.Manifest.ImageID, cmdline(p.image, vm.Accel(p.machine.Accel)),
		// The devices, whatever the paths.
		vm.Args(vm.Spec{CPUs: p.machine.CPUs, MemMB: p.machine.MemMB, Accel: vm.Accel(p.machine.Accel),
			RootDisk: "root", DataDisk: "data"}, vm.Paths{}, vm.FDs{}),
	})
	if err != nil {
		panic(err) // strings and numbers alone
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:8])
}

// The two templates of a key. An idle one was frozen before the guest touched
// its disk: a disk that exists already is started with it. A ready one goes on
// from there, with a new disk mounted and the programs that every guest runs
// first in memory: new machines are copies of it. Both are restored by the same
// means as any snapshot.
//
// A template that is damaged and needed still, by snapshots that are damaged
// with it, gets a successor.
func idleID(key string, successor int) string { return readyID(key, successor) + "-idle" }
func readyID(key string, successor int) string {
	if successor == 0 {
		return "t" + key
	}
	return fmt.Sprintf("t%s-%d", key, successor)
}

// maxSuccessors is more than any home has before somebody looks at its disk.
const maxSuccessors = 100

// KeepTemplate says whether a template is of use to this home still, for
// snapshots.Store.Collect: one made of the guest image in use by the QEMU that
// is installed. It is true when that cannot be told.
func KeepTemplate(ctx context.Context, home store.Home) func(snapshots.Manifest) bool {
	image, imageErr := guestimage.OpenContext(ctx, home.Dir())
	qemu, qemuErr := vm.Version(ctx, "", home.Cache())
	return func(m snapshots.Manifest) bool {
		if imageErr != nil || qemuErr != nil {
			return true
		}
		return m.ImageID == image.Manifest.ImageID && m.Machine.QEMU == qemu && m.Machine.CPUModel == vm.HostCPU()
	}
}

// Template makes the template that Create with these options restores, if
// there is none, and returns its id. Two processes that want the same make it
// once: the second waits for the first.
func Template(ctx context.Context, o Options) (string, error) {
	p, o, err := ready(ctx, o)
	if err != nil {
		return "", err
	}
	defer p.release()
	sn, err := p.template(ctx, o)
	if err != nil {
		return "", err
	}
	defer sn.Close()
	return sn.Manifest().ID, nil
}

// template opens the ready template, and makes it first if need be.
func (p parts) template(ctx context.Context, o Options) (*snapshots.Snapshot, error) {
	st := p.store()
	if sn, _, err := openTemplate(ctx, st, p.key(), readyID); err == nil {
		return sn, nil
	}
	unlock, err := st.TemplateLock(ctx, p.key())
	if err != nil {
		return nil, fmt.Errorf("make a template: %w", err)
	}
	defer unlock()
	sn, id, err := openTemplate(ctx, st, p.key(), readyID)
	if err == nil {
		return sn, nil // somebody else made it meanwhile
	}
	if id == "" {
		return nil, err
	}
	if err := p.makeTemplates(ctx, o, st, id); err != nil {
		return nil, fmt.Errorf("make a template: %w", err)
	}
	return st.Open(ctx, id)
}

// openTemplate opens the first template that is whole. When there is none it
// returns the id that the next one can have, after it removed what is damaged
// and nobody needs, or an error alone.
func openTemplate(ctx context.Context, st *snapshots.Store, key string, name func(key string, successor int) string) (*snapshots.Snapshot, string, error) {
	for i := range maxSuccessors {
		id := name(key, i)
		sn, err := st.Open(ctx, id)
		if errors.Is(err, snapshots.ErrNotFound) {
			return nil, id, err
		}
		if !errors.Is(err, snapshots.ErrDamaged) {
			return sn, "", err
		}
		if st.Delete(ctx, id) == nil {
			return nil, id, err
		}
	}
	return nil, "", fmt.Errorf("%d templates are damaged; is the disk in order? remove the snapshots that need them", maxSuccessors)
}

func (p parts) store() *snapshots.Store {
	return snapshots.In(p.home, snapshots.WithOwner(vm.Own))
}

// makeTemplates makes the idle template if there is none, and the ready one
// with the given id.
func (p parts) makeTemplates(ctx context.Context, o Options, st *snapshots.Store, id string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*o.BootTimeout)
	defer cancel()
	// What the templates' VMs are called is nobody's business, and they end
	// with this process.
	o.Hostname, o.Label, o.Outlive = "warren", "a template", false
	idle, idleID, err := openTemplate(ctx, st, p.key(), idleID)
	if idleID != "" {
		if err := p.makeIdle(ctx, o, idleID); err != nil {
			return err
		}
		idle, err = st.Open(ctx, idleID)
	}
	if err != nil {
		return err
	}
	defer idle.Close()
	return p.makeReady(ctx, o, idle, id)
}

// makeIdle boots a VM on a memory file that its writes reach and freezes it
// when its agent is idle.
func (p parts) makeIdle(ctx context.Context, o Options, id string) error {
	o.Step("booting a template (once for each size of VM)")
	m, err := launch(ctx, p.again(), o, time.Now(), func(c *supervisor.Config, dir *store.VMDir) {
		c.VM.Memory, c.VM.SharedMemory = filepath.Join(dir.Path, "memory"), true
	})
	if err != nil {
		return err
	}
	_, err = m.Snapshot(ctx, supervisor.SnapshotRequest{ID: id, Kind: string(snapshots.KindTemplate)})
	return errors.Join(err, m.Close(context.WithoutCancel(ctx)))
}

// again lends the parts to a machine: it does not release them.
func (p parts) again() parts {
	p.release = func() {}
	return p
}

// makeReady restores the idle template, lets the guest mount its disk and run
// what every guest runs first, and snapshots that.
func (p parts) makeReady(ctx context.Context, o Options, idle *snapshots.Snapshot, id string) error {
	o.Step("preparing the template")
	m, err := p.again().restore(ctx, o, time.Now(), idle)
	if err != nil {
		return err
	}
	err = warm(ctx, m)
	if err == nil {
		_, err = m.Snapshot(ctx, supervisor.SnapshotRequest{ID: id, Kind: string(snapshots.KindTemplate)})
	}
	if err := errors.Join(err, m.Close(context.WithoutCancel(ctx))); err != nil {
		return err
	}
	ready, err := p.store().Open(ctx, id)
	if err != nil {
		return err
	}
	defer ready.Close()
	return flatten(ctx, ready)
}

// warm runs what a guest mostly runs first, so that its pages are in memory in
// every copy.
func warm(ctx context.Context, m *Machine) error {
	for _, argv := range [][]string{{"true"}, {"sh", "-c", "cat /etc/passwd | grep -q root"}, {"true"}} {
		p, err := m.Exec(ctx, guestapi.ExecRequest{ID: "warm", Argv: argv, Stdin: false}, nil, nil)
		if err != nil {
			return err
		}
		status, err := p.Wait()
		if err != nil {
			return err
		}
		if status.ExitCode() != 0 {
			return fmt.Errorf("%q ended with code %d in the template's guest", argv[0], status.ExitCode())
		}
	}
	return nil
}
