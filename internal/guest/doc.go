// Package guest is the agent inside a VM: it answers the calls of
// internal/guestapi on the streams of the link.
//
// The life of one run. The host posts an ExecRequest and asks for an upgrade.
// The agent resolves it (user, environment, folder, program), starts the
// program in a session of its own, answers 101 and from then on sends the
// program's output as frames and feeds it the host's. When the program ends,
// everything it wrote before its end is sent, then the Exit frame; the agent
// does not wait for what the program left running. Whatever still holds the
// program's output is read from and dropped, so that nothing in the guest
// dies of SIGPIPE because the host has gone: a client that leaves in the
// middle changes nothing for the program but that its input ends.
//
// What a run's end means: a program that closes its output early runs on until
// it exits. One that ignores SIGTERM after its timeout is killed two seconds
// later, with everything in its session. One that floods its output waits
// for the host to read; timeouts and signals go on working meanwhile.
//
// A guest that is captured is frozen first: the agent lets no program start and
// has System stop those that run. A copy wakes up in that state, in an agent
// that remembers it, and is renewed before anything in it runs again; the
// story is guestapi's. An agent that was told to renew and could not is broken
// for ever and its programs stay frozen, so that a twin never runs.
//
// The agent is PID 1 and must not die: handlers and goroutines recover, every
// request has limits, and descriptors are budgeted (see budget). Nothing here
// touches the machine as such; that is System, which package boot
// implements, so that all of this is tested on a host as ordinary processes.
package guest
