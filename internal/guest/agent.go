package guest

import (
	"context"
	"errors"
	"log"
	"net"
	"net/http"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/warren-vm/warren/internal/guest/proc"
	"github.com/warren-vm/warren/internal/guestapi"
)

// System is the machine the agent runs on.
type System interface {
	// Prepare gives the machine its identity and its disk. It is called at
	// most once; after an error the agent runs nothing, for ever.
	Prepare(id guestapi.Identity) (guestapi.PrepareInfo, error)
	// SetClock sets the wall clock.
	SetClock(t time.Time) error
	// Freeze stops every program and says whether they have stopped yet; see
	// guestapi.FreezeInfo. No start of a program is under way, and none follows
	// until Thaw or Renew succeeded. It may be repeated. After an error what
	// ran before runs on.
	Freeze() (guestapi.FreezeInfo, error)
	// Thaw lets the programs run on, if they do not already. After an error
	// they are frozen and it may be called again.
	Thaw() error
	// Renew gives a frozen copy its own identity, runs the hooks and then
	// thaws. After an error, or a panic, the programs are frozen and the agent
	// calls neither Thaw nor Renew again.
	Renew(id guestapi.Identity) (guestapi.RenewInfo, error)
	// Shutdown stops every process, syncs and powers off. Frozen programs are
	// killed as they are: they must not run again, not even to hear of it. It
	// does not return on a real machine.
	Shutdown()
	// OOMKilled tells whether the kernel killed the process for want of memory.
	// It is asked only about processes that ended by SIGKILL.
	OOMKilled(pid int) bool
}

// Options of an Agent.
type Options struct {
	// ImageID is the guest image's id, for Hello.
	ImageID string
	System  System
	Reaper  *proc.Reaper
	// Accounts is where users are looked up.
	Accounts *proc.Accounts
	// Cgroup is a descriptor of the cgroup that programs are started in;
	// 0 starts them in the agent's own.
	Cgroup int
	// Log takes one line without its end; it must not block.
	Log func(line string)
}

// Agent answers calls. One Agent serves every session of the link.
type Agent struct {
	opt  Options
	null uintptr // /dev/null, for as long as the agent lives
	http *http.Server

	state     atomic.Int32
	changing  sync.Mutex // held by Prepare, Freeze, Thaw and Renew
	gate      gate       // shut: the guest is frozen
	goingDown sync.Once
	routes    map[string]http.HandlerFunc

	runs   runs
	files  semaphore // transfers and other work on files
	floors semaphore // SpawnTime
}

// The states of an agent: idle, then prepared or broken. Broken is for ever;
// a prepared agent becomes so when it is a copy that could not be renewed.
const (
	stateIdle = iota
	statePrepared
	stateBroken
)

// maxFileCalls is how many calls work on files at once; more wait.
const maxFileCalls = 24

// New makes an agent. The only error is a missing /dev/null.
func New(opt Options) (*Agent, error) {
	null, err := proc.DevNull()
	if err != nil {
		return nil, err
	}
	a := &Agent{
		opt:    opt,
		null:   uintptr(null),
		files:  newSemaphore(maxFileCalls),
		floors: newSemaphore(1),
	}
	a.runs.byID = make(map[string]*run)
	a.http = &http.Server{
		Handler:        a.Handler(),
		MaxHeaderBytes: 64 << 10,
		ErrorLog:       log.New(logWriter(opt.Log), "", 0),
	}
	// HTTP/2 never happens on the link; an empty map keeps net/http from
	// preparing for it.
	a.http.Protocols = new(http.Protocols)
	a.http.Protocols.SetHTTP1(true)
	return a, nil
}

type logWriter func(string)

func (w logWriter) Write(p []byte) (int, error) {
	w(string(p))
	return len(p), nil
}

// Serve answers calls on the streams that l accepts, until l fails. Runs go
// on after that.
func (a *Agent) Serve(l net.Listener) error { return a.http.Serve(l) }

