package guest

import (
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/warren-vm/warren/internal/guest/proc"
	"github.com/warren-vm/warren/internal/guestapi"
)

const (
	// maxRuns is how many programs run at once: as many as the host has
	// streams.
	maxRuns = guestapi.MaxStreams
	// budget is how many descriptors runs hold, those of programs that ended
	// but left others with their output included. Together with transfers and
	// the agent's own it stays under the usual limit of 1,024, which the agent
	// shares with the programs it starts.
	budget = 800
	// killAfter is the time between SIGTERM and SIGKILL for a run that timed out.
	killAfter = 2 * time.Second
)

// runs are the programs that run now.
type runs struct {
	mu   sync.Mutex
	byID map[string]*run
	fds  int
}

// enter reserves an id and n descriptors for r.
func (rs *runs) enter(r *run, n int) error {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	switch {
	case rs.byID[r.id] != nil:
		return refuse(guestapi.CodeConflict, "a run %q is going on", r.id)
	case len(rs.byID) >= maxRuns:
		return refuse(guestapi.CodeTooMany, "%d programs run already; wait for one or stop one", len(rs.byID))
	case rs.fds+n > budget:
		return refuse(guestapi.CodeTooMany,
			"programs left in the background hold %d outputs open; stop some", rs.fds)
	}
	rs.byID[r.id] = r
	rs.fds += n
	return nil
}

func (rs *runs) leave(id string) {
	rs.mu.Lock()
	delete(rs.byID, id)
	rs.mu.Unlock()
}

func (rs *runs) giveBack(n int) {
	rs.mu.Lock()
	rs.fds -= n
	rs.mu.Unlock()
}

// find returns a run that goes on.
func (rs *runs) find(id string) (*run, error) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	r := rs.byID[id]
	if r == nil || r.process == nil {
		return nil, refuse(guestapi.CodeNotFound, "no run %q; it may have ended", id)
	}
	return r, nil
}

func (rs *runs) count() int {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return len(rs.byID)
}

// run is one program and the conversation about it.
type run struct {
	id    string
	agent *Agent
	req   *guestapi.ExecRequest

	process *proc.Process // written under runs.mu
	out     *output       // stdout, or the terminal
	err     *output       // stderr; nil with a terminal
	in      *input        // nil without stdin
	tty     *terminal     // nil without a terminal

	timedOut atomic.Bool
	killed   atomic.Bool // by us, so not for want of memory

	// sending is held while a frame crosses, so that frames do not mix.
	sending sync.Mutex
	conn    net.Conn
	gone    bool // the client; what there is to say is dropped
}

// send sends the n bytes that follow the header space in buf as one frame.
func (r *run) send(kind guestapi.FrameKind, buf []byte, n int) {
	guestapi.PutFrameHeader(buf, kind, n)
	r.sending.Lock()
	defer r.sending.Unlock()
	if r.gone {
		return
	}
	if _, err := r.conn.Write(buf[:guestapi.FrameHeader+n]); err != nil {
		r.gone = true
	}
}

// signal sends sig to the run's process group.
func (r *run) signal(sig syscall.Signal) error {
	note := func() {
		if sig == syscall.SIGKILL {
			r.killed.Store(true)
		}
	}
	err := r.agent.opt.Reaper.SignalGroup(r.process, sig, note)
	if err == proc.ErrEnded {
		return refuse(guestapi.CodeNotFound, "run %q has ended", r.id)
	}
	return err
}

// limit stops the run after its timeout. The returned function ends the
// waiting; once SIGTERM went out, SIGKILL follows for what is left of the
// session even if the program itself has ended by then.
func (r *run) limit() (stop func()) {
	if r.req.TimeoutMS <= 0 {
		return func() {}
	}
	session := func(sig syscall.Signal, note func()) {
		r.agent.safely(func() { r.agent.opt.Reaper.SignalSession(r.process, sig, note) })
	}
	timer := time.AfterFunc(time.Duration(r.req.TimeoutMS)*time.Millisecond, func() {
		if r.process.Ended() {
			return
		}
		// Before the signal: its process may end of it at once, and the Exit
		// frame has to say why.
		session(syscall.SIGTERM, func() { r.timedOut.Store(true) })
		if r.timedOut.Load() {
			time.AfterFunc(killAfter, func() { session(syscall.SIGKILL, func() { r.killed.Store(true) }) })
		}
	})
	return func() { timer.Stop() }
}

// exit is how the run ended.
func (r *run) exit() guestapi.ExitStatus {
	ws := r.process.Status()
	s := guestapi.ExitStatus{TimedOut: r.timedOut.Load()}
	if ws.Signaled() {
		s.Signal = int(ws.Signal())
	} else {
		s.Code = ws.ExitStatus()
	}
	if ws.Signaled() && ws.Signal() == syscall.SIGKILL && !r.killed.Load() {
		s.OOMKilled = r.agent.opt.System.OOMKilled(r.process.PID())
	}
	return s
}

// appendExit is json.Marshal for an ExitStatus without its cost.
func appendExit(b []byte, s guestapi.ExitStatus) []byte {
	b = append(b, `{"code":`...)
	b = strconv.AppendInt(b, int64(s.Code), 10)
	if s.Signal != 0 {
		b = append(b, `,"signal":`...)
		b = strconv.AppendInt(b, int64(s.Signal), 10)
	}
	if s.TimedOut {
		b = append(b, `,"timed_out":true`...)
	}
	if s.OOMKilled {
		b = append(b, `,"oom_killed":true`...)
	}
	return append(b, '}')
}
