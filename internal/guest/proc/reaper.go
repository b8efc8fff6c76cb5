package proc

import (
	"errors"
	"os"
	"strconv"
	"sync"
	"syscall"
)

// ErrEnded says that a program has ended and can no longer be signalled.
var ErrEnded = errors.New("the program has ended")

// Reaper makes and collects the children of this process.
//
// A process has at most one Reaper, and nothing else in it may wait for
// children: the Reaper would have taken them. It lives as long as the process.
// All methods may be called from any goroutine.
type Reaper struct {
	// mu is held while a child is made and entered, and while a pid is looked
	// up, so that a child which ends at once is known by then; and while a
	// child is signalled, so that no signal goes to a pid that was collected.
	mu       sync.Mutex
	born     *sync.Cond // a child was made; the reaping goroutine had none
	made     uint64     // children made so far
	children map[int]*Process
	none     chan struct{} // closed when there is no child; nil if nobody asked
	idle     bool          // wait4 found no child, and none was made since
}

// Process is one child. Done is closed when it has ended; Status is valid
// from then on.
type Process struct {
	pid    int
	done   chan struct{}
	status syscall.WaitStatus
}

// NewReaper begins to collect children, orphans included where the kernel
// hands them to this process (PID 1, or a child subreaper).
func NewReaper() *Reaper {
	r := &Reaper{children: make(map[int]*Process)}
	r.born = sync.NewCond(&r.mu)
	go r.reap()
	return r
}

func (r *Reaper) reap() {
	var ws syscall.WaitStatus
	var seen uint64
	for {
		pid, err := syscall.Wait4(-1, &ws, 0, nil)
		if err == syscall.EINTR {
			continue
		}
		r.mu.Lock()
		if err != nil {
			// No child: whoever will be an orphan has a living ancestor that
			// is our child, so there is nothing to wait for until we make one.
			for r.made == seen {
				r.setIdle()
				r.born.Wait()
			}
			seen = r.made
			r.mu.Unlock()
			continue
		}
		p := r.children[pid]
		delete(r.children, pid)
		if p != nil {
			p.status = ws
			close(p.done)
		}
		r.mu.Unlock()
	}
}

func (r *Reaper) setIdle() {
	r.idle = true
	if r.none != nil {
		close(r.none)
		r.none = nil
	}
}

// Start starts the program at path. It returns when the program has been
// executed or could not be; the error is then the bare errno of the step
// that failed. The descriptors in attr stay the caller's.
func (r *Reaper) Start(path string, argv []string, attr *syscall.ProcAttr) (*Process, error) {
	p := &Process{done: make(chan struct{})}
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := syscall.ForkExec(path, argv, attr)
	// A child was there even if it could not execute the program.
	r.made++
	r.idle = false
	r.born.Signal()
	if err != nil {
		return nil, err
	}
	p.pid = pid
	r.children[pid] = p
	return p, nil
}

// PID is the child's process id. After Done it may belong to someone else.
func (p *Process) PID() int { return p.pid }

// Done is closed when the program has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Status is how it ended; valid after Done.
func (p *Process) Status() syscall.WaitStatus { return p.status }

// Ended tells whether Done is closed.
func (p *Process) Ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// SignalGroup sends sig to the process group that p leads, or returns
// ErrEnded. When note is not nil it is called just before the signal goes
// out and before anybody can learn of p's end.
func (r *Reaper) SignalGroup(p *Process, sig syscall.Signal, note func()) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p.Ended() {
		return ErrEnded
	}
	if note != nil {
		note()
	}
	return syscall.Kill(-p.pid, sig)
}

// SignalSession is SignalGroup for every process group of the session that p
// led: the jobs of an interactive shell have groups of their own. It works on
// what p left behind too; note is only called while p runs. A process that
// made itself a new session is out of reach. It reads all of /proc and is for
// rare use.
//
// Groups and not processes are signalled, because the kernel does that in one
// step: something that forks faster than /proc is read does not get away.
func (r *Reaper) SignalSession(p *Process, sig syscall.Signal, note func()) {
	seen := make(map[int]bool)
	if r.SignalGroup(p, sig, note) == nil {
		seen[p.pid] = true
	}
	for _, stat := range Processes() {
		if stat.Session == p.pid && !seen[stat.Group] {
			seen[stat.Group] = true
			// It may have ended since; nothing to do about that.
			_ = syscall.Kill(-stat.Group, sig)
		}
	}
}

// None returns a channel that is closed once this process has no child.
func (r *Reaper) None() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.none == nil {
		r.none = make(chan struct{})
	}
	none := r.none
	if r.idle {
		r.setIdle()
	}
	return none
}

// Stat is the part of /proc/PID/stat that the agent needs.
type Stat struct {
	State   byte
	Parent  int
	Group   int
	Session int
}

// Processes calls yield with every process of the guest, kernel threads
// included.
func Processes() func(yield func(int, Stat) bool) {
	return func(yield func(int, Stat) bool) {
		dir, err := os.Open("/proc")
		if err != nil {
			return
		}
		defer dir.Close()
		for {
			names, err := dir.Readdirnames(256)
			for _, name := range names {
				pid, err := strconv.Atoi(name)
				if err != nil {
					continue
				}
				if s, ok := readStat("/proc/" + name + "/stat"); ok && !yield(pid, s) {
					return
				}
			}
			if err != nil {
				return
			}
		}
	}
}

func readStat(path string) (Stat, bool) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Stat{}, false
	}
	return parseStat(data)
}
