package link

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"
)

// guestPort is a virtio-serial port as the guest's kernel gives it.
//
// While the driver thinks that no host is connected a read returns 0 at once
// and poll reports a hang-up all the time, so neither can be waited on as they
// are. But the driver wakes the port's wait queue when a host connects or data
// comes, and Go's poller is edge-triggered: after a read of 0 it sleeps until
// then and costs an idle guest nothing.
//
// A read of 0 is no end of a session. The driver learns of hosts by another
// queue than their data, and late: it was seen to tell of the old host's
// disconnect when the new one's session had begun.
type guestPort struct {
	file   *os.File
	raw    syscall.RawConn
	closed atomic.Bool
}

// OpenGuestPort opens the virtio-serial port at path (/dev/vportNpM). The
// kernel lets one process open it at a time.
//
// Read and Write wait while no host is connected and never tell. They may be
// used by one goroutine each; Close and deadlines interrupt them.
func OpenGuestPort(path string) (Port, error) {
	f, err := os.OpenFile(path, os.O_RDWR|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open link port: %w", err)
	}
	// Not every device can be polled; os then falls back to reads that fail
	// with EAGAIN instead of waiting.
	if err := f.SetDeadline(time.Time{}); err != nil {
		f.Close()
		return nil, fmt.Errorf("open link port %s: it cannot be polled: %w", path, err)
	}
	raw, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open link port %s: %w", path, err)
	}
	return &guestPort{file: f, raw: raw}, nil
}

func (p *guestPort) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	var n int
	var fault error
	err := p.raw.Read(func(fd uintptr) bool {
		for {
			n, fault = syscall.Read(int(fd), b)
			if fault != syscall.EINTR {
				break
			}
		}
		return fault != syscall.EAGAIN && n != 0
	})
	if err != nil {
		fault = nil // EAGAIN, from before the interrupt
	}
	return max(n, 0), p.fault("read", err, fault)
}

func (p *guestPort) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) {
		var fault error
		err := p.raw.Write(func(fd uintptr) bool {
			n, e := syscall.Write(int(fd), b[done:])
			switch {
			case e == syscall.EAGAIN: // queue full, or no host
				return false
			case e == syscall.EINTR:
			case e != nil:
				fault = e
			default:
				done += n
			}
			return true
		})
		if err := p.fault("write", err, fault); err != nil {
			return done, err
		}
	}
	return done, nil
}

// fault makes one error of the poller's and the call's own.
func (p *guestPort) fault(op string, poll, call error) error {
	switch {
	case poll != nil && p.closed.Load():
		return os.ErrClosed // the poller's own error is internal to the runtime
	case errors.Is(poll, os.ErrDeadlineExceeded):
		return poll
	case poll != nil:
		return fmt.Errorf("link port %s: %w", op, poll)
	case call == nil:
		return nil
	default:
		return &os.PathError{Op: op, Path: p.file.Name(), Err: call}
	}
}

func (p *guestPort) Close() error {
	p.closed.Store(true)
	return p.file.Close()
}

func (p *guestPort) SetReadDeadline(t time.Time) error  { return p.file.SetReadDeadline(t) }
func (p *guestPort) SetWriteDeadline(t time.Time) error { return p.file.SetWriteDeadline(t) }
