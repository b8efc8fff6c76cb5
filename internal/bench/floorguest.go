package bench

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/link"
)

// guestClient speaks with the agent in a plain VM, so that a floor can be set
// up in it. Nothing that is measured goes through it, and the guest is ours:
// the protections of a supervisor are not needed.
type guestClient struct {
	session *link.Session
	http    *http.Client
}

// dialGuest waits, until ctx ends, for the agent behind port.
func dialGuest(ctx context.Context, port link.Port) (*guestClient, error) {
	session, err := link.Dial(ctx, port)
	if err != nil {
		return nil, err
	}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) { return session.Open(ctx) }
	return &guestClient{session, &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}}, nil
}

// close ends the session and with it every program's conversation.
func (g *guestClient) close() {
	g.http.CloseIdleConnections()
	_ = g.session.Close()
}

// post sends a document and returns the answer if its status is want. The
// caller closes the body.
func (g *guestClient) post(ctx context.Context, path string, doc any, header http.Header, want int) (*http.Response, error) {
	body, err := json.Marshal(doc)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://guest"+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	for k, v := range header {
		req.Header[k] = v
	}
	resp, err := g.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != want {
		defer resp.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
		return nil, fmt.Errorf("%s: %s: %s", path, resp.Status, guestapi.CleanLine(string(text)))
	}
	return resp, nil
}

// prepare gives the guest a passing identity.
func (g *guestClient) prepare(ctx context.Context) error {
	random := make([]byte, 64)
	if _, err := rand.Read(random); err != nil {
		return err
	}
	resp, err := g.post(ctx, guestapi.Prepare.Path, guestapi.PrepareRequest{
		Hostname:   "floor",
		MachineID:  hex.EncodeToString(random[:16]),
		Generation: g.session.Generation(),
		Entropy:    random,
		UnixNano:   time.Now().UnixNano(),
	}, nil, http.StatusOK)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// startProgram starts argv and returns when it has written want. The program
// goes on after that; closing the result lets go of it.
func (g *guestClient) startProgram(ctx context.Context, want string, argv ...string) (io.Closer, error) {
	resp, err := g.post(ctx, guestapi.ExecPath, guestapi.ExecRequest{ID: "floor", Argv: argv},
		http.Header{"Connection": {"Upgrade"}, "Upgrade": {guestapi.ExecUpgrade}}, http.StatusSwitchingProtocols)
	if err != nil {
		return nil, err
	}
	if err := awaitOutput(resp.Body, want); err != nil {
		resp.Body.Close()
		return nil, fmt.Errorf("%s %w", argv[0], err)
	}
	return resp.Body, nil
}

// awaitOutput reads frames until a program has written want and nothing else.
// Its error goes on after the program's name.
func awaitOutput(r io.Reader, want string) error {
	buf := make([]byte, guestapi.MaxFrame)
	var out, errs []byte
	for string(out) != want {
		kind, data, err := guestapi.ReadFrame(r, buf)
		switch {
		case err != nil:
			return fmt.Errorf("says no more: %w", err)
		case kind == guestapi.FrameStdout:
			out = append(out, data...)
		case kind == guestapi.FrameStderr:
			errs = append(errs, data...)
		default:
			return fmt.Errorf("ended (%s) before it was ready: %s", guestapi.CleanLine(string(data)), guestapi.CleanLine(string(errs)))
		}
		if len(out)+len(errs) > guestapi.MaxFrame {
			return errors.New("writes more than it should")
		}
	}
	return nil
}
