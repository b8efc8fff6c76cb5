package server

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// startExec sends the request to the guest and reads its answer. On success
// the caller frees s.streams and closes the guest's stream.
func (s *server) startExec(r *http.Request) (_ *conversation, fault *control.Fault) {
	g, fault := s.ready()
	if fault != nil {
		return nil, fault
	}
	if r.Header.Get("Upgrade") != guestapi.ExecUpgrade {
		return nil, control.Faultf(control.Bad, "exec needs the header \"Upgrade: %s\"", guestapi.ExecUpgrade)
	}
	if fault := s.streams.try(); fault != nil {
		return nil, fault
	}
	defer func() {
		if fault != nil {
			s.streams.free()
		}
	}()
	ctx, cancel := s.withLife(r.Context())
	defer cancel()
	message, stdin, fault := s.execRequest(ctx, r)
	if fault != nil {
		return nil, fault
	}
	for {
		frozen, fault := g.awaitThaw(ctx)
		if fault != nil {
			return nil, fault
		}
		c, fault := g.startOnce(ctx, message)
		if fault == nil {
			c.stdin = stdin
			return c, nil
		}
		// Nothing was started: the snapshot came between.
		if fault.Code != guestapi.CodeConflict || !s.history.still.since(frozen) {
			return nil, fault
		}
	}
}

// awaitThaw waits while a snapshot or a pause keeps programs from starting.
func (g *guest) awaitThaw(ctx context.Context) (frozen int, fault *control.Fault) {
	ctx, cancel := context.WithTimeoutCause(ctx, g.s.wait(execStartWait), errSilent)
	defer cancel()
	frozen, err := g.s.history.still.await(ctx)
	if err != nil {
		return frozen, g.explain(ctx, err)
	}
	return frozen, nil
}

// startOnce asks the guest to start a program.
func (g *guest) startOnce(ctx context.Context, message []byte) (*conversation, *control.Fault) {
	stream, err := g.open(ctx)
	if err != nil {
		return nil, g.explain(ctx, err)
	}
	unhook := context.AfterFunc(ctx, func() { stream.SetDeadline(time.Unix(1, 0)) })
	settled := g.watchStart(ctx, stream)
	in, fault := g.upgrade(ctx, stream, message)
	settled()
	if unhook(); fault != nil {
		abandon(stream)
		return nil, fault
	}
	stream.SetDeadline(time.Time{})
	return &conversation{s: g.s, g: g, guest: stream, guestIn: in}, nil
}

// execRequest reads the client's request and writes the guest's, ready to be
// sent in one piece.
func (s *server) execRequest(ctx context.Context, r *http.Request) (message []byte, stdin bool, fault *control.Fault) {
	if r.ContentLength < 0 || r.ContentLength > smallDocument {
		queue, cancel := context.WithTimeout(ctx, queueWait)
		defer cancel()
		if fault := s.large.take(queue); fault != nil {
			return nil, false, fault
		}
		defer s.large.free()
	}
	req, err := guestapi.Decode[guestapi.ExecRequest](r.Body, guestapi.MaxExecRequest)
	if err != nil {
		return nil, false, badRequest(err)
	}
	body, err := json.Marshal(req)
	if err != nil || len(body) > guestapi.MaxExecRequest {
		return nil, false, control.Faultf(control.Bad, "arguments and environment of %d bytes; at most %d can be sent", len(body), guestapi.MaxExecRequest)
	}
	var b bytes.Buffer
	b.Grow(len(body) + 200)
	fmt.Fprintf(&b, "POST %s HTTP/1.1\r\nHost: guest\r\nConnection: Upgrade\r\nUpgrade: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n",
		guestapi.ExecPath, guestapi.ExecUpgrade, len(body))
	b.Write(body)
	return b.Bytes(), req.Stdin, nil
}

// watchStart interrupts stream when the guest does not answer at all while it
// should start a program, until settled is called.
func (g *guest) watchStart(ctx context.Context, stream net.Conn) (settled func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(g.s.startTick):
			}
			if _, err := call(ctx, g, guestapi.Hello, guestapi.Empty{}); err != nil && ctx.Err() == nil {
				stream.SetDeadline(time.Unix(1, 0))
				return
			}
		}
	}()
	return func() { cancel(); <-done }
}

// upgrade turns a fresh stream into an exec conversation.
func (g *guest) upgrade(ctx context.Context, stream net.Conn, message []byte) (*bufio.Reader, *control.Fault) {
	stream.SetDeadline(time.Now().Add(g.s.wait(execStartWait)))
	if _, err := stream.Write(message); err != nil {
		return nil, g.explain(ctx, err)
	}
	header := &io.LimitedReader{R: stream, N: control.MaxHeader}
	in := bufio.NewReaderSize(header, streamBuffer)
	resp, err := http.ReadResponse(in, &http.Request{Method: http.MethodPost})
	if err != nil {
		if header.N <= 0 {
			err = fmt.Errorf("an answer's header of more than %d bytes", control.MaxHeader)
		}
		return nil, g.explain(ctx, err)
	}
	header.N = 1 << 62 // frames bound themselves
	switch {
	case resp.Proto != "HTTP/1.1":
		return nil, g.explain(ctx, fmt.Errorf("an answer in %s", resp.Proto))
	case resp.StatusCode != http.StatusSwitchingProtocols:
		defer resp.Body.Close()
		return nil, g.refusal(ctx, resp)
	case resp.Header.Get("Upgrade") != guestapi.ExecUpgrade:
		return nil, g.explain(ctx, errors.New("an answer that changes to another protocol"))
	}
	return in, nil
}
