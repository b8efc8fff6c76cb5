package vm

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/warren-vm/warren/internal/vm/qmp"
)

// watch waits for QEMU's end and writes down how it was. It ends QEMU when
// that has broken off its monitor, or says there what no QEMU says: nobody
// could manage it any more. It also ends a VM for whose writes the host has no
// room: the guest would lose what it wrote, and nobody would tell its user.
func (v *VM) watch() {
	e := ending{}
	kill := func(why Reason) {
		if !v.stopping.Load() {
			e.killedFor = why
		}
		v.process.Signal(syscall.SIGKILL)
		<-v.process.Done()
	}
	full := make(chan struct{})
	go func() {
		for event := range v.diskErrors.Events() {
			if isDiskFull(event) {
				close(full)
				return
			}
		}
	}()
	select {
	case <-v.process.Done():
	case <-full:
		kill(DiskFull)
	case <-v.qmp.Done():
		if !errors.Is(v.qmp.Err(), qmp.ErrGone) || !v.processEnds(monitorGrace) {
			kill(MonitorLost)
		}
	}
	// What QEMU said last is still in the sockets, which end with it.
	timer := time.NewTimer(drainDeadline)
	select {
	case <-v.qmp.Done():
	case <-timer.C:
	}
	timer.Stop()
	v.qmp.Close()
	v.release()
	for event := range v.events.Events() {
		e.events = append(e.events, event)
	}
	e.state, e.stderr, e.stopping = v.process.State(), v.errText.bytes(), v.stopping.Load()
	v.exit = e.info()
	close(v.exited)
}

// Stop ends QEMU and lets go of everything: it asks by the monitor, then
// terminates, then kills, each with a deadline; when ctx ends it kills at
// once. It may be called at any time, any number of times and by several at
// once; all return when no process is left.
//
// The only error is a process that even SIGKILL does not end, because the
// kernel does not let go of it.
func (v *VM) Stop(ctx context.Context) error {
	v.stopping.CompareAndSwap(false, !v.hasExited())
	defer v.link.Close()
	defer v.detach()
	v.quit(ctx)
	if v.gone(ctx, quitDeadline) {
		return nil
	}
	v.process.Signal(syscall.SIGTERM)
	if v.gone(ctx, termDeadline) {
		return nil
	}
	v.process.Signal(syscall.SIGKILL)
	if v.gone(context.WithoutCancel(ctx), killDeadline) {
		return nil
	}
	return fmt.Errorf("stop the VM: process %d does not end, not even when killed", v.PID())
}

func (v *VM) hasExited() bool {
	select {
	case <-v.exited:
		return true
	default:
		return false
	}
}

// quit asks QEMU to end. An error means that the next step is needed, or that
// it ended before it could answer; either way gone finds out.
func (v *VM) quit(ctx context.Context) {
	if v.hasExited() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, quitDeadline)
	defer cancel()
	err := v.qmp.Do(ctx, "quit", nil, nil)
	var refused *qmp.Error
	if errors.As(err, &refused) || errors.Is(err, context.DeadlineExceeded) {
		v.process.Signal(syscall.SIGTERM)
	}
}

// gone waits for the end until the time or ctx is over.
func (v *VM) gone(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-v.exited:
		return true
	default:
	}
	select {
	case <-v.exited:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// detach lets go of the RAM of a VM that has ended.
func (v *VM) detach() {
	v.capture.Lock()
	defer v.capture.Unlock()
	if v.ram != nil {
		v.memory.Release()
		if v.state != nil {
			v.state.file.Close()
			v.state = nil
		}
		v.ram.Close()
		v.ram, v.memory = nil, nil
	}
}
