package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// process is a child that does not outlive the benchmark: it ends when the
// context does, and with this process even if that is killed.
type process struct {
	cmd *exec.Cmd
	// started is the instant before the fork.
	started time.Time
	exited  chan struct{}
	err     error // why it ended; set before exited is closed
	cancel  context.CancelFunc
	stderr  *tail
}

// command says what a process is started with.
type command struct {
	argv []string
	// env is laid over our own environment.
	env []string
	// stdout is the program's standard output; nil is /dev/null, as its
	// standard input always is. files are its descriptors 3, 4, …. All of
	// them stay the caller's.
	stdout *os.File
	files  []*os.File
	// grace is how long a program that has to go gets to tidy up, between
	// SIGTERM and SIGKILL. 0 is SIGKILL at once.
	grace time.Duration
}

// start runs the command. The process ends when ctx does.
func (c command) start(ctx context.Context) (*process, error) {
	ctx, cancel := context.WithCancel(ctx)
	cmd := exec.CommandContext(ctx, c.argv[0], c.argv[1:]...)
	p := &process{cmd: cmd, exited: make(chan struct{}), cancel: cancel, stderr: &tail{max: 4 << 10}}
	if len(c.env) > 0 {
		cmd.Env = append(os.Environ(), c.env...)
	}
	if c.stdout != nil {
		cmd.Stdout = c.stdout
	}
	cmd.Stderr = p.stderr
	cmd.ExtraFiles = c.files
	// Its own process group, so that the terminal's Ctrl-C reaches it through
	// us alone and in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second // for what holds its standard error
	if c.grace > 0 {
		cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
		cmd.WaitDelay = c.grace
	}
	ready := make(chan error)
	go func() {
		// The death signal is sent when the thread that forked ends, not the
		// process: this goroutine keeps it for the child's whole life.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		p.started = time.Now()
		err := cmd.Start()
		ready <- err
		if err == nil {
			p.err = cmd.Wait()
		}
		cancel()
		close(p.exited)
	}()
	if err := <-ready; err != nil {
		return nil, fmt.Errorf("start %s: %w", c.argv[0], err)
	}
	return p, nil
}

// stop ends the process as its command says and waits until it is gone.
func (p *process) stop() {
	p.cancel()
	<-p.exited
}

// wait waits for the process to end by itself and says what went wrong, with
// the end of its standard error.
func (p *process) wait() error {
	<-p.exited
	if p.err == nil {
		return nil
	}
	return p.died()
}

// died explains the end of a process that should have gone on.
func (p *process) died() error {
	<-p.exited
	why := p.err
	if why == nil {
		why = errors.New("exit status 0")
	}
	if text := p.stderr.String(); text != "" {
		return fmt.Errorf("%w: %s", why, text)
	}
	return why
}
