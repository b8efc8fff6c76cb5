package guestapi

// A guest that is captured.
//
// A host may restore what it captured many times, and no two copies may be
// twins: with the same random numbers to come they would make the same keys.
// So no program may run between the moment of the capture and a copy's Renew:
//
//	Freeze ─► (VM stopped, captured, runs on) ─► Thaw           the original
//	                       └► (restored) ─► Renew               every copy
//
// Freeze and Thaw may be repeated. While a guest is frozen, calls that start
// programs (Exec, SpawnTime) are refused with CodeConflict; calls on files,
// Signal and Resize go on, and a frozen program can still be killed. Nothing
// but Thaw, Renew and Shutdown ends the frozen state, however long it lasts
// and whatever becomes of the link; Shutdown kills the programs where they
// stand.
//
// The agent cannot know whether it is the original or a copy. That a copy is
// renewed and never merely thawed is the host's part.
//
// Runs that were going on belong to a copy too, with their ids. Its programs
// find their input at its end, because the session that fed them is over, and
// what they write from then on is read and dropped.

// FreezeInfo is the answer to Freeze, which is an error only if the kernel did
// not take the order; the programs then run as before.
type FreezeInfo struct {
	// Frozen is true when every program has stopped. It is false when some
	// had not within 250 ms: they are in an uninterruptible wait in the kernel,
	// most likely for a disk. The order stands for them all the same: they stop
	// before they are back in their own code, here and in every copy.
	Frozen bool `json:"frozen"`
	// SettledUS is how long the agent waited for that, in microseconds.
	SettledUS int64 `json:"settled_us"`
}

// ThawRequest lets the programs run on. A guest that is not frozen gets its
// clock set and is otherwise left as it is. After an error the programs are
// still frozen, and Thaw may be tried again.
type ThawRequest struct {
	// UnixNano is the host's wall clock, set before anything runs: the VM's
	// own stood still. 0 leaves the guest's clock alone.
	UnixNano int64 `json:"unix_nano,omitempty"`
}

// RenewRequest is the identity of a copy. Everything in it is new: another
// machine id and generation than any guest had, and entropy never used before.
type RenewRequest = Identity

// RenewInfo is the answer to Renew, which in this order reseeds the kernel's
// generator, sets the clock, changes hostname, machine id and generation, runs
// the hooks and thaws the programs.
//
// A guest that is not frozen refuses with CodeConflict and is left as it was.
// After any other failure but a malformed request the guest is frozen and
// refuses everything with CodeNotPrepared, for ever: stop it and restore
// another. A hook that fails is no such failure; it is reported here.
type RenewInfo struct {
	// PhasesUS says what Renew spent its time on, in microseconds.
	PhasesUS map[string]int64 `json:"phases_us"`
	// Hooks are those that ran or should have, in their order; at most
	// MaxHooks.
	Hooks []HookResult `json:"hooks,omitempty"`
	// HooksLeft is how many more there were, which were not run.
	HooksLeft int `json:"hooks_left,omitempty"`
}

// Hooks are programs of the guest's own that run in a copy while all others
// are still frozen, to make anew what they must not share with other copies.
//
// They are the regular files in HooksDir that have an execute bit and a name
// of [a-zA-Z0-9._-] alone; anything else there is ignored. They run as root,
// one after the other in the order of their names (byte by byte), in / without
// input, their output dropped, with PATH, WARREN_GENERATION,
// WARREN_MACHINE_ID and WARREN_HOSTNAME for their whole environment. A hook has
// 5 s, all of them together 10 s; at its end, whatever it was, everything it
// started is killed.
//
// A hook must not wait for a frozen program: it would wait until its limit.
const (
	HooksDir = "/etc/warren/renew.d"
	// MaxHooks is how many are run at most.
	MaxHooks = 32
	// MaxHookText bounds each text of a HookResult, in bytes.
	MaxHookText = 200
)

// HookResult is how one hook ended; Code 0 with no Error is success.
type HookResult struct {
	Name string `json:"name"`
	// Code is the exit code as a shell reports it: the code, 128 + the signal
	// that ended it, 124 when its time or that of all hooks was up, 126 when
	// it could not be started.
	Code int `json:"code"`
	// Error says what Code alone does not, on one line.
	Error string `json:"error,omitempty"`
}
