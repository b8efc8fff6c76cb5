package server

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// queueWait is how long a call waits for its turn.
const queueWait = 30 * time.Second

// relay offers one call of the guest under its own path.
func relay[Req, Resp any](s *server, mux *http.ServeMux, c guestapi.Call[Req, Resp]) {
	mux.HandleFunc("POST "+control.GuestPrefix+c.Path, func(w http.ResponseWriter, r *http.Request) {
		resp, err := relayCall(s, r, c, guestapi.Decode[Resp])
		if err != nil {
			control.WriteFault(w, asFault(err))
			return
		}
		writeJSON(w, resp)
	})
}

func relayCall[Req, Resp any](s *server, r *http.Request, c guestapi.Call[Req, Resp],
	decode func(io.Reader, int64) (Resp, error)) (Resp, error) {
	var none Resp
	g, fault := s.ready()
	if fault != nil {
		return none, fault
	}
	req, err := guestapi.Decode[Req](r.Body, c.MaxRequest)
	if err != nil {
		return none, badRequest(err)
	}
	ctx, cancel := s.withLife(r.Context())
	defer cancel()
	queue, stopQueue := context.WithTimeout(ctx, queueWait)
	defer stopQueue()
	if fault := s.calls.take(queue); fault != nil {
		return none, fault
	}
	defer s.calls.free()
	return callWith(ctx, g, c, req, decode)
}

// serveList relays the one call whose answer may be large: one at a time in
// memory, and written entry by entry.
func (s *server) serveList(w http.ResponseWriter, r *http.Request) {
	queue, cancel := context.WithTimeout(r.Context(), queueWait)
	defer cancel()
	if fault := s.large.take(queue); fault != nil {
		control.WriteFault(w, fault)
		return
	}
	defer s.large.free()
	info, err := relayCall(s, r, guestapi.List, guestapi.DecodeList)
	if err != nil {
		control.WriteFault(w, asFault(err))
		return
	}
	// The place is held while the client reads: not for ever.
	http.NewResponseController(w).SetWriteDeadline(time.Now().Add(queueWait))
	w.Header().Set("Content-Type", "application/json")
	writeList(w, info)
}

// writeList writes what json.Marshal would, without holding it twice.
func writeList(w io.Writer, info guestapi.ListInfo) error {
	next := `{"entries":[`
	for i := range info.Entries {
		entry, err := json.Marshal(&info.Entries[i])
		if err != nil {
			return err
		}
		if _, err := io.WriteString(w, next); err != nil {
			return err
		}
		if _, err := w.Write(entry); err != nil {
			return err
		}
		next = ","
	}
	if len(info.Entries) == 0 {
		io.WriteString(w, next)
	}
	end := "]}"
	if info.Truncated {
		end = `],"truncated":true}`
	}
	_, err := io.WriteString(w, end)
	return err
}

// ready gives the guest to a client's call.
func (s *server) ready() (*guest, *control.Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch s.state {
	case control.Running:
		return s.guest, nil
	case control.Starting:
		return nil, control.Faultf(control.NotReady, "the VM is still starting; wait until it is ready")
	}
	var fault *control.Fault
	if errors.As(context.Cause(s.life), &fault) {
		return nil, fault
	}
	return nil, control.Faultf(control.Gone, "the VM is being stopped")
}

// withLife is a client's context that also ends with the VM.
func (s *server) withLife(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	unhook := context.AfterFunc(s.life, func() { cancel(context.Cause(s.life)) })
	return ctx, func() { unhook(); cancel(nil) }
}

func asFault(err error) *control.Fault {
	fault, ok := err.(*control.Fault)
	switch {
	case ok:
		return fault
	case errors.As(err, &fault): // with more words around it
		return &control.Fault{Kind: fault.Kind, Code: fault.Code, Message: err.Error()}
	}
	return control.Faultf(control.Internal, "%v", err)
}

func badRequest(err error) *control.Fault {
	return control.Faultf(control.Bad, "the request cannot be read: %v", err)
}
