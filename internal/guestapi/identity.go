package guestapi

// Files of the guest that show its identity. All are in memory, so that a new
// identity costs no write to a disk, and are written while no program runs, so
// that none finds half of one.
const (
	// MachineIDFile holds the machine id and a newline. The root disk's
	// /etc/machine-id is a link to it; when a program has replaced the link,
	// the file that stands there gets the new id too.
	MachineIDFile = "/run/warren/machine-id"

	// GenerationFile holds Identity.Generation as decimal digits and a
	// newline. It is the last of the identity's files to change: a program
	// that watches it (inotify, IN_MODIFY) and sees a new number
	// finds hostname and machine id new as well. What a program made from
	// random numbers before (keys, tokens, the state of a generator of its
	// own) is from then on another VM's too, and has to be made anew.
	GenerationFile = "/run/warren/generation"
)

// Identity is what makes a VM one of its own: what Prepare gives it first, and
// what Renew replaces in a copy.
type Identity struct {
	// Hostname is 1 to 63 of a-z, A-Z, 0-9 and inner dashes.
	Hostname string `json:"hostname"`
	// MachineID is 32 lower-case hex digits.
	MachineID string `json:"machine_id"`
	// Generation is different for every copy of a VM; GenerationFile shows it
	// to programs that want to know.
	Generation uint64 `json:"generation"`
	// Entropy is 32 to 4096 bytes from the host's generator, used nowhere else.
	Entropy []byte `json:"entropy"`
	// UnixNano is the host's wall clock at the moment of sending.
	UnixNano int64 `json:"unix_nano"`
}

// PrepareRequest is the identity of a new VM.
type PrepareRequest = Identity

// PrepareInfo says what Prepare spent its time on, in microseconds.
type PrepareInfo struct {
	PhasesUS map[string]int64 `json:"phases_us"`
}
