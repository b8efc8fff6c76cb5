package jail

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// becomeNobody gives up every right that is left, in an order in which each
// step still has what it needs. It returns the step that went wrong.
func (c Command) becomeNobody() (step string, err error) {
	if step, err := c.Limits.set(); err != nil {
		return step, err
	}
	// The bounding set first: it needs CAP_SETPCAP.
	for capability := uintptr(0); ; capability++ {
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, capability, 0, 0, 0); err != nil {
			if err == unix.EINVAL && capability > unix.CAP_AUDIT_READ {
				break // past the last one this kernel knows
			}
			return "drop capabilities", err
		}
	}
	if c.User != nil {
		if err := c.User.become(); err != nil {
			return "become the VM user", err
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return "drop ambient capabilities", err
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if err := unix.Capset(&header, &none[0]); err != nil {
		return "drop capabilities", err
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return "set no_new_privs", err
	}
	// Changing the user has cleared it.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return "set the death signal", err
	}
	unix.Umask(0o077)
	return "", nil
}

// become changes this thread, and this thread alone, which is the one that
// will exec: the runtime's way of doing it stops all threads for nothing.
func (u User) become() error {
	groups := make([]uint32, len(u.Groups), len(u.Groups)+1)
	for i, g := range u.Groups {
		groups[i] = uint32(g)
	}
	n := uintptr(len(groups))
	groups = append(groups, 0) // so that there is an address
	// unsafe: the kernel takes the list by address.
	_, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, n, uintptr(unsafe.Pointer(&groups[0])), 0)
	runtime.KeepAlive(groups)
	if errno != 0 {
		return errno
	}
	gid, uid := uintptr(u.GID), uintptr(u.UID)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, gid, gid, gid); errno != 0 {
		return errno
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid); errno != 0 {
		return errno
	}
	return nil
}

func (l Limits) set() (step string, err error) {
	for _, r := range []struct {
		step     string
		resource int
		limit    uint64
		always   bool
	}{
		{"limit core dumps", unix.RLIMIT_CORE, 0, true},
		{"limit message queues", unix.RLIMIT_MSGQUEUE, 0, true},
		{"limit locked memory", unix.RLIMIT_MEMLOCK, 0, true},
		{"limit file sizes", unix.RLIMIT_FSIZE, l.FileSize, false},
		{"limit open files", unix.RLIMIT_NOFILE, l.OpenFiles, false},
	} {
		if !r.always && r.limit == 0 {
			continue
		}
		limit := r.limit
		// Who is not root cannot go over the limit they have.
		var has unix.Rlimit
		if err := unix.Getrlimit(r.resource, &has); err != nil {
			return r.step, err
		}
		limit = min(limit, has.Max)
		if err := unix.Setrlimit(r.resource, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
			return r.step, err
		}
	}
	return "", nil
}
