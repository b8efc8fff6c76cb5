package link

import (
	"io"
	"time"
)

// Port is one end of the byte channel between host and guest. On the host it
// is the socket that QEMU inherited, in the guest what OpenGuestPort returns;
// any net.Conn will do for tests.
//
// io.EOF means that the port itself has ended. In the guest, Read and Write
// just wait while no host is connected. Deadlines must interrupt a blocked
// Read or Write, and an interrupted Write must tell how much it wrote: a
// half-written frame is finished before anything else is sent.
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
