// Package hooks runs the guest's own programs that make a restored copy of it
// one of its own, while everything else in the guest is frozen. What they may
// expect is written at guestapi.HooksDir.
package hooks

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guest/proc"
	"github.com/warren-vm/warren/internal/guestapi"
)

// Runner runs the hooks of one guest. It holds nothing between two runs.
type Runner struct {
	Dir    string // guestapi.HooksDir
	Reaper *proc.Reaper
	// Parent is a descriptor of the cgroup in which hooks get a group of their
	// own: beside the frozen one, not below it. 0 starts them in the agent's,
	// where what they leave behind is not killed; that is for tests.
	Parent int
	// Each and All limit the time of one hook and of all.
	Each, All time.Duration
}

// The limits that guestapi promises.
const (
	Each = 5 * time.Second
	All  = 10 * time.Second
)

const (
	// maxNames is how many names of the folder are looked at; what is in it
	// is the guest's doing.
	maxNames = 1024
	// dies is how long a hook that was killed may take to end. One that takes
	// longer waits in the kernel for something frozen, and is left to it.
	dies = time.Second
)

// codes that no program chose, as shells have them.
const (
	codeTimeUp     = 124
	codeNotStarted = 126
)

// Run runs the hooks. Nothing that goes wrong with them is an error; see
// guestapi.RenewInfo for what is returned. When it returns, no hook runs and
// nothing that one has started, but for what the kernel cannot end; that is
// told. It takes All at most, and a second more if the last cannot be ended.
//
// A start waits for the kernel to read the program. A guest that keeps its
// hooks on a file system of one of its own programs, which is frozen, waits
// for ever here; the host's deadline for Renew ends it.
func (r *Runner) Run(id guestapi.Identity) (results []guestapi.HookResult, left int) {
	names, left := list(r.Dir)
	if len(names) == 0 {
		return nil, left
	}
	results = make([]guestapi.HookResult, len(names))
	for i, name := range names {
		results[i].Name = cut(name)
	}
	b, err := r.bench(id)
	if err != nil {
		for i := range results {
			results[i].Code, results[i].Error = codeNotStarted, cut("not run: "+err.Error())
		}
		return results, left
	}
	defer b.close()
	end := time.Now().Add(r.All)
	for i, name := range names {
		limit := min(r.Each, time.Until(end))
		if limit <= 0 {
			results[i].Code, results[i].Error = codeTimeUp, fmt.Sprintf("not run: those before it took the %v of all hooks", r.All)
			continue
		}
		code, err := b.run(r.Dir+"/"+name, limit)
		results[i].Code = code
		if err != nil {
			results[i].Error = cut(err.Error())
		}
	}
	return results, left
}

// list returns the hooks in dir, sorted, and how many more than
// guestapi.MaxHooks there are. In most guests there is no such folder.
func list(dir string) (names []string, left int) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, 0
	}
	folder := os.NewFile(uintptr(fd), dir)
	defer folder.Close()
	all, err := folder.Readdirnames(maxNames)
	if err != nil && err != io.EOF {
		return nil, 0
	}
	for _, name := range all {
		if isHook(dir, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	if left = len(names) - guestapi.MaxHooks; left > 0 {
		return names[:guestapi.MaxHooks], left
	}
	return names, 0
}

func isHook(dir, name string) bool {
	for _, c := range []byte(name) {
		letter := c|0x20 >= 'a' && c|0x20 <= 'z'
		if !letter && (c < '0' || c > '9') && c != '.' && c != '_' && c != '-' {
			return false
		}
	}
	// Not through a link: what a package manager or an editor left half done
	// is often one.
	var st syscall.Stat_t
	err := syscall.Lstat(dir+"/"+name, &st)
	return err == nil && st.Mode&syscall.S_IFMT == syscall.S_IFREG && st.Mode&0o111 != 0
}

// bench is what all hooks of one run share.
type bench struct {
	reaper *proc.Reaper
	env    []string
	null   int
	groups *groups // nil: hooks run in the agent's own
}

func (r *Runner) bench(id guestapi.Identity) (*bench, error) {
	null, err := proc.DevNull()
	if err != nil {
		return nil, err
	}
	b := &bench{reaper: r.Reaper, null: null, env: []string{
		"PATH=" + proc.DefaultPath,
		"WARREN_GENERATION=" + strconv.FormatUint(id.Generation, 10),
		"WARREN_MACHINE_ID=" + id.MachineID,
		"WARREN_HOSTNAME=" + id.Hostname,
	}}
	if r.Parent != 0 {
		if b.groups, err = openGroups(r.Parent); err != nil {
			syscall.Close(null)
			return nil, err
		}
	}
	return b, nil
}

func (b *bench) close() {
	syscall.Close(b.null)
	if b.groups != nil {
		b.groups.close()
	}
}

// run runs one hook and ends everything that it started.
func (b *bench) run(path string, limit time.Duration) (code int, err error) {
	null := uintptr(b.null)
	command := proc.Command{Path: path, Argv: []string{path}, Env: b.env, Dir: "/"}
	attr := command.Attr([]uintptr{null, null, null}, false)
	endRest := func() error { return nil }
	if b.groups != nil {
		g, err := b.groups.add()
		if err != nil {
			return codeNotStarted, fmt.Errorf("not run: %w", err)
		}
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, g.dir
		endRest = func() error { return g.end(dies) }
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	p, err := b.reaper.Start(path, command.Argv, attr)
	if err != nil {
		_ = endRest() // nothing ran in it
		return codeNotStarted, command.Explain(err)
	}
	select {
	case <-p.Done():
		return status(p.Status(), endRest())
	case <-timer.C:
	}
	after := limit.Round(time.Millisecond)
	_ = b.reaper.SignalGroup(p, syscall.SIGKILL, nil) // it may just have ended
	if err := endRest(); err != nil {
		return codeTimeUp, fmt.Errorf("killed after %v: %w", after, err)
	}
	return codeTimeUp, fmt.Errorf("killed after %v", after)
}

// status words how a hook ended, and what became of what it left.
func status(ws syscall.WaitStatus, left error) (code int, err error) {
	switch {
	case ws.Signaled():
		return 128 + int(ws.Signal()), fmt.Errorf("ended by signal %d (%v)", int(ws.Signal()), ws.Signal())
	case left != nil:
		return ws.ExitStatus(), fmt.Errorf("what it left running: %w", left)
	}
	return ws.ExitStatus(), nil
}

// cut makes text fit into a HookResult.
func cut(s string) string {
	s = guestapi.CleanLine(s)
	if len(s) > guestapi.MaxHookText {
		s = strings.ToValidUTF8(s[:guestapi.MaxHookText], "")
	}
	return s
}
