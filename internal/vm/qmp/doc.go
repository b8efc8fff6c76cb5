// Package qmp speaks QEMU's machine protocol: JSON lines over a socket.
//
// The peer is not trusted. A guest that has broken out of its VM is QEMU, so
// every line is bounded before it is kept, events wait in bounded queues,
// answers nobody asked for are dropped, and texts are cleaned before they
// reach an error. What is wrong beyond doubt ends the connection; a QEMU that
// can no longer be managed is then stopped by the package above.
//
// The life of a connection: New takes over the socket, waits for the greeting
// and leaves capability negotiation; Do and DoWithFiles run commands from any
// goroutine; Subscribe follows events; Close, or the end of QEMU, ends it, and
// everything that waits is told so.
package qmp
