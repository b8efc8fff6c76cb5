package control

// Paths of the calls about the VM as a whole.
const (
	SnapshotPath = "/v1/snapshot"
	PausePath    = "/v1/pause"
	ResumePath   = "/v1/resume"
)

// SnapshotRequest asks for a snapshot of the VM as it is now. The VM goes on
// as it was, running or paused; one that was booted to be a template ends.
type SnapshotRequest struct {
	// ID is the new snapshot's; none of that id may exist.
	ID string `json:"id"`
	// Kind is one of package snapshots.
	Kind  string `json:"kind"`
	Label string `json:"label,omitempty"`
}

// SnapshotInfo describes a snapshot that was made. It survives a power cut.
type SnapshotInfo struct {
	ID string `json:"id"`
	// Parent is the snapshot that this one is a difference to.
	Parent string `json:"parent,omitempty"`
	// PauseUS is how long the VM's processors stood still.
	PauseUS int64 `json:"pause_us"`
	// DataPages and ZeroPages are the pages of memory that had changed, with
	// content and without.
	DataPages uint64 `json:"data_pages"`
	ZeroPages uint64 `json:"zero_pages"`
	// DiskChanged is true when the data disk had changed.
	DiskChanged bool `json:"disk_changed"`
	// Bytes is what the snapshot takes on the host's disk.
	Bytes int64 `json:"bytes"`
	// Frozen is false when programs were deep in the kernel and not waited
	// for; they cannot run in a copy before it has a new identity either.
	Frozen bool `json:"frozen"`
	// Phases are what the time was spent on, in order.
	Phases []Phase `json:"phases"`
}

// Names of a snapshot's phases, in order. From PhaseStop to PhaseGo the VM
// stands still.
const (
	PhaseDraft   = "draft"   // the folder, and the disk's next overlay
	PhaseFreeze  = "freeze"  // the guest's programs
	PhaseStop    = "stop"    // the processors; what is unwritten goes to the disk
	PhaseDevices = "devices" // their state
	PhaseMemory  = "memory"  // the pages that changed
	PhaseDisk    = "disk"    // its overlay
	PhaseGo      = "go"      // the processors again
	PhaseThaw    = "thaw"    // the guest's programs
	PhaseWrite   = "write"   // the pages, to their file
	PhasePublish = "publish" // digests, and until the host's disk has it all
)
