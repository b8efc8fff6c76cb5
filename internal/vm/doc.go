// Package vm runs one QEMU: from a Spec to a command line, to a confined
// process, to its end.
//
// The life of a VM:
//
//	Spec.Check   says everything that is wrong, before anything is started
//	Start        jails QEMU (package jail) and returns once its monitor has greeted
//	VM.QMP       the monitor (package qmp)
//	VM.Link      the host's end of the guest's virtio-serial port
//	VM.Exited    closed when QEMU has ended, by whatever cause; Exit says which
//	VM.Stop      ends it, and lets go of what is left; always called in the end
//
// QEMU gets its sockets by inheritance: monitor, link and console are
// socketpairs, so that there are no socket files to protect or to clean up.
//
// Which processor runs the guest is decided by ChooseAccel (package accel).
//
// What the package does not do: it does not know what runs in the guest, asks
// it for nothing (a polite shutdown is the supervisor's to ask for before
// Stop), and removes no files.
package vm
