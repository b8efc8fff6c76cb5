package supervisor

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// Options are what Start needs.
type Options struct {
	// VMM is the path of the supervisor's program; see FindVMM.
	VMM string
	// Dir is the VM's folder, which the caller holds. The supervisor inherits
	// the lock; the caller closes Dir after Start returned, or removes it
	// when Start failed.
	Dir    *store.VMDir
	Config Config
	// Stderr, if set, takes the supervisor's log in place of a file in the
	// VM's folder. A VM that may outlive this process logs to the file.
	Stderr io.Writer
	// Phase, if set, is told of each phase of the start when it has ended,
	// from the goroutine that called Start.
	Phase func(Phase)
}

// Files that a supervisor inherits beside the standard ones.
const (
	OwnerFD = 3 // a pipe that ends with the starter; closed for a VM that may outlive it
	LockFD  = 4 // the lock of the VM's folder
)

// endWait is how long a supervisor may take to end by itself before it is
// killed, which is its own limit and a little.
const endWait = time.Minute

// Start starts a VM and returns when its guest is prepared. When it returns
// an error, no process of the VM is left, and its text says what the guest's
// console showed last if that may be of help.
func Start(ctx context.Context, o Options) (*Client, error) {
	if err := o.Config.Check(); err != nil {
		return nil, fmt.Errorf("check the VM's config: %w", err)
	}
	c, events, err := spawn(o)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", o.VMM, err)
	}
	defer events.Close()
	stop := context.AfterFunc(ctx, func() {
		// It ends the VM and itself, and with that the events.
		c.child.cmd.Process.Signal(syscall.SIGTERM)
		time.AfterFunc(endWait, func() { c.child.kill() })
	})
	err = follow(events, o.Phase)
	stop()
	if err == nil && ctx.Err() == nil {
		var adopted *Client
		if adopted, err = Connect(ctx, o.Dir.Path); err == nil {
			c.http, c.watch = adopted.http, adopted.watch
			return c, nil
		}
	}
	return nil, errors.Join(c.startError(ctx, o, err), c.abort())
}

// child is a supervisor that this process started.
type child struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it was waited for
	err  error         // what Wait said
}

func (c *child) kill() { c.cmd.Process.Kill() }

// end waits for the process and kills it when it does not end in time.
func (c *child) end(ctx context.Context) error {
	timer := time.NewTimer(endWait)
	defer timer.Stop()
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
	case <-timer.C:
	}
	c.kill() // QEMU dies with it
	select {
	case <-c.done:
		return nil
	case <-time.After(10 * time.Second):
		return fmt.Errorf("supervisor %d was killed and does not end", c.cmd.Process.Pid)
	}
}

// spawn starts the supervisor's process. The client it returns has no
// connection yet.
func spawn(o Options) (_ *Client, events *os.File, err error) {
	c := &Client{dir: o.Dir.Path}
	var theirs []*os.File // closed here once the child has them
	defer func() {
		for _, f := range theirs {
			f.Close()
		}
		if err != nil {
			events.Close() // nil is fine
			c.owner.Close()
		}
	}()
	events, eventsW, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	theirs = append(theirs, eventsW)
	var ownerR *os.File // stays nil, which closes OwnerFD in the child
	if !o.Config.Outlive {
		if ownerR, c.owner, err = os.Pipe(); err != nil {
			return nil, nil, err
		}
		theirs = append(theirs, ownerR)
	}
	cmd, err := command(o)
	if err != nil {
		return nil, nil, err
	}
	cmd.Stdout = eventsW
	cmd.ExtraFiles = []*os.File{ownerR, o.Dir.LockFile()}
	if o.Stderr == nil || o.Config.Outlive {
		log, err := os.OpenFile(o.Dir.Log(), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
		if err != nil {
			return nil, nil, store.WithRemedy(err)
		}
		theirs = append(theirs, log)
		cmd.Stderr = log
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	c.child = &child{cmd: cmd, done: make(chan struct{})}
	go func() {
		c.child.err = cmd.Wait()
		close(c.child.done)
	}()
	return c, events, nil
}

// command is the supervisor's, but for the files it inherits.
func command(o Options) (*exec.Cmd, error) {
	o.Config.SpawnedUnixNano = time.Now().UnixNano()
	config, err := json.Marshal(o.Config)
	if err != nil {
		return nil, err
	}
	return &exec.Cmd{
		Path:      o.VMM,
		Args:      []string{Name},
		Dir:       "/",
		Env:       environment(),
		Stdin:     bytes.NewReader(config),
		Stderr:    o.Stderr,
		WaitDelay: 5 * time.Second,
		// Its own session: a terminal's ^C is for its owner to deal with.
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}, nil
}

// environment is what a supervisor needs of ours. Everything else, keys and
// tokens above all, stays away from a process that deals with a guest.
func environment() []string {
	var env []string
	for _, name := range []string{"PATH", "HOME", "TMPDIR", "LANG", "GOCOVERDIR"} {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// errDied is a supervisor that ended without a word.
var errDied = errors.New("the supervisor died")

// follow reads the events of a start to Ready, or returns why it failed.
func follow(events io.Reader, phase func(Phase)) error {
	lines := bufio.NewScanner(events)
	lines.Buffer(nil, control.MaxFault)
	for lines.Scan() {
		e, err := guestapi.Decode[control.Event](bytes.NewReader(lines.Bytes()), control.MaxFault)
		switch {
		case err != nil:
			return fmt.Errorf("the supervisor reports what cannot be read: %w", err)
		case e.Fault != nil:
			return fromFault(e.Fault)
		case e.Ready:
			return nil
		case e.Phase != nil && phase != nil:
			phase(*e.Phase)
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("the supervisor reports what cannot be read: %w", err)
	}
	return errDied
}

// startError says why a start failed: the caller's own reason first, then the
// supervisor's.
func (c *Client) startError(ctx context.Context, o Options, err error) error {
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("start the VM: %w", context.Cause(ctx))
	case err != errDied:
		return err
	}
	select {
	case <-c.child.done:
	case <-time.After(5 * time.Second):
	}
	log := lastLines(filepath.Join(o.Dir.Path, store.LogName))
	return fmt.Errorf("%w while it started the VM: %v%s", errDied, c.child.how(), log)
}

// how the process ended, in words.
func (c *child) how() string {
	select {
	case <-c.done:
	default:
		return "it closed its output"
	}
	if c.err != nil {
		return c.err.Error()
	}
	return "it ended without an error; `kosa8 doctor` tells whether it is the right program"
}

// abort ends a supervisor whose VM is of no use.
func (c *Client) abort() error {
	if c.owner != nil {
		c.owner.Close()
	} else {
		c.child.cmd.Process.Signal(syscall.SIGTERM)
	}
	return c.child.end(context.Background())
}

// lastLines are the last lines of a supervisor's log, for an error.
func lastLines(path string) string {
	const most = 2 << 10
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if size, err := f.Seek(0, io.SeekEnd); err == nil && size > most {
		f.Seek(size-most, io.SeekStart)
	} else {
		f.Seek(0, io.SeekStart)
	}
	data, err := io.ReadAll(io.LimitReader(f, most))
	text := strings.TrimSpace(guestapi.CleanText(string(data)))
	if err != nil || text == "" {
		return ""
	}
	return "\nthe last lines of its log:\n  " + strings.ReplaceAll(text, "\n", "\n  ")
}
