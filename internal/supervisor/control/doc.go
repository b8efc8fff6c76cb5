// Package control is what a supervisor and its clients say to each other:
// HTTP over the socket control.sock in the VM's folder, which only the user
// can open. It holds types and the two ends of the socket.
//
//	GET  /v1/status           Status
//	GET  /v1/wait             the header at once, an End when the VM has ended
//	POST /v1/stop?mode=…      Empty at once; ask or now, see StopMode
//	POST /v1/guest/…          the calls of package guestapi with their paths
//	GET, PUT /v1/guest/v1/file and /v1/guest/v1/tar
//
// A call that fails answers with a Fault. What the guest said is decoded and
// written anew on the way, so that a client never reads the guest's own bytes
// but for the content of files and of exec frames.
//
// An exec is answered with 101 and goes on in the frames of guestapi, with
// one kind more, FrameFault, which takes the place of the exit frame when the
// conversation cannot be brought to its end. A client that hangs up ends its
// stream alone; the program runs on.
package control

import (
	"github.com/warren-vm/warren/internal/guestapi"
)

// Paths of the supervisor's own calls.
const (
	StatusPath  = "/v1/status"
	WaitPath    = "/v1/wait"
	StopPath    = "/v1/stop"
	GuestPrefix = "/v1/guest"
)

// Limits of what crosses the socket beside the limits of guestapi.
const (
	// MaxFault bounds a Fault, an End and a Status.
	MaxFault = 64 << 10
	// MaxHeader bounds the header of a request and of an answer.
	MaxHeader = 16 << 10
)

// FrameFault ends an exec conversation in place of the exit frame; its
// payload is a Fault. Only the supervisor sends it: as a frame from the guest
// it is refused.
const FrameFault guestapi.FrameKind = 0x1e

// StopMode says how a VM is stopped.
type StopMode string

const (
	// StopAsk asks the guest to end its programs and to sync first, and goes
	// on with StopNow when it does not in time.
	StopAsk StopMode = "ask"
	// StopNow ends the VM as if the power had failed.
	StopNow StopMode = "now"
)

// End says why a VM ended.
type End struct {
	Reason string `json:"reason"`
	// Asked is true when someone had asked for it.
	Asked bool `json:"asked,omitempty"`
}

// Event is one line of what a supervisor tells the process that started it,
// on standard output: phases as they end, then Ready or a Fault, then nothing
// more.
type Event struct {
	Phase *Phase `json:"phase,omitempty"`
	Ready bool   `json:"ready,omitempty"`
	Fault *Fault `json:"fault,omitempty"`
}
