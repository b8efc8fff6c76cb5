// Package supervisor starts the process round a VM, abox-vmm, and talks with
// it. The process itself is package server below; what the two say to each
// other is package control.
//
// # The life of a VM, seen from here
//
// Start spawns a supervisor and returns when the guest is prepared. The
// client it returns owns the VM: when the process that called Start ends,
// however it ends, the kernel closes a pipe and the supervisor ends the VM and
// removes its folder. With Config.Outlive there is no such pipe: the VM runs
// until it is stopped, and Connect adopts it, from any process of the user.
//
// A VM is gone when its guest powers off, panics or breaks the rules, when it
// is stopped, and when its supervisor dies, for QEMU dies with it. Gone then
// is closed, and every call, also those in flight, returns an error that
// wraps ErrGone and says why.
//
// # Errors of calls
//
// What the guest refuses is a *guestapi.Error with a code. What is wrong with
// the guest or the VM is a *CallError that wraps one of the sentinels of this
// package. Texts from the guest are clean: all errors may go to a terminal.
package supervisor
