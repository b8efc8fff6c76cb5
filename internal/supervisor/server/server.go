package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// Options are what Run needs.
type Options struct {
	Config supervisor.Config
	// Dir is the VM's folder; Run owns it, and removes it at the end.
	Dir *store.VMDir
	// Owner ends when the process that started the VM does; nil for a VM
	// that may outlive it. Run closes it.
	Owner io.ReadCloser
	// Events takes the lines that tell the starter how the start goes. It
	// is not written to after Ready or a Fault.
	Events io.Writer
	// Launch and Dial start the VM and its link; nil is the real ones.
	Launch Launcher
	Dial   Dialer
	Log    *slog.Logger
	// GiveUp, if set, ends the process when the VM's end cannot be reached
	// in any reasonable time.
	GiveUp func()
	// MaxWait, if not 0, shortens every deadline the guest has, for tests.
	MaxWait time.Duration
	// Faults, if set, is asked before each write of a snapshot to the disk, for
	// tests; see snapshots.WithFaults.
	Faults func(op snapshots.Op, path string) error
	// startTick is execStartTick, or shorter in tests.
	startTick time.Duration
}

// A server is one VM's supervisor.
type server struct {
	Options
	started time.Time
	console *tail
	// consoleLog is nil before startQEMU; windUp closes it.
	consoleLog io.Closer

	// stopping ends with an *ending when the VM is to end; now ends when it
	// is to end without asking the guest.
	stopping context.Context
	stop     context.CancelCauseFunc
	now      context.Context
	stopNow  context.CancelFunc

	unhook func() bool // lets go of Run's context

	// life ends, with a *control.Fault of kind Gone, when calls in flight
	// have to. It outlasts stopping: what runs may see its guest's last words.
	life context.Context
	kill context.CancelCauseFunc

	// told is closed when end is final and everything is removed.
	told chan struct{}
	end  control.End

	mu      sync.Mutex
	state   control.State
	phases  []control.Phase
	machine Machine // nil before QEMU answers
	guest   *guest  // nil before the VM is prepared
	hello   guestapi.HelloInfo
	prepare map[string]int64
	record  store.Record

	history history        // what snapshots need
	aside   sync.WaitGroup // work that ends with life

	streams limiter // execs and transfers
	calls   limiter // calls to the guest
	large   limiter // documents of more than smallDocument
}

// ending is the cause of a stop.
type ending struct{ control.End }

func (e *ending) Error() string { return e.Reason }

// Run supervises one VM from its start to its end. It returns nil when the VM
// ran and ended, whatever the reason, and an error when it could not be
// started; the starter has been told by then. A ctx that ends stops the VM.
func Run(ctx context.Context, o Options) error {
	s := newServer(ctx, o)
	defer s.unhook()
	defer s.stopNow()
	api, err := s.listen()
	if err != nil {
		err = fmt.Errorf("listen on the control socket: %w", err)
		s.event(control.Event{Fault: control.Faultf(control.Internal, "%v", err)})
		if o.Owner != nil {
			o.Owner.Close()
		}
		return errors.Join(err, s.Dir.Remove())
	}
	ownerGone := s.watchOwner()
	err = s.boot()
	if err == nil {
		s.Log.Info("ready", "phases", s.phases)
		s.event(control.Event{Ready: true})
	} else {
		s.Log.Error("the VM did not start", "error", err)
	}
	end := s.windUp(err)
	s.Log.Info("the VM ended", "reason", end.Reason, "asked", end.Asked)
	if err != nil {
		// Only now: who reads it may count on nothing being left.
		s.event(control.Event{Fault: control.Faultf(control.Internal, "%v", err)})
	}
	api.close()
	if o.Owner != nil {
		o.Owner.Close()
		<-ownerGone
	}
	return err
}

func newServer(ctx context.Context, o Options) *server {
	if o.Launch == nil {
		o.Launch = launch
	}
	if o.Dial == nil {
		o.Dial = dial
	}
	if o.startTick == 0 {
		o.startTick = execStartTick
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	s := &server{
		Options: o,
		started: time.Now(),
		console: newTail(),
		told:    make(chan struct{}),
		state:   control.Starting,
		streams: make(limiter, maxOpen),
		calls:   make(limiter, maxCalls),
		large:   make(limiter, 1),
	}
	s.stopping, s.stop = context.WithCancelCause(context.WithoutCancel(ctx))
	s.now, s.stopNow = context.WithCancel(context.WithoutCancel(ctx))
	s.life, s.kill = context.WithCancelCause(context.WithoutCancel(ctx))
	s.unhook = context.AfterFunc(ctx, func() {
		s.requestStop(control.StopAsk, control.End{Reason: "its supervisor was told to stop", Asked: true})
	})
	return s
}

// requestStop begins the end. The first reason stays; a later request can
// only make it faster.
func (s *server) requestStop(mode control.StopMode, end control.End) {
	s.stop(&ending{end})
	if mode == control.StopNow {
		s.stopNow()
	}
}

// watchOwner stops the VM when the process that started it is gone. The
// pipe carries nothing: all it can do is end.
func (s *server) watchOwner() (done <-chan struct{}) {
	ch := make(chan struct{})
	if s.Owner == nil {
		close(ch)
		return ch
	}
	go func() {
		defer close(ch)
		io.Copy(io.Discard, s.Owner)
		s.requestStop(control.StopNow, control.End{Reason: "the process that started it ended"})
	}()
	return ch
}

// event tells the starter. It may be gone, which watchOwner sees.
func (s *server) event(e control.Event) {
	if s.Events == nil {
		return
	}
	line, err := json.Marshal(e)
	if err == nil {
		s.Events.Write(append(line, '\n'))
	}
}

// phase closes a phase that began at since.
func (s *server) phase(name string, since time.Time) {
	p := control.Phase{Name: name, Microseconds: time.Since(since).Microseconds()}
	s.mu.Lock()
	s.phases = append(s.phases, p)
	s.mu.Unlock()
	s.event(control.Event{Phase: &p})
}

// wait is how long the guest may take for what is allowed d.
func (s *server) wait(d time.Duration) time.Duration {
	if s.MaxWait > 0 {
		return min(d, s.MaxWait)
	}
	return d
}

// writeRecord changes the record on disk.
func (s *server) writeRecord(change func(*store.Record)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.record.ID == "" {
		self, err := store.FindProcess(os.Getpid())
		if err != nil {
			return err
		}
		s.record = store.Record{
			ID: s.Config.ID, Label: s.Config.Label, Outlive: s.Config.Outlive,
			Created: s.started.UTC(), Supervisor: self, Snapshot: s.Config.Snapshot,
		}
	}
	change(&s.record)
	return s.Dir.WriteRecord(s.record)
}
