package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// guest is the agent at the other end of the link. It is hostile.
type guest struct {
	s    *server
	link Link
	// calls keeps a few streams open for the next call; transfers use a
	// stream once.
	calls, transfers *http.Transport
}

const (
	// openWait bounds the opening of a stream and the sending of a request.
	openWait = 10 * time.Second
	// maxMessage bounds what is shown of an error message from the guest.
	maxMessage = 4 << 10
)

func newGuest(s *server, l Link) *guest {
	g := &guest{s: s, link: l}
	transport := func() *http.Transport {
		return &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return g.open(ctx)
			},
			DisableCompression:     true,
			MaxResponseHeaderBytes: control.MaxHeader,
			MaxIdleConnsPerHost:    4,
			WriteBufferSize:        16 << 10,
		}
	}
	g.calls, g.transfers = transport(), transport()
	g.transfers.DisableKeepAlives = true
	return g
}

func (g *guest) open(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, g.s.wait(openWait))
	defer cancel()
	return g.link.Open(ctx)
}

func (g *guest) close() {
	g.calls.CloseIdleConnections()
	g.transfers.CloseIdleConnections()
}

// call makes one call of the guest. Its error is a *control.Fault.
func call[Req, Resp any](ctx context.Context, g *guest, c guestapi.Call[Req, Resp], req Req) (Resp, error) {
	return callWith(ctx, g, c, req, guestapi.Decode[Resp])
}

// callWith is call with another way to read the answer.
func callWith[Req, Resp any](ctx context.Context, g *guest, c guestapi.Call[Req, Resp], req Req,
	decode func(io.Reader, int64) (Resp, error)) (Resp, error) {
	var none Resp
	body, err := json.Marshal(req)
	if err != nil {
		return none, control.Faultf(control.Bad, "%v", err)
	}
	if int64(len(body)) > c.MaxRequest {
		return none, control.Faultf(control.Bad, "request of %d bytes, more than %d", len(body), c.MaxRequest)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, g.s.wait(c.Deadline), errSilent)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://guest"+c.Path, bytes.NewReader(body))
	if err != nil {
		return none, control.Faultf(control.Internal, "%v", err)
	}
	r.Header.Set("Content-Type", "application/json")
	// RoundTrip, not a Client: no redirects, no cookies.
	resp, err := g.calls.RoundTrip(r)
	if err != nil {
		return none, g.explain(ctx, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return none, g.refusal(ctx, resp)
	}
	v, err := decode(resp.Body, c.MaxResponse)
	if err != nil {
		return none, g.explain(ctx, err)
	}
	return v, nil
}

var errSilent = errors.New("deadline")

// refusal reads an answer that is no success.
func (g *guest) refusal(ctx context.Context, resp *http.Response) *control.Fault {
	if resp.StatusCode < 400 {
		return control.Faultf(control.Broken, "the guest agent answered with status %d, which the protocol does not have", resp.StatusCode)
	}
	e, err := guestapi.Decode[guestapi.Error](resp.Body, 64<<10)
	if err != nil {
		return g.explain(ctx, err)
	}
	return refused(e)
}

// refused makes a Fault of what a guest says is wrong.
func refused(e guestapi.Error) *control.Fault {
	switch e.Code {
	case guestapi.CodeBadRequest, guestapi.CodeNotFound, guestapi.CodeNotExecutable, guestapi.CodeNotPrepared,
		guestapi.CodeConflict, guestapi.CodeTooMany, guestapi.CodeNoSpace:
	default:
		e.Code = guestapi.CodeInternal
	}
	message := shorten(guestapi.CleanText(e.Message), maxMessage)
	if message == "" {
		message = "the guest agent refused without a reason"
	}
	return &control.Fault{Kind: control.Refused, Code: e.Code, Message: message}
}

// explain says whose fault it is that a conversation with the guest failed:
// the VM's end before a missed deadline before broken rules.
func (g *guest) explain(ctx context.Context, err error) *control.Fault {
	var fault *control.Fault
	if errors.As(err, &fault) {
		return fault
	}
	brokeOff := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
	if fault := g.ended(err, brokeOff); fault != nil {
		return fault
	}
	cause := context.Cause(ctx)
	switch {
	case cause == errSilent, isTimeout(err) && cause == nil:
		return control.Faultf(control.Silent, "the guest did not answer in time")
	case errors.As(cause, &fault):
		return fault
	case cause != nil:
		return control.Faultf(control.Gone, "the call was given up: %v", cause)
	case brokeOff:
		return control.Faultf(control.Broken, "the guest agent broke off in the middle of its answer")
	}
	return control.Faultf(control.Broken, "the guest agent broke the protocol: %s", oneLine(err.Error(), 500))
}

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

// ended is the VM's end when it has ended. A stream breaks off a moment before
// the link does, and that before QEMU is known to be gone, so that it waits a
// moment for each where there is reason to.
func (g *guest) ended(err error, brokeOff bool) *control.Fault {
	s := g.s
	if brokeOff {
		waitFor(s.life.Done(), g.link.Done(), 300*time.Millisecond)
	}
	if isDone(g.link.Done()) || isDone(s.machine.Exited()) {
		waitFor(s.life.Done(), nil, exitGrace)
	}
	var fault *control.Fault
	switch {
	case errors.As(context.Cause(s.life), &fault):
		return fault
	case isDone(g.link.Done()):
		return control.Faultf(control.Gone, "the link to the guest is gone: %s", oneLine(err.Error(), 500))
	}
	return nil
}

// waitFor waits for either channel, but not longer than d.
func waitFor(a, b <-chan struct{}, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-a:
	case <-b:
	case <-timer.C:
	}
}
