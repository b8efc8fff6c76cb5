package supervisor

import (
	"errors"
	"fmt"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// What a CallError can wrap.
var (
	// ErrGone: the VM has ended; the message says why.
	ErrGone = errors.New("the VM is gone")
	// ErrGuestSilent: the guest did not answer within the call's deadline.
	ErrGuestSilent = errors.New("the guest does not answer")
	// ErrGuestBroken: the guest's answer broke the rules of the protocol.
	ErrGuestBroken = errors.New("the guest does not keep to the protocol")
	// ErrNotReady: the VM is still being started.
	ErrNotReady = errors.New("the VM is not ready")
	// ErrBusy: too much is open at once.
	ErrBusy = errors.New("the VM is busy")
	// ErrBadRequest: what the caller asked for cannot be asked.
	ErrBadRequest = errors.New("bad request")
)

// CallError is why a call failed when it was not the guest that refused it.
type CallError struct {
	// Kind is one of the sentinels, or nil for a fault of the supervisor's.
	Kind error
	// Message is for the user; it may have several lines.
	Message string
}

func (e *CallError) Error() string { return e.Message }
func (e *CallError) Unwrap() error { return e.Kind }

func gone(format string, args ...any) *CallError {
	return &CallError{ErrGone, fmt.Sprintf(format, args...)}
}

// fromFault makes a caller's error of what the supervisor answered.
func fromFault(f *control.Fault) error {
	if f.Kind == control.Refused {
		return &guestapi.Error{Code: f.Code, Message: f.Message}
	}
	kinds := map[control.Kind]error{
		control.Gone:     ErrGone,
		control.Silent:   ErrGuestSilent,
		control.Broken:   ErrGuestBroken,
		control.NotReady: ErrNotReady,
		control.Busy:     ErrBusy,
		control.Bad:      ErrBadRequest,
	}
	return &CallError{kinds[f.Kind], f.Message}
}
