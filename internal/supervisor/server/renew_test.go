package server

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/vm"
)

// restoredVM is a fakeVM that was restored.
type restoredVM struct {
	*fakeVM
	pauses, resumes atomic.Int32
	failPause       atomic.Bool
}

func (f *restoredVM) Pause(context.Context) error {
	f.pauses.Add(1)
	if f.failPause.Load() {
		return errors.New("the monitor is busy")
	}
	return nil
}
func (f *restoredVM) Resume(context.Context) error { f.resumes.Add(1); return nil }
func (f *restoredVM) AddOverlay(_ context.Context, path string) (*vm.Overlay, error) {
	return &vm.Overlay{Path: path}, nil
}
func (f *restoredVM) PrepareCapture(context.Context) error { return nil }
func (f *restoredVM) Capture(context.Context, *os.File, *vm.Overlay) (*vm.Capture, error) {
	return &vm.Capture{}, errors.New("no memory to capture")
}

// fromSnapshot makes a rig's VM one that is restored from a flat snapshot.
func fromSnapshot(t *testing.T, play func(context.Context, *fakeVM)) (rigOptions, *atomic.Pointer[restoredVM]) {
	var made atomic.Pointer[restoredVM]
	return rigOptions{guest: play, change: func(o *Options) {
		ctx := context.Background()
		home := store.HomeOf(o.Dir.Path)
		d, err := snapshots.In(home).Draft(ctx, "base")
		if err != nil {
			t.Fatal(err)
		}
		for name, size := range map[string]int64{snapshots.StateName: 10, snapshots.MemoryName: 1 << 20} {
			if err := os.WriteFile(d.Path(name), make([]byte, size), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		machine := snapshots.Machine{CPUs: 1, MemMB: 1, Accel: "tcg"}
		sn, err := d.Publish(ctx, snapshots.Manifest{Kind: snapshots.KindTemplate, Machine: machine, ImageID: "image-1",
			Memory: snapshots.Memory{Kind: snapshots.MemoryFlat}})
		if err != nil {
			t.Fatal(err)
		}
		sn.Close()
		o.Config.Snapshot, o.Config.Prepared, o.Config.Machine = "base", true, machine
		o.Config.VM.DataDisk, o.Config.DataTemplate = o.Dir.Data(), o.Dir.Data()
		if err := os.WriteFile(o.Dir.Data(), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		launch := o.Launch
		o.Launch = func(ctx context.Context, c supervisor.Config, console io.Writer) (Machine, error) {
			m, err := launch(ctx, c, console)
			if err != nil {
				return nil, err
			}
			made.Store(&restoredVM{fakeVM: m.(*fakeVM)})
			return made.Load(), nil
		}
	}}, &made
}

func TestACopyThatIsNotRenewedNeverRuns(t *testing.T) {
	for name, renew := range map[string]func(*http.Request, *bufio.Reader, net.Conn){
		"refused":          refuse(guestapi.CodeInternal, "no entropy"),
		"not frozen":       refuse(guestapi.CodeConflict, "the guest is not frozen"),
		"not HTTP":         raw("what?\r\n\r\n"),
		"another document": raw("HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n[1,2,3]"),
		"the end":          func(_ *http.Request, _ *bufio.Reader, conn net.Conn) { conn.Close() },
		"no answer":        func(*http.Request, *bufio.Reader, net.Conn) { select {} },
	} {
		t.Run(name, func(t *testing.T) {
			a := honest()
			a[guestapi.Renew.Path] = renew
			thawed := false
			a[guestapi.Thaw.Path] = func(req *http.Request, in *bufio.Reader, conn net.Conn) {
				thawed = true
				answer(guestapi.Empty{})(req, in, conn)
			}
			o, vm := fromSnapshot(t, a.play)
			o.maxWait = time.Second
			r, err := tryStart(t, o)
			if err == nil {
				t.Fatal("it started")
			}
			if !strings.Contains(err.Error(), "give the copy its own identity") {
				t.Errorf("err %q", err)
			}
			if !isDone(vm.Load().Exited()) {
				t.Error("the VM still runs")
			}
			if thawed {
				t.Error("the programs were thawed")
			}
			r.waitEnd()
			r.wantNothingLeft()
		})
	}
}

// snapshotGuest is an honest agent that knows whether it is frozen. freeze and
// thaw, if set, play the n-th call, from 1.
func snapshotGuest(frozen *atomic.Bool, freeze, thaw func(n int32, req *http.Request, in *bufio.Reader, conn net.Conn) bool) agent {
	a := honest()
	var freezes, thaws atomic.Int32
	a[guestapi.Renew.Path] = answer(guestapi.RenewInfo{})
	a[guestapi.SetClock.Path] = answer(guestapi.Empty{})
	a[guestapi.Freeze.Path] = func(req *http.Request, in *bufio.Reader, conn net.Conn) {
		frozen.Store(true)
		if freeze == nil || freeze(freezes.Add(1), req, in, conn) {
			answer(guestapi.FreezeInfo{Frozen: true})(req, in, conn)
		}
	}
	a[guestapi.Thaw.Path] = func(req *http.Request, in *bufio.Reader, conn net.Conn) {
		if thaw == nil || thaw(thaws.Add(1), req, in, conn) {
			frozen.Store(false)
			answer(guestapi.Empty{})(req, in, conn)
		}
	}
	exec := a[guestapi.ExecPath]
	a[guestapi.ExecPath] = func(req *http.Request, in *bufio.Reader, conn net.Conn) {
		if frozen.Load() {
			refuse(guestapi.CodeConflict, "the guest is being captured; try again")(req, in, conn)
			return
		}
		exec(req, in, conn)
	}
	return a
}

func save(r *rig, ctx context.Context) error {
	_, err := r.client.Snapshot(ctx, supervisor.SnapshotRequest{ID: snapshots.NewID(), Kind: string(snapshots.KindSnapshot)})
	return err
}

func runTrue(t *testing.T, r *rig) {
	t.Helper()
	p, err := r.client.Exec(t.Context(), guestapi.ExecRequest{Argv: []string{"true"}}, nil, nil)
	if err == nil {
		_, err = p.Wait()
	}
	if err != nil {
		t.Errorf("start a program: %v", err)
	}
}

func TestAGuestIsNeverLeftFrozen(t *testing.T) {
	silent := func(n int32, _ *http.Request, _ *bufio.Reader, _ net.Conn) bool {
		if n == 1 {
			select {}
		}
		return true
	}
	for _, tt := range []struct {
		name         string
		freeze, thaw func(int32, *http.Request, *bufio.Reader, net.Conn) bool
		failPause    bool
	}{
		{name: "the capture fails"},
		{name: "the answer to Freeze is lost", freeze: silent},
		{name: "the answer to Thaw is late", thaw: silent},
		{name: "the processors do not stop", failPause: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var frozen atomic.Bool
			o, vm := fromSnapshot(t, snapshotGuest(&frozen, tt.freeze, tt.thaw).play)
			o.maxWait = 300 * time.Millisecond
			r := start(t, o)
			vm.Load().failPause.Store(tt.failPause)
			if err := save(r, t.Context()); err == nil || !strings.HasPrefix(err.Error(), "snapshot: ") {
				t.Errorf("err %v", err)
			}
			if frozen.Load() {
				t.Error("the programs are frozen")
			}
			if v := vm.Load(); v.resumes.Load() != v.pauses.Load()+1 { // one when it was restored
				t.Errorf("stopped %d times, let go %d times", v.pauses.Load(), v.resumes.Load())
			}
			runTrue(t, r)
		})
	}
}

func TestACallerWhoHangsUpDoesNotKeepTheGuestFrozen(t *testing.T) {
	var frozen atomic.Bool
	ctx, cancel := context.WithCancel(t.Context())
	o, _ := fromSnapshot(t, snapshotGuest(&frozen, func(int32, *http.Request, *bufio.Reader, net.Conn) bool {
		cancel()
		time.Sleep(50 * time.Millisecond)
		return true
	}, nil).play)
	r := start(t, o)
	if err := save(r, ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("err %v", err)
	}
	runTrue(t, r)
	if frozen.Load() {
		t.Error("the programs are frozen")
	}
}

func TestProgramsThatAreStartedDuringASnapshotWaitForItsEnd(t *testing.T) {
	var frozen atomic.Bool
	o, _ := fromSnapshot(t, snapshotGuest(&frozen, func(int32, *http.Request, *bufio.Reader, net.Conn) bool {
		time.Sleep(100 * time.Millisecond)
		return true
	}, nil).play)
	r := start(t, o)
	saved := make(chan error)
	go func() { saved <- save(r, t.Context()) }()
	for done := false; !done; {
		select {
		case <-saved:
			done = true
		default:
			runTrue(t, r)
		}
	}
}
