package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/link"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/vm"
	"github.com/warren-vm/warren/internal/vm/ram"
)

// plainRestore is a QEMU that is restored from a snapshot's files as anyone
// would start it by hand: the same machine, without supervisor, confinement or
// monitor, and without an identity of its own.
type plainRestore struct {
	qemu, state string
	spec        vm.Spec
	template    string // of the disk's overlay
	dir         string // for overlays
	release     func()
}

// plainRestore is what restores a snapshot without Warren. The caller calls
// release.
func (b *bed) plainRestore(ctx context.Context, id string) (*plainRestore, error) {
	sn, err := snapshots.In(b.home, snapshots.WithOwner(vm.Own)).Open(ctx, id)
	if err != nil {
		return nil, err
	}
	m := sn.Manifest()
	flat, err := sn.MakeFlat(ctx, ram.Flattener(ctx, int64(m.Machine.MemMB)<<20))
	if err != nil {
		sn.Close()
		return nil, err
	}
	dir, err := os.MkdirTemp(b.home.Cache(), "bench-")
	if err != nil {
		sn.Close()
		return nil, err
	}
	return &plainRestore{
		qemu: b.qemu, state: sn.State(), template: b.image.DataTemplate, dir: dir,
		spec: vm.Spec{
			CPUs: m.Machine.CPUs, MemMB: m.Machine.MemMB, Accel: vm.Accel(m.Machine.Accel), Firmware: m.Machine.Firmware,
			RootDisk: b.image.Disk, DataBase: b.image.DataBase, DataDisk: "overlay", Overlays: sn.Overlays(),
			Memory: flat, State: sn.State(),
		},
		release: func() { sn.Close(); os.RemoveAll(dir) },
	}, nil
}

// args is the command line: the one Warren would use, with the files where they
// are, the state at descriptor 6, and without what keeps QEMU in its place.
func (p *plainRestore) args(overlay string) []string {
	args := vm.Args(p.spec, vm.Paths{
		RootDisk: p.spec.RootDisk, DataBase: p.spec.DataBase, DataDisk: overlay, Memory: p.spec.Memory,
		Overlay: func(place int) string { return p.spec.Overlays[place] },
	}, vm.FDs{QMP: 3, Link: 4, Console: 5})
	var out []string
	for i := 0; i < len(args); i++ {
		switch args[i] {
		case "-S":
		case "-sandbox", "-mon":
			i++
		case "-incoming":
			out = append(out, "-incoming", "fd:6")
			i++
		default:
			out = append(out, args[i])
		}
	}
	return out
}

// restoredVM is one such QEMU that runs.
type restoredVM struct {
	*process
	session *link.Session
	overlay string
	conns   []net.Conn
}

// start restores a VM and waits for one answer of its guest.
func (p *plainRestore) start(ctx context.Context) (v *restoredVM, err error) {
	began := time.Now()
	v = &restoredVM{overlay: filepath.Join(p.dir, snapshots.NewID()+".qcow2")}
	defer func() {
		if err != nil {
			v.end()
		}
	}()
	if err := store.CopySparse(p.template, v.overlay); err != nil {
		return nil, err
	}
	state, err := vm.OpenState(p.state)
	if err != nil {
		return nil, err
	}
	defer state.Close()
	var files []*os.File
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	for range 3 {
		ours, theirs, err := pairOfSockets()
		if err != nil {
			return nil, err
		}
		v.conns, files = append(v.conns, ours), append(files, theirs)
	}
	v.process, err = command{
		argv:  append([]string{p.qemu}, p.args(v.overlay)...),
		files: append(slices.Clone(files), state),
	}.start(ctx)
	if err != nil {
		return nil, err
	}
	v.started = began
	if v.session, err = link.Dial(ctx, v.conns[1].(*net.UnixConn)); err != nil {
		return nil, err
	}
	_, err = ask(ctx, v.session, guestapi.Hello, guestapi.Empty{})
	return v, err
}

// pairOfSockets returns our end and a file to be inherited.
func pairOfSockets() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	end := os.NewFile(uintptr(fds[0]), "socket")
	defer end.Close()
	theirs := os.NewFile(uintptr(fds[1]), "socket")
	conn, err := net.FileConn(end)
	if err != nil {
		theirs.Close()
	}
	return conn, theirs, err
}

// ask makes one call over a stream of its own.
func ask[Req, Resp any](ctx context.Context, s *link.Session, c guestapi.Call[Req, Resp], req Req) (Resp, error) {
	var none Resp
	body, err := json.Marshal(req)
	if err != nil {
		return none, err
	}
	conn, err := s.Open(ctx)
	if err != nil {
		return none, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://guest"+c.Path, bytes.NewReader(body))
	if err != nil {
		return none, err
	}
	if err := r.Write(conn); err != nil {
		return none, err
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), r)
	if err != nil {
		return none, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return none, fmt.Errorf("%s: status %d: %s", c.Path, resp.StatusCode, guestapi.CleanLine(string(text)))
	}
	return guestapi.Decode[Resp](resp.Body, c.MaxResponse)
}

// end kills the VM.
func (v *restoredVM) end() {
	if v.process != nil {
		v.stop()
	}
	if v.session != nil {
		v.session.Close()
	}
	for _, c := range v.conns {
		c.Close()
	}
	os.Remove(v.overlay)
}

// answers is how long each of count restores took to its first answer, in ms.
func (p *plainRestore) answers(ctx context.Context, count int) ([]float64, error) {
	var out []float64
	for range count {
		v, err := p.start(ctx)
		if err != nil {
			return nil, reason(ctx, err)
		}
		out = append(out, milliseconds(time.Since(v.started)))
		v.end()
	}
	return out, nil
}
