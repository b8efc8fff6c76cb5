package server

import (
	"context"
	"io"
	"net"

	"github.com/warren-vm/warren/internal/link"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/vm"
)

// Machine is a running VM as the server sees it; tests put another one in
// its place.
type Machine interface {
	// Link is the host end of the guest's link port.
	Link() net.Conn
	PID() int
	// Exited is closed when the VM is gone; Reason then says why, in words
	// that follow "the VM ended: ".
	Exited() <-chan struct{}
	Reason() string
	// Stop ends the VM without asking the guest. When it returns nil, or its
	// context ends, nothing of the VM runs any more.
	Stop(ctx context.Context) error
}

// Launcher starts a VM whose serial console goes to console. The context
// bounds the start alone.
type Launcher func(ctx context.Context, c supervisor.Config, console io.Writer) (Machine, error)

// Link is a session with the guest's agent.
type Link interface {
	Open(ctx context.Context) (net.Conn, error)
	Done() <-chan struct{}
	Err() error
	Close() error
}

// Dialer opens a Link on a port and waits for the guest until ctx ends.
type Dialer func(ctx context.Context, port net.Conn) (Link, error)

// launch starts a real VM.
func launch(ctx context.Context, c supervisor.Config, console io.Writer) (Machine, error) {
	v, err := vm.Start(ctx, c.VM, vm.Options{Console: console})
	if err != nil {
		return nil, err
	}
	return qemu{v}, nil
}

type qemu struct{ *vm.VM }

func (q qemu) Reason() string { return q.Exit().String() }

// Version is QEMU's, with the distribution's addition.
func (q qemu) Version() string { return q.QMP().Version().Full() }

// dial opens a real link.
func dial(ctx context.Context, port net.Conn) (Link, error) {
	s, err := link.Dial(ctx, port)
	if err != nil {
		return nil, err
	}
	return s, nil
}
