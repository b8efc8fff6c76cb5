// Package jail runs one program with nothing but what it is given.
//
// QEMU reads what a hostile guest writes. Should the guest take it over, it
// must find itself in an empty room: no file but the VM's own, no network, no
// other process, no capability, and no way to get any of them back.
//
// Start runs this very program a second time (stage 2, in Main) inside new
// mount, pid, net, ipc, uts and cgroup namespaces, and a user namespace when
// the caller is not root. Stage 2 builds a root file system on a tmpfs from
// read-only binds of the system's libraries and of the files named, makes it
// the root, lets go of the old one, becomes an unprivileged user for good and
// turns into the program by exec. The program's pid is the one Start returns.
//
// The program dies with the process that started it: PDEATHSIG, and with it
// everything in its pid namespace. The kernel ties that signal to the parent's
// thread, so Start keeps one thread for each program until it has ended.
//
// There are two ways to become nobody. Root gives up its identity for the User
// in the Command. Anyone else keeps their own user id, which is all that the
// new user namespace knows, and loses everything that the id could reach.
//
// When the kernel or its configuration refuses any part of this, nothing is
// run and the error says what would allow it.
package jail
