package control

import (
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
)

// State is where a VM is in its life. Nothing leads back to an earlier one.
type State string

const (
	Starting State = "starting" // not yet prepared
	Running  State = "running"
	Stopping State = "stopping" // asked to end, or ending by itself
)

// Status describes a VM and its supervisor.
type Status struct {
	ID    string `json:"id"`
	Label string `json:"label,omitempty"`
	State State  `json:"state"`
	// Paused is true from Pause to Resume.
	Paused bool `json:"paused"`
	// Outlive is true when the VM does not end with the process that started
	// it.
	Outlive       bool `json:"outlive"`
	SupervisorPID int  `json:"supervisor_pid"`
	// QEMUPID is 0 before QEMU was started.
	QEMUPID int `json:"qemu_pid"`
	// Phases are what the start spent its time on, in order.
	Phases []Phase `json:"phases"`
	// Prepare is the guest's own account of the phase of that name, in
	// microseconds.
	Prepare map[string]int64 `json:"prepare_us,omitempty"`
	// Guest is what the agent said of itself at the start.
	Guest guestapi.HelloInfo `json:"guest"`
	// Streams is how many execs and transfers are open.
	Streams int `json:"streams"`
	// HeapBytes, Goroutines and FDs are the supervisor's own.
	HeapBytes  int64 `json:"heap_bytes"`
	Goroutines int   `json:"goroutines"`
	FDs        int   `json:"fds"`
}

// Names of the phases, in order.
const (
	PhaseSpawn   = "spawn"   // from Start to the supervisor's first act
	PhaseQEMU    = "qemu"    // until QEMU answers
	PhaseBoot    = "boot"    // until the agent answers on the link
	PhaseLink    = "link"    // until it said who it is
	PhasePrepare = "prepare" // until it has its identity and its disk
)

// Phase is one step of a start.
type Phase struct {
	Name         string `json:"name"`
	Microseconds int64  `json:"us"`
}

// Duration is the phase's length.
func (p Phase) Duration() time.Duration { return time.Duration(p.Microseconds) * time.Microsecond }

// Phase returns the length of a phase, 0 if it has not ended yet.
func (s Status) Phase(name string) time.Duration {
	for _, p := range s.Phases {
		if p.Name == name {
			return p.Duration()
		}
	}
	return 0
}
