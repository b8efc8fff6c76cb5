package hooks

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// groups is the cgroup that holds a group for each hook.
//
// A group serves one hook: once it has been killed as a group, newer kernels
// kill whatever clone starts into it, for ever after (seen on 6.18: the check
// for a kill in the middle of a fork compares with the starter's group).
type groups struct{ dir int }

const (
	groupsName = "hooks"
	// maxTasks bounds what a hook starts: one that forks without end must not
	// take the threads that the agent needs to stop it.
	maxTasks = 512
)

// openGroups opens the groups' place below parent, and makes it if it is not
// there. A kernel that does not count processes leaves them without a limit.
func openGroups(parent int) (*groups, error) {
	if err := unix.Mkdirat(parent, groupsName, 0o755); err != nil && err != unix.EEXIST {
		return nil, fmt.Errorf("make cgroup %s: %w", groupsName, err)
	}
	dir, err := openDir(parent, groupsName)
	if err != nil {
		return nil, err
	}
	if err := write(dir, "pids.max", strconv.Itoa(maxTasks)); err != nil && !errors.Is(err, os.ErrNotExist) {
		unix.Close(dir)
		return nil, err
	}
	return &groups{dir: dir}, nil
}

func (gs *groups) close() { unix.Close(gs.dir) }

// group is where one hook runs.
type group struct {
	parent *groups
	name   string
	dir    int
}

// maxNumber bounds the search for a name: those that are taken were left by
// hooks that made groups of their own in theirs.
const maxNumber = 10_000

// add makes a group that was never used.
func (gs *groups) add() (*group, error) {
	for n := range maxNumber {
		name := strconv.Itoa(n)
		err := unix.Mkdirat(gs.dir, name, 0o755)
		if err == unix.EEXIST {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("make cgroup %s/%s: %w", groupsName, name, err)
		}
		dir, err := openDir(gs.dir, name)
		if err != nil {
			return nil, err
		}
		return &group{parent: gs, name: name, dir: dir}, nil
	}
	return nil, fmt.Errorf("%d cgroups are left in %s", maxNumber, groupsName)
}

// end kills every process in the group and removes it. The error says what is
// still there after the given time.
func (g *group) end(within time.Duration) error {
	defer unix.Close(g.dir)
	if g.remove() { // most hooks leave nothing
		return nil
	}
	if err := write(g.dir, "cgroup.kill", "1"); err != nil {
		return err
	}
	end := time.Now().Add(within)
	for wait := 100 * time.Microsecond; ; wait = min(2*wait, 10*time.Millisecond) {
		// What is empty can be removed, unless the hook made groups in it.
		if g.empty() {
			g.remove()
			return nil
		}
		if time.Now().After(end) {
			return errors.New("it has been killed and has not ended: it waits in the kernel")
		}
		time.Sleep(wait)
	}
}

func (g *group) remove() bool {
	return unix.Unlinkat(g.parent.dir, g.name, unix.AT_REMOVEDIR) == nil
}

func (g *group) empty() bool {
	fd, err := unix.Openat(g.dir, "cgroup.events", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	var buf [256]byte // two short lines
	n, err := unix.Read(fd, buf[:])
	return err == nil && bytes.Contains(buf[:n], []byte("populated 0\n"))
}

func openDir(parent int, name string) (int, error) {
	fd, err := unix.Openat(parent, name, unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open cgroup %s: %w", name, err)
	}
	return fd, nil
}

func write(dir int, name, text string) error {
	fd, err := unix.Openat(dir, name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte(text)); err != nil {
		return &os.PathError{Op: "write", Path: name, Err: err}
	}
	return nil
}
