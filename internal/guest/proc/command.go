package proc

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/warren-vm/warren/internal/guestapi"
)

// DefaultPath is PATH for every user.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Command is a program ready to be started.
type Command struct {
	Path string // of the program's file
	Argv []string
	Env  []string
	Dir  string
	User User
}

// Resolve turns a request into a Command: user, environment, working folder
// and program, in this order. Errors are *guestapi.Error.
func (a *Accounts) Resolve(req *guestapi.ExecRequest) (*Command, error) {
	if len(req.Argv) == 0 || req.Argv[0] == "" {
		return nil, refuse(guestapi.CodeBadRequest, "no program given")
	}
	for _, s := range [][]string{req.Argv, req.Env, {req.Dir}} {
		if i := slices.IndexFunc(s, hasNUL); i >= 0 {
			return nil, refuse(guestapi.CodeBadRequest, "%q holds a zero byte", s[i])
		}
	}
	user, err := a.Lookup(req.User)
	if err != nil {
		return nil, err
	}
	env, path, err := environment(user, req)
	if err != nil {
		return nil, err
	}
	dir, err := workingDir(user, req.Dir)
	if err != nil {
		return nil, err
	}
	file, err := lookPath(req.Argv[0], path, dir, user)
	if err != nil {
		return nil, err
	}
	return &Command{Path: file, Argv: req.Argv, Env: env, Dir: dir, User: user}, nil
}

func hasNUL(s string) bool { return strings.IndexByte(s, 0) >= 0 }

// environment lays req.Env over the user's defaults; of two values for one
// name the later counts. It also returns the value of PATH.
func environment(user User, req *guestapi.ExecRequest) (env []string, path string, err error) {
	env = make([]string, 0, 6+len(req.Env))
	env = append(env, "PATH="+DefaultPath, "HOME="+user.Home, "USER="+user.Name, "LANG=C.UTF-8")
	if req.TTY {
		env = append(env, "TERM=xterm-256color")
	}
	defaults := len(env)
	path = DefaultPath
	// Looking every name up in a map pays only when there are many.
	var seen map[string]int
	if len(req.Env) > 32 {
		seen = make(map[string]int, len(req.Env))
	}
	for _, kv := range req.Env {
		name, value, ok := strings.Cut(kv, "=")
		if !ok || name == "" {
			return nil, "", refuse(guestapi.CodeBadRequest, "variable %q is not NAME=VALUE", kv)
		}
		if name == "PATH" {
			path = value
		}
		at := -1
		if seen == nil {
			at = indexName(env, name)
		} else if i, ok := seen[name]; ok {
			at = i
		} else {
			at = indexName(env[:defaults], name)
		}
		if at < 0 {
			at = len(env)
			env = append(env, "")
		}
		env[at] = kv
		if seen != nil {
			seen[name] = at
		}
	}
	return env, path, nil
}

func indexName(env []string, name string) int {
	return slices.IndexFunc(env, func(kv string) bool {
		return len(kv) > len(name) && kv[len(name)] == '=' && kv[:len(name)] == name
	})
}

// workingDir is dir, or the user's home, or "/" when the user has none that
// exists: a program without a home can still run, one that was sent to a
// certain folder must not run elsewhere.
func workingDir(user User, dir string) (string, error) {
	if dir == "" {
		if st, ok := isDir(user.Home); !ok || !allowed(user, st) {
			return "/", nil
		}
		return user.Home, nil
	}
	if !filepath.IsAbs(dir) {
		return "", refuse(guestapi.CodeBadRequest, "working folder %q is not an absolute path", dir)
	}
	st, ok := isDir(dir)
	if !ok {
		return "", refuse(guestapi.CodeNotFound, "working folder %s: no such folder in the guest", dir)
	}
	if !allowed(user, st) {
		return "", refuse(guestapi.CodeNotExecutable, "working folder %s: user %s may not enter it", dir, user.Name)
	}
	return dir, nil
}

func isDir(path string) (*syscall.Stat_t, bool) {
	var st syscall.Stat_t
	err := syscall.Stat(path, &st)
	return &st, err == nil && st.Mode&syscall.S_IFMT == syscall.S_IFDIR
}

