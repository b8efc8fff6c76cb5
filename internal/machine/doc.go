// Package machine gives a VM ready for use. What stands above it (commands,
// sandboxes, sessions, tasks) never sees how a VM comes to be.
//
// # The life of a machine
//
// Boot checks its Options, and while it opens the guest image, chooses the
// accelerator and finds the supervisor side by side, makes the VM's folder
// with an empty overlay of the data disk in it. Then it starts a supervisor,
// which owns QEMU from its first moment on, and comes back when the guest has
// its identity and its disk. From there on programs run until Close.
//
// A machine is running or gone. It is gone after Close, when its guest ends
// or fails, and when its supervisor dies; nothing leads back. What a gone
// machine kept on disk is removed by its supervisor or, if that was killed,
// by the next store.Sweep.
//
// # What it does not do
//
// It keeps no machine beyond its owner unless Options.Outlive says so, and it
// keeps no list of machines: package store knows the folders.
package machine
