// Package link is the channel between the supervisor on the host and the
// agent in the guest: streams in both directions over one virtio-serial port,
// made so that a guest can be frozen, copied and restored at any instant.
//
// # Words
//
// A port is the pair of byte queues between QEMU's socket on the host and
// /dev/vportNpM in the guest. A session is one conversation over it, from a
// host's Dial to the end; a guest serves any number of them, one at a time. A
// generation is the session's number. A frame is the unit on the port. A
// stream is what callers read and write: a net.Conn.
//
// # Why not simply streams
//
// A guest that is restored does not notice. Its blocked read goes on without
// an end-of-file, in the middle of whatever the host said when the snapshot
// was made, but the host that now listens is another one and has never heard
// of that conversation. In both directions bytes of the old one are still on
// their way, cut off anywhere. So each session begins like this:
//
//   - The host sends as many zeros as its largest frame has, then a hello
//     with a generation that was never used. A guest that waits for the rest
//     of an old frame gets zeros for it, sees by the frame's tail that it was
//     cut off, and drops it whole: no byte that its old host did not send
//     reaches a stream.
//   - The guest ends the old session, whose streams end with ErrReplaced. A
//     frame that it has half written it completes first. Then it answers with
//     the generation.
//   - The host has been dropping everything up to that answer. From there on
//     only frames of this generation may come, without a gap; anything else
//     ends the session.
//
// Headers are checksummed, payloads are not: within a session the port loses
// nothing, and the guest's cycles are dear.
//
// # The life of a byte
//
// From host to guest: Write on a stream waits until the outbox is not full,
// then hands a frame's worth to yamux, which takes from it what the stream's
// window (1 MiB) allows. yamux's header and body become frames of at most
// 16 KiB in the outbox, whose goroutine writes them to the port. In the guest,
// yamux's reader takes 4 KiB at a time from the port until a frame is whole,
// passes it by the guard and puts it into the stream's buffer. Read fetches it
// there and, when half the window has been read, widens the window again.
//
// From guest to host it is the same without an outbox: yamux's header and
// body, joined, go in one frame of at most 32 KiB to the port, in one system
// call.
//
// # The guest is hostile
//
// The host's guard (guard.go) accounts for every stream beneath yamux and ends
// the session with ErrProtocol at the first thing that a correct guest does
// not do. What bounds the host's memory for one session:
//
//	decoder                     64 KiB
//	unread bytes of all streams 16 MiB, then the session stands still until they are read or closed
//	unsent bytes               256 KiB, then writers wait; 16 MiB, then the session ends
//	streams                     256 of each side, 64 not yet accepted
//
// (yamux's buffers may be twice what they hold.) Nothing here waits for a
// guest without a limit that the caller has set: Dial and Open end with their
// context, Read and Write with their deadline, Close at once.
//
// # What it does not do
//
// It does not tell how long a guest may be silent: calls have deadlines, and a
// paused guest is silent without being broken. It does not encrypt or
// authenticate: whoever holds the socket is the host. It does not carry a
// session over a restore: what a stream had in flight is lost, and both ends
// are told. It does not half-close streams.
//
// Nor does it make QEMU's side of a port reconnect: QEMU 7.2 may stop reading
// from the guest for good when its socket breaks in the middle of a write and
// then connects again (virtio-console throttles the port after it has closed
// it). A new host comes with a new QEMU, or takes over the socket unbroken.
package link
