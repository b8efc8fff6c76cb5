package control

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"github.com/warren-vm/warren/internal/guestapi"
)

// Kind says whose fault a failed call is; callers decide on it.
type Kind string

const (
	Refused  Kind = "refused"  // by the guest, with its Code
	Gone     Kind = "gone"     // the VM ended
	Silent   Kind = "silent"   // no answer from the guest within the deadline
	Broken   Kind = "broken"   // the guest's answer broke the rules
	NotReady Kind = "starting" // the VM is still being started
	Busy     Kind = "busy"     // the supervisor has too much open
	Bad      Kind = "request"  // the client's request is at fault
	Internal Kind = "internal" // anything else
)

// Fault is why a call failed. Message is clean: it may go to a terminal.
type Fault struct {
	Kind    Kind          `json:"kind"`
	Code    guestapi.Code `json:"code,omitempty"`
	Message string        `json:"message"`
}

func (f *Fault) Error() string { return f.Message }

// Faultf makes a Fault.
func Faultf(kind Kind, format string, args ...any) *Fault {
	return &Fault{Kind: kind, Message: fmt.Sprintf(format, args...)}
}

// HTTPStatus is the status that goes with the fault.
func (f *Fault) HTTPStatus() int {
	switch f.Kind {
	case Refused:
		return f.Code.HTTPStatus()
	case Gone:
		return http.StatusGone
	case Silent:
		return http.StatusGatewayTimeout
	case Broken:
		return http.StatusBadGateway
	case NotReady:
		return http.StatusServiceUnavailable
	case Busy:
		return http.StatusTooManyRequests
	case Bad:
		return http.StatusBadRequest
	default:
		return http.StatusInternalServerError
	}
}

// WriteFault answers a request with a fault.
func WriteFault(w http.ResponseWriter, f *Fault) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(f.HTTPStatus())
	json.NewEncoder(w).Encode(f)
}

// ReadFault reads the body of an answer that is no success.
func ReadFault(r io.Reader) *Fault {
	f, err := guestapi.Decode[Fault](r, MaxFault)
	if err != nil || f.Message == "" {
		return Faultf(Internal, "the supervisor's answer cannot be read: %v", err)
	}
	return &f
}
