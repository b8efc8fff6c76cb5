// Package tool runs the distribution's programs that build the guest image.
package tool

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"
)

// tailBytes is how much of a program's output is kept for its error.
const tailBytes = 4 << 10

// Runner runs programs with one log and one scratch folder.
//
// It may be used from several goroutines at once.
type Runner struct {
	// Log takes what the programs print; nil throws it away. Writes to it
	// never overlap.
	Log io.Writer
	// Temp is their TMPDIR.
	Temp string
	// Env is laid over the environment that every program gets: the proxies,
	// HOME of this process, its PATH behind the system folders, and the C.UTF-8
	// locale. Nothing else comes through, so that a build depends on as little
	// as possible.
	Env []string

	mu sync.Mutex
}

// Command is one program.
type Command struct {
	Name string
	Args []string
	Dir  string
	// Stdin and Stdout may be nil: empty input, output to the log.
	Stdin  io.Reader
	Stdout io.Writer
}

// packages names the Debian package that has a program.
var packages = map[string]string{
	"mmdebstrap": "mmdebstrap", "sqfstar": "squashfs-tools", "mke2fs": "e2fsprogs", "debugfs": "e2fsprogs",
	"qemu-img": "qemu-utils", "dpkg-deb": "dpkg", "dpkg": "dpkg", "apt-get": "apt", "apt-cache": "apt",
	"apt-config": "apt", "xz": "xz-utils", "zstd": "zstd", "lz4": "lz4",
	"fakechroot": "fakechroot", "fakeroot": "fakeroot",
}

// Run runs a program to its end. When ctx ends first the program and
// everything it started are told to end, and killed 10 seconds later; when
// this process is killed the program is told to end as well.
//
// The error names the program and carries the last lines it printed.
func (r *Runner) Run(ctx context.Context, c Command) error {
	path, err := r.find(c.Name)
	if err != nil {
		return err
	}
	// The death signal comes when the THREAD that started the program ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	cmd := exec.CommandContext(ctx, path, c.Args...)
	cmd.Dir, cmd.Stdin, cmd.Env = c.Dir, c.Stdin, r.environ()
	out := &tail{log: r}
	cmd.Stdout, cmd.Stderr = c.Stdout, out
	if c.Stdout == nil {
		cmd.Stdout = out
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	err = cmd.Run()
	if cmd.Process != nil && ctx.Err() != nil {
		// WaitDelay kills the program alone, not what it started.
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w", c.Name, context.Cause(ctx))
	}
	return fmt.Errorf("%s: %w%s", c.Name, err, out.lines())
}

// Output is Run with the program's standard output as the answer.
func (r *Runner) Output(ctx context.Context, name string, args ...string) (string, error) {
	var out strings.Builder
	err := r.Run(ctx, Command{Name: name, Args: args, Stdout: &out})
	return out.String(), err
}

// Has says whether a program is installed.
func (r *Runner) Has(name string) bool {
	_, err := r.find(name)
	return err == nil
}

// systemPath comes before the user's PATH: the build is made for the
// distribution's programs, some are in sbin, which is not in every user's
// PATH, and a version manager's python3 in front of it costs mmdebstrap, which
// starts one for each package, minutes.
const systemPath = "/usr/sbin:/usr/bin:/sbin:/bin"

// find looks for a program as the programs themselves will.
func (r *Runner) find(name string) (string, error) {
	for _, dir := range strings.Split(systemPath, ":") {
		if path, err := exec.LookPath(dir + "/" + name); err == nil {
			return path, nil
		}
	}
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	err := fmt.Errorf("%s: %w", name, exec.ErrNotFound)
	if p := packages[name]; p != "" {
		err = fmt.Errorf("%w; install it: sudo apt-get install --no-install-recommends %s", err, p)
	}
	return "", err
}

func (r *Runner) environ() []string {
	env := []string{"LC_ALL=C.UTF-8", "PATH=" + systemPath + ":" + os.Getenv("PATH"), "DEBIAN_FRONTEND=noninteractive"}
	for _, k := range []string{"HOME", "USER", "LOGNAME", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"} {
		if v, ok := os.LookupEnv(k); ok {
			env = append(env, k+"="+v)
		}
	}
	if r.Temp != "" {
		env = append(env, "TMPDIR="+r.Temp)
	}
	return append(env, r.Env...)
}

// tail passes output to the log and keeps its end.
type tail struct {
	log  *Runner
	mu   sync.Mutex
	last []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	t.last = append(t.last, p...)
	if n := len(t.last) - tailBytes; n > 0 {
		t.last = append(t.last[:0], t.last[n:]...)
	}
	t.mu.Unlock()
	if t.log.Log == nil {
		return len(p), nil
	}
	t.log.mu.Lock()
	defer t.log.mu.Unlock()
	// A log that cannot be written must not end a build.
	_, _ = t.log.Log.Write(p)
	return len(p), nil
}

// lines are the last lines that say something, fit for a terminal.
func (t *tail) lines() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var kept []string
	for line := range strings.Lines(string(t.last)) {
		line = strings.TrimSpace(strings.Map(func(r rune) rune {
			if unicode.IsPrint(r) {
				return r
			}
			return ' '
		}, line))
		if line != "" {
			kept = append(kept, line)
		}
	}
	if len(kept) == 0 {
		return ""
	}
	return ":\n  " + strings.Join(kept[max(0, len(kept)-6):], "\n  ")
}

// Missing says whether err means that a program is not installed.
func Missing(err error) bool { return errors.Is(err, exec.ErrNotFound) }
