// Command abox-vmm runs one VM and is the only program that deals with the
// guest in it. It is started by Warren's other programs, which write a config
// to its standard input; nobody starts it by hand.
//
// Inherited files: 3 is a pipe that ends with the starter (not for a VM that
// may outlive it), 4 the held lock of the VM's folder. Standard output takes
// the events of the start. See package supervisor.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/supervisor/server"
	"github.com/warren-vm/warren/internal/vm"
)

const usage = `abox-vmm runs one VM. It is started by Warren's other programs, with the VM's
config on standard input; there is nothing to run it by hand for.

  --help      show this
  --version   show the version
`

// memoryLimit is what the garbage collector works towards; the bounds of
// package server keep what must be in memory below it.
const memoryLimit = 48 << 20

func main() {
	vm.JailMain() // does not return in the process that becomes QEMU
	switch code, done := flags(os.Args[1:]); {
	case done:
		os.Exit(code)
	}
	if err := run(); err != nil {
		fmt.Fprintf(os.Stderr, "abox-vmm: %v\n", err)
		os.Exit(1)
	}
}

func flags(args []string) (code int, done bool) {
	switch {
	case len(args) == 0:
		return 0, false
	case len(args) == 1 && (args[0] == "--help" || args[0] == "-h"):
		fmt.Print(usage)
		return 0, true
	case len(args) == 1 && args[0] == "--version":
		fmt.Println("abox-vmm", version())
		return 0, true
	}
	fmt.Fprintf(os.Stderr, "abox-vmm: takes no arguments, got %q; see abox-vmm --help\n", args)
	return 2, true
}

func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(unknown)"
}

func run() error {
	debug.SetMemoryLimit(memoryLimit)
	unix.Umask(0o077)
	// A core file would hold what passed through here.
	unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{})
	if info, err := os.Stdin.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
		return errors.New("standard input is no config; this program is started by Warren's others, see abox-vmm --help")
	}
	config, err := supervisor.ReadConfig(os.Stdin)
	if err != nil {
		return err
	}
	dir, err := adopt(config)
	if err != nil {
		return err
	}
	o := server.Options{
		Config: config,
		Dir:    dir,
		Events: os.Stdout,
		Log:    slog.New(slog.NewTextHandler(&capped{w: os.Stderr, left: maxLog}, nil)),
		GiveUp: func() { os.Exit(1) }, // the kernel ends QEMU, a sweep the rest
	}
	// net/http tells the standard logger of guests that misbehave.
	log.SetOutput(io.Discard)
	if !config.Outlive {
		if o.Owner, err = owner(); err != nil {
			return errors.Join(err, dir.Remove())
		}
	}
	// The terminal that started it is none of its business. A write to a
	// starter that is gone must be an error and not the end.
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return server.Run(ctx, o)
}

// adopt takes over the VM's folder with its inherited lock.
func adopt(c supervisor.Config) (*store.VMDir, error) {
	unix.CloseOnExec(supervisor.LockFD)
	return store.AdoptVM(c.Dir, os.NewFile(supervisor.LockFD, "lock"))
}

// owner is the pipe that ends with the process that started this one.
func owner() (*os.File, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(supervisor.OwnerFD, &stat); err != nil || stat.Mode&unix.S_IFMT != unix.S_IFIFO {
		return nil, fmt.Errorf("file %d is no pipe; a VM that may not outlive its starter needs one", supervisor.OwnerFD)
	}
	unix.CloseOnExec(supervisor.OwnerFD)
	// Non-blocking, so that closing it ends a read.
	if err := unix.SetNonblock(supervisor.OwnerFD, true); err != nil {
		return nil, err
	}
	return os.NewFile(supervisor.OwnerFD, "owner"), nil
}

// maxLog bounds the log: a supervisor says a dozen lines in its life, so only
// one that goes wrong gets there.
const maxLog = 256 << 10

// capped drops what comes after its first bytes.
type capped struct {
	w    io.Writer
	left int
}

// Write is called with slog's lock held.
func (c *capped) Write(p []byte) (int, error) {
	if len(p) > c.left {
		c.left = 0
		return len(p), nil
	}
	c.left -= len(p)
	return c.w.Write(p)
}
