package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// Interrupts is what happens when someone presses Ctrl-C or sends a signal to
// a command that runs a program in a guest.
//
// Until Forward is called the first SIGINT, SIGTERM, SIGQUIT or SIGHUP ends
// the command: its context is cancelled. From then on signals go to the
// program, SIGUSR1 and SIGUSR2 too, and the second SIGINT, SIGTERM or SIGQUIT
// ends the command whatever the program does with the first.
type Interrupts struct {
	signals chan os.Signal
	cancel  context.CancelCauseFunc

	mu       sync.Mutex
	forward  func(syscall.Signal)
	harsh    int
	finished chan struct{}
}

// CatchInterrupts takes over the signals until Stop. The returned context ends
// when the command must; context.Cause then is an *Exit with 128 + the signal.
//
// It also makes a write to a closed pipe an error instead of a silent death,
// so that the VM is cleaned up first.
func CatchInterrupts(ctx context.Context) (context.Context, *Interrupts) {
	ctx, cancel := context.WithCancelCause(ctx)
	i := &Interrupts{
		signals:  make(chan os.Signal, 16),
		cancel:   cancel,
		finished: make(chan struct{}),
	}
	// SIGPIPE is caught, not ignored: an ignored signal would be inherited by
	// the supervisor.
	signal.Notify(i.signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT, syscall.SIGHUP,
		syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGPIPE)
	go i.watch()
	return ctx, i
}

// Forward sends signals to a program from now on; send must not block for
// long. Nil goes back to ending the command.
func (i *Interrupts) Forward(send func(syscall.Signal)) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.forward, i.harsh = send, 0
}

// Stop gives the signals back and ends the context.
func (i *Interrupts) Stop() {
	signal.Stop(i.signals)
	close(i.signals)
	<-i.finished
	i.cancel(context.Canceled)
}

func (i *Interrupts) watch() {
	defer close(i.finished)
	for s := range i.signals {
		if sig, ok := s.(syscall.Signal); ok && sig != syscall.SIGPIPE {
			i.deliver(sig)
		}
	}
}

func (i *Interrupts) deliver(sig syscall.Signal) {
	i.mu.Lock()
	defer i.mu.Unlock()
	user := sig == syscall.SIGUSR1 || sig == syscall.SIGUSR2
	if i.forward == nil {
		if !user {
			i.cancel(&Exit{Code: ExitSignal + int(sig)})
		}
		return
	}
	if !user && sig != syscall.SIGHUP {
		i.harsh++
	}
	if i.harsh > 1 {
		i.cancel(&Exit{ExitSignal + int(sig), fmt.Errorf("interrupted twice; the command was killed")})
		return
	}
	i.forward(sig)
}
