package machine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
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
const templateVersion = 3

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
// Which snapshots they are is remembered in the cache, by id and by digest. Their
// ids are never used again: what needs an old one would be restored on top of
// another. And one that was imported is nobody's template, whatever it says it
// is, even by an id that was once ours: it may be anyone's.
type role string

const (
	roleIdle  role = "idle"
	roleReady role = "ready"
)

const rolePrefix = "template-"

func roleFile(home store.Home, key string, r role) string {
	return filepath.Join(home.Cache(), rolePrefix+key+"-"+string(r))
}

// appointment is what the cache remembers of a template.
type appointment struct {
	id string
	// sha256 is the digest of its manifest; "" while it is being made.
	sha256 string
}

// appoint makes up the id that a new template will have, and remembers it. It
// does so first: a template that is not remembered may be collected.
func appoint(home store.Home, key string, r role) (id string, err error) {
	id = "t" + strings.TrimPrefix(snapshots.NewID(), "s")
	if r == roleIdle {
		id += "-idle"
	}
	return id, appointment{id: id}.write(home, key, r)
}

func (a appointment) write(home store.Home, key string, r role) error {
	return store.WriteVolatile(roleFile(home, key, r), []byte(strings.TrimSpace(a.id+" "+a.sha256)), 0o600)
}

// appointed is what is remembered in a file; its zero value if that is nothing.
func appointed(file string) appointment {
	f, err := os.Open(file)
	if err != nil {
		return appointment{}
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, 1<<10))
	id, sum, _ := strings.Cut(string(data), " ")
	if err != nil || snapshots.CheckID(id) != nil {
		return appointment{}
	}
	return appointment{id, sum}
}

// may says whether the template is, or may become, the one that was appointed.
func (a appointment) may(m snapshots.Manifest) bool {
	return a.id == m.ID && (a.sha256 == "" || a.sha256 == m.SHA256)
}

// KeepTemplate says whether a template is of use to this home still, for
// snapshots.Store.Collect: one that new machines are made from, of the guest
// image in use and the QEMU that is installed. It is true when that cannot be
// told.
func KeepTemplate(ctx context.Context, home store.Home) func(snapshots.Manifest) bool {
	image, imageErr := guestimage.OpenContext(ctx, home.Dir())
	qemu, qemuErr := vm.Version(ctx, "", home.Cache())
	return func(m snapshots.Manifest) bool {
		if imageErr != nil || qemuErr != nil {
			return true
		}
		// Now: one may have been made since.
		files, err := filepath.Glob(filepath.Join(home.Cache(), rolePrefix+"*"))
		if err != nil || !slices.ContainsFunc(files, func(file string) bool { return appointed(file).may(m) }) {
			return err != nil
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
	if sn, err := p.openTemplate(ctx, roleReady); sn != nil || err != nil {
		return sn, err
	}
	unlock, err := p.store().TemplateLock(ctx, p.key(), func() { o.Step("waiting for the template, which another process makes") })
	if err != nil {
		return nil, fmt.Errorf("make a template: %w", err)
	}
	defer unlock()
	if sn, err := p.openTemplate(ctx, roleReady); sn != nil || err != nil {
		return sn, err // somebody else made it meanwhile
	}
	sn, err := p.makeTemplates(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("make a template: %w", err)
	}
	return sn, nil
}

// openTemplate opens a template; nil if there is none that is whole. One that
// is damaged and that nobody needs it removes.
func (p parts) openTemplate(ctx context.Context, r role) (*snapshots.Snapshot, error) {
	a := appointed(roleFile(p.home, p.key(), r))
	if a.sha256 == "" {
		return nil, nil // none, or one whose making came to no end
	}
	sn, err := p.store().Open(ctx, a.id)
	switch {
	case err == nil && !a.may(sn.Manifest()):
		sn.Close()
		return nil, nil // an imported one has its id
	case errors.Is(err, snapshots.ErrNotFound):
		return nil, nil
	case errors.Is(err, snapshots.ErrDamaged):
		_ = p.store().Delete(ctx, a.id) // what needs it is damaged with it
		return nil, nil
	}
	return sn, err
}

func (p parts) store() *snapshots.Store {
	return snapshots.In(p.home, snapshots.WithOwner(vm.Own))
}

// makeTemplates makes the ready template, and the idle one first if there is
// none.
func (p parts) makeTemplates(ctx context.Context, o Options) (*snapshots.Snapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*o.BootTimeout)
	defer cancel()
	// What the templates' VMs are called is nobody's business, and they end
	// with this process.
	o.Hostname, o.Label, o.Outlive = "warren", "a template", false
	from, err := p.openTemplate(ctx, roleIdle)
	if err == nil && from == nil {
		from, err = p.make(ctx, roleIdle, func(id string) error { return p.makeIdle(ctx, o, id) })
	}
	if err != nil {
		return nil, err
	}
	defer from.Close()
	return p.make(ctx, roleReady, func(id string) error { return p.makeReady(ctx, o, from, id) })
}

// make appoints a template, makes it and opens it.
func (p parts) make(ctx context.Context, r role, make func(id string) error) (*snapshots.Snapshot, error) {
	id, err := appoint(p.home, p.key(), r)
	if err != nil {
		return nil, err
	}
	if err := make(id); err != nil {
		return nil, err
	}
	sn, err := p.store().Open(ctx, id)
	if err != nil {
		return nil, err
	}
	if err := (appointment{id, sn.Manifest().SHA256}).write(p.home, p.key(), r); err != nil {
		sn.Close()
		return nil, err
	}
	return sn, nil
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
func (p parts) makeReady(ctx context.Context, o Options, from *snapshots.Snapshot, id string) error {
	o.Step("preparing the template")
	m, err := p.again().restore(ctx, o, time.Now(), from)
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
