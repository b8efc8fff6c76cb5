// Package server is the supervisor: it owns one VM, speaks with the agent in
// it, and offers what the agent can do on a control socket. It is the only
// code that handles bytes from a guest; what it hands on are the types of
// guestapi, decoded and written anew.
//
// # The life of a VM
//
// Run takes the VM's folder, whose lock came from the starter, listens on the
// control socket, starts QEMU and, in the order of the phases of package
// control, waits for the agent, asks who it is and gives it its identity.
// From then on calls are relayed until one of these comes first:
//
//   - QEMU ends (powered off, panicked, killed);
//   - the link breaks, because the guest does not keep its rules;
//   - somebody asks for a stop, or Run's context ends;
//   - the process that started the VM ends, unless the VM may outlive it.
//
// Then every call in flight ends with the reason, the folder is removed, and
// those who wait for the end are told it last. If that takes too long the
// process gives up and exits: the kernel then ends QEMU, and the next sweep
// removes the folder.
//
// # Bounds
//
// A guest can make the supervisor hold at most: the windows of its streams
// (package link), one frame for each exec, one small document for each call
// and one large one in all. It cannot make anyone wait longer than the
// deadlines in guestapi, but for an exec, which takes as long as it takes.
package server
