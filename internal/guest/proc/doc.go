// Package proc starts programs in the guest and learns how they ended.
//
// A Reaper is the one place of the agent that makes and collects children.
// As PID 1 the agent inherits every orphan of the guest; one goroutine
// blocks in wait4 for any child at all, gives the status to whoever started
// the child, and drops what nobody asked for. There is no polling: a program
// that runs for a millisecond is reported after a millisecond.
//
// An Accounts turns what a caller asks for (a name, a program without a
// slash, a few variables) into what the kernel wants: ids, a path, a whole
// environment. It reads the guest's own passwd and group files.
package proc
