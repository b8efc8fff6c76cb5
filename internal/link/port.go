package link

import (
	"io"
	"time"
)

// Port is one end of the byte channel between host and guest. On the host it
// is the socket that QEMU inherited, in the guest what OpenGuestPort returns;
// any net.Conn will do for tests.
//
// A Read that gives (0, nil) or io.EOF in the guest means that no host is
// connected now, not that the port has ended. Deadlines must interrupt a
// blocked Read or Write, and an interrupted Write must tell how much it wrote:
// a half-written frame is finished before anything else is sent.
type Port interface {
	io.ReadWriteCloser
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
}

// past is a deadline that interrupts at once.
var past = time.Unix(1, 0)

// interrupt wakes whoever is blocked on p. It can fail only on a port that is
// closed, where nobody is blocked.
func interrupt(p Port) {
	_ = p.SetReadDeadline(past)
	_ = p.SetWriteDeadline(past)
}

// resume undoes interrupt.
func resume(p Port) {
	_ = p.SetReadDeadline(time.Time{})
	_ = p.SetWriteDeadline(time.Time{})
}