// Handler returns what answers the calls.
func (a *Agent) Handler() http.Handler {
	a.routes = make(map[string]http.HandlerFunc)
	on(a, guestapi.Hello, anytime, a.hello)
	on(a, guestapi.Prepare, anytime, a.prepare)
	on(a, guestapi.Freeze, prepared, a.freeze)
	on(a, guestapi.Thaw, prepared, a.thaw)
	on(a, guestapi.Renew, prepared, a.renew)
	on(a, guestapi.SetClock, prepared, a.setClock)
	on(a, guestapi.Signal, prepared, a.signal)
	on(a, guestapi.Resize, prepared, a.resize)
	on(a, guestapi.Stat, prepared, a.stat)
	on(a, guestapi.List, prepared, a.list)
	on(a, guestapi.Remove, prepared, a.remove)
	on(a, guestapi.Figures, anytime, a.figures)
	on(a, guestapi.SpawnTime, prepared, a.spawnTime)
	on(a, guestapi.Shutdown, anytime, a.shutdown)
	a.routes["POST "+guestapi.ExecPath] = a.exec
	a.routes["GET "+guestapi.FilePath] = a.transfer(a.readFile)
	a.routes["PUT "+guestapi.FilePath] = a.transfer(a.writeFile)
	a.routes["GET "+guestapi.TarPath] = a.transfer(a.packTar)
	a.routes["PUT "+guestapi.TarPath] = a.transfer(a.unpackTar)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// A map is all the routing there is; ServeMux costs several times as
		// much, and here every cycle is emulated.
		route := a.routes[r.Method+" "+r.URL.Path]
		if route == nil {
			writeError(w, refuse(guestapi.CodeBadRequest, "no call %s %s in protocol %d",
				r.Method, r.URL.Path, guestapi.Protocol))
			return
		}
		route(w, r)
	})
}

// ready refuses what needs a prepared machine.
func (a *Agent) ready() error {
	switch a.state.Load() {
	case statePrepared:
		return nil
	case stateBroken:
		return refuse(guestapi.CodeNotPrepared, "this guest could not be given an identity of its own; it runs nothing, start a new one")
	default:
		return refuse(guestapi.CodeNotPrepared, "the guest is not prepared yet")
	}
}

func (a *Agent) prepare(_ context.Context, req guestapi.PrepareRequest) (info guestapi.PrepareInfo, err error) {
	if err := checkIdentity(req); err != nil {
		return info, err
	}
	a.changing.Lock()
	defer a.changing.Unlock()
	switch a.state.Load() {
	case statePrepared:
		return info, refuse(guestapi.CodeConflict, "the guest is prepared already")
	case stateBroken:
		return info, a.ready()
	}
	// Whatever happens from here on, a panic included, a guest that is not
	// wholly prepared never runs anything: it could be somebody's twin.
	a.state.Store(stateBroken)
	info, err = a.opt.System.Prepare(req)
	if err != nil {
		return info, err
	}
	a.state.Store(statePrepared)
	return info, nil
}

func checkIdentity(id guestapi.Identity) error {
	switch {
	case !validHostname(id.Hostname):
		return refuse(guestapi.CodeBadRequest, "hostname %q is not 1 to 63 of a-z, 0-9 and inner dashes", id.Hostname)
	case !validMachineID(id.MachineID):
		return refuse(guestapi.CodeBadRequest, "machine id is not 32 lower-case hex digits")
	case len(id.Entropy) < 32 || len(id.Entropy) > 4096:
		return refuse(guestapi.CodeBadRequest, "%d bytes of entropy, not 32 to 4096", len(id.Entropy))
	case id.UnixNano <= 0:
		return refuse(guestapi.CodeBadRequest, "clock is not after 1970")
	}
	return nil
}

func validHostname(s string) bool {
	if len(s) < 1 || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for _, c := range []byte(s) {
		letter := c|0x20 >= 'a' && c|0x20 <= 'z'
		if !letter && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}

func validMachineID(s string) bool {
	for _, c := range []byte(s) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return len(s) == 32
}

func (a *Agent) setClock(_ context.Context, req guestapi.SetClockRequest) (guestapi.Empty, error) {
	if req.UnixNano <= 0 {
		return guestapi.Empty{}, refuse(guestapi.CodeBadRequest, "clock is not after 1970")
	}
	return guestapi.Empty{}, a.opt.System.SetClock(time.Unix(0, req.UnixNano))
}

// safely runs f in this goroutine and logs a panic in it instead of dying:
// without PID 1 the whole guest is gone.
func (a *Agent) safely(f func()) {
	defer func() {
		if v := recover(); v != nil {
			a.logPanic(v)
		}
	}()
	f()
}

// logPanic is called in the deferred function that recovered v, where the
// stack still shows who panicked.
func (a *Agent) logPanic(v any) {
	if v != http.ErrAbortHandler {
		a.opt.Log("panic: " + panicText(v) + "\n" + string(debug.Stack()))
	}
}

func panicText(v any) string {
	switch v := v.(type) {
	case error:
		return v.Error()
	case string:
		return v
	default:
		return "unknown"
	}
}

// semaphore bounds how many do something at once.
type semaphore chan struct{}

func newSemaphore(n int) semaphore { return make(semaphore, n) }

func (s semaphore) acquire(ctx context.Context) error {
	select {
	case s <- struct{}{}:
		return nil
	case <-ctx.Done():
		return errors.New("the caller went away")
	}
}

func (s semaphore) release() { <-s }