// lookPath finds the program as execvp does: a name with a slash is a path
// (seen from dir), any other is looked for in each folder of path.
func lookPath(name, path, dir string, user User) (string, error) {
	if strings.Contains(name, "/") {
		file := name
		if !filepath.IsAbs(file) {
			file = filepath.Join(dir, file)
		}
		switch err := runnable(file, user); {
		case err == nil:
			return file, nil
		case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ENOTDIR):
			return "", refuse(guestapi.CodeNotFound, "cannot run %s: no such program in the guest", name)
		default:
			return "", refuse(guestapi.CodeNotExecutable, "cannot run %s as %s: %v", name, user.Name, err)
		}
	}
	var found error
	for folder := range strings.SplitSeq(path, ":") {
		if !filepath.IsAbs(folder) {
			folder = filepath.Join(dir, folder)
		}
		file := folder + "/" + name
		err := runnable(file, user)
		if err == nil {
			return file, nil
		}
		if !errors.Is(err, syscall.ENOENT) && !errors.Is(err, syscall.ENOTDIR) && found == nil {
			found = refuse(guestapi.CodeNotExecutable, "cannot run %s as %s: %v", file, user.Name, err)
		}
	}
	if found != nil {
		return "", found
	}
	return "", refuse(guestapi.CodeNotFound, "cannot run %q: no such program in the guest's PATH (%s)", name, path)
}

// runnable is nil if file is there and the user may execute it as far as the
// file's own mode says. The folders above it are the kernel's to check.
func runnable(file string, user User) error {
	var st syscall.Stat_t
	if err := syscall.Stat(file, &st); err != nil {
		return err
	}
	switch {
	case st.Mode&syscall.S_IFMT == syscall.S_IFDIR:
		return syscall.EISDIR
	case st.Mode&syscall.S_IFMT != syscall.S_IFREG, st.Mode&0o111 == 0, !allowed(user, &st):
		return syscall.EACCES
	}
	return nil
}

// allowed tells whether the user has the execute bit of st.
func allowed(user User, st *syscall.Stat_t) bool {
	switch {
	case user.UID == 0:
		return true
	case user.UID == st.Uid:
		return st.Mode&0o100 != 0
	case user.GID == st.Gid || slices.Contains(user.Groups, st.Gid):
		return st.Mode&0o010 != 0
	default:
		return st.Mode&0o001 != 0
	}
}

// Attr is what Start needs for c, in a session of its own. With tty the
// first of files becomes the session's terminal.
func (c *Command) Attr(files []uintptr, tty bool) *syscall.ProcAttr {
	sys := &syscall.SysProcAttr{Setsid: true, Setctty: tty}
	// Root stays what the agent is; setting it again would cost three calls,
	// and fail where the agent is tested by an ordinary user.
	if c.User.UID != 0 || c.User.GID != 0 || len(c.User.Groups) != 0 {
		sys.Credential = &syscall.Credential{Uid: c.User.UID, Gid: c.User.GID, Groups: c.User.Groups}
	}
	return &syscall.ProcAttr{Dir: c.Dir, Env: c.Env, Files: files, Sys: sys}
}

// Explain words the error of Start for the one who asked for c.
func (c *Command) Explain(err error) error {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return err
	}
	switch errno {
	case syscall.ENOENT:
		// The file was there: the kernel misses what it names.
		return refuse(guestapi.CodeNotExecutable, "cannot run %s: its interpreter or loader is not in the guest", c.Path)
	case syscall.ENOEXEC:
		return refuse(guestapi.CodeNotExecutable, "cannot run %s: not a program for this machine (a script needs a #! line)", c.Path)
	case syscall.EACCES, syscall.EPERM:
		return refuse(guestapi.CodeNotExecutable, "cannot run %s in %s as %s: %v", c.Path, c.Dir, c.User.Name, errno)
	case syscall.E2BIG:
		return refuse(guestapi.CodeBadRequest, "cannot run %s: arguments and environment are too long together", c.Path)
	case syscall.EAGAIN:
		return refuse(guestapi.CodeTooMany, "cannot run %s: the guest has as many processes as it can; stop some", c.Path)
	case syscall.ENOMEM:
		return refuse(guestapi.CodeInternal, "cannot run %s: the guest has no memory left", c.Path)
	default:
		return refuse(guestapi.CodeNotExecutable, "cannot run %s: %v", c.Path, errno)
	}
}

func refuse(code guestapi.Code, format string, args ...any) error {
	return &guestapi.Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// DevNull opens the empty input and the bottomless output of programs that
// have no other, for as long as this process lives.
func DevNull() (fd int, err error) {
	fd, err = syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return 0, &os.PathError{Op: "open", Path: "/dev/null", Err: err}
	}
	return fd, nil
}
