package supervisor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// Status describes a VM; Phase is one step of its start.
type (
	Status = control.Status
	Phase  = control.Phase
)

// Client talks with the supervisor of one VM. All methods may be called from
// any goroutine. It is done with by Close.
type Client struct {
	dir  string
	http *http.Transport

	// child and owner are set when this process started the supervisor;
	// owner is nil when the VM may outlive it.
	child *child
	owner *os.File

	watch *control.EndWatch
}

// Connect adopts the VM in dir, whoever started it: its calls are at the
// caller's service, and Close leaves it running. An error that wraps ErrGone
// says that no supervisor runs there.
func Connect(ctx context.Context, dir string) (*Client, error) {
	watch, err := control.WatchEnd(ctx, dir)
	if err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("connect to the VM in %s: %w", dir, context.Cause(ctx))
		}
		return nil, gone("connect to the VM in %s: %s", dir, whyNot(dir, err))
	}
	c := &Client{dir: dir, watch: watch}
	c.http = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return control.Dial(ctx, dir)
		},
		DisableCompression:     true,
		MaxResponseHeaderBytes: control.MaxHeader,
		MaxIdleConnsPerHost:    8,
		IdleConnTimeout:        time.Minute, // the supervisor hangs up after two
	}
	return c, nil
}

// whyNot is why a supervisor cannot be reached, from what it left behind.
func whyNot(dir string, err error) string {
	if r, recordErr := store.ReadRecord(dir); recordErr == nil && r.Ended != "" {
		return "the VM ended: " + r.Ended
	}
	return fmt.Sprintf("no supervisor answers (%v); the VM is gone", err)
}

// Gone is closed when the VM has ended and what it had is removed.
func (c *Client) Gone() <-chan struct{} { return c.watch.Done() }

// Err is nil while the VM runs, then an error that wraps ErrGone and says why
// it ended.
func (c *Client) Err() error {
	select {
	case <-c.watch.Done():
		return gone("the VM ended: %s", c.watch.End().Reason)
	default:
		return nil
	}
}

// Status asks the supervisor how the VM is. The guest is not asked.
func (c *Client) Status(ctx context.Context) (Status, error) {
	resp, err := c.send(ctx, http.MethodGet, control.StatusPath, nil)
	if err != nil {
		return Status{}, err
	}
	defer resp.Body.Close()
	return answer(ctx, c, resp.Body, guestapi.Decode[Status], control.MaxFault)
}

// Do makes one call of the guest.
func Do[Req, Resp any](ctx context.Context, c *Client, call guestapi.Call[Req, Resp], req Req) (Resp, error) {
	return doWith(ctx, c, call, req, guestapi.Decode[Resp])
}

func doWith[Req, Resp any](ctx context.Context, c *Client, call guestapi.Call[Req, Resp], req Req,
	decode func(io.Reader, int64) (Resp, error)) (Resp, error) {
	var none Resp
	body, err := json.Marshal(req)
	if err != nil {
		return none, &CallError{ErrBadRequest, err.Error()}
	}
	resp, err := c.send(ctx, http.MethodPost, control.GuestPrefix+call.Path, bytes.NewReader(body))
	if err != nil {
		return none, err
	}
	defer resp.Body.Close()
	// What the guest said was measured already; written anew it may have
	// grown a little.
	return answer(ctx, c, resp.Body, decode, 2*call.MaxResponse)
}

func answer[T any](ctx context.Context, c *Client, body io.Reader, decode func(io.Reader, int64) (T, error), limit int64) (T, error) {
	v, err := decode(body, limit)
	if err != nil {
		return v, c.lost(ctx, err)
	}
	return v, nil
}

// Stat describes one path in the guest; links are not followed.
func (c *Client) Stat(ctx context.Context, req guestapi.StatRequest) (guestapi.FileInfo, error) {
	return Do(ctx, c, guestapi.Stat, req)
}

// List lists a folder in the guest.
func (c *Client) List(ctx context.Context, req guestapi.ListRequest) (guestapi.ListInfo, error) {
	return doWith(ctx, c, guestapi.List, req, guestapi.DecodeList)
}

// Remove removes a path in the guest.
func (c *Client) Remove(ctx context.Context, req guestapi.RemoveRequest) error {
	_, err := Do(ctx, c, guestapi.Remove, req)
	return err
}

// Figures tells what is in use in the guest.
func (c *Client) Figures(ctx context.Context) (guestapi.FiguresInfo, error) {
	return Do(ctx, c, guestapi.Figures, guestapi.Empty{})
}

// send makes a request and returns an answer that is a success.
func (c *Client) send(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, "http://supervisor"+path, body)
	if err != nil {
		return nil, &CallError{ErrBadRequest, err.Error()}
	}
	resp, err := c.http.RoundTrip(r)
	if err != nil {
		return nil, c.lost(ctx, err)
	}
	if resp.StatusCode >= 300 {
		defer resp.Body.Close()
		return nil, fromFault(control.ReadFault(resp.Body))
	}
	return resp, nil
}

// lost says why the supervisor's answer did not come, or not to its end.
func (c *Client) lost(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	// If it is gone we are about to be told why.
	select {
	case <-c.watch.Done():
		return c.Err()
	case <-time.After(lostWait):
	}
	return &CallError{nil, fmt.Sprintf("the supervisor's answer broke off: %v", err)}
}

// lostWait is how long a supervisor that broke off may take to be gone: it
// tells why after it has removed the VM's files.
const lostWait = 5 * time.Second

// Stop asks the guest to end its programs, sync and power off, ends it by
// force when it does not, and returns when the VM is gone. If ctx ends first
// its error is returned and the stop goes on.
func (c *Client) Stop(ctx context.Context) error { return c.stop(ctx, control.StopAsk) }

// Kill ends the VM as if the power had failed and returns when it is gone.
func (c *Client) Kill(ctx context.Context) error { return c.stop(ctx, control.StopNow) }

func (c *Client) stop(ctx context.Context, mode control.StopMode) error {
	resp, err := c.send(ctx, http.MethodPost, control.StopPath+"?mode="+string(mode), nil)
	switch {
	case err == nil:
		resp.Body.Close()
	case errors.Is(err, ErrGone): // then there is only what it left
	default:
		return fmt.Errorf("stop the VM: %w", err)
	}
	select {
	case <-c.watch.Done():
	case <-ctx.Done():
		return fmt.Errorf("wait for the VM to stop: %w", context.Cause(ctx))
	}
	return c.cleanUp(ctx)
}

// cleanUp waits for the supervisor's process, if it is a child, and removes
// what one that was killed could not.
func (c *Client) cleanUp(ctx context.Context) error {
	if c.child != nil {
		if err := c.child.end(ctx); err != nil {
			return err
		}
	}
	_, err := store.Reap(ctx, c.dir)
	return err
}

// Close ends the use of the client. A VM that this client started and that
// may not outlive it is ended by force first; when Close returns nil nothing
// of it is left. Any other VM runs on.
func (c *Client) Close(ctx context.Context) error {
	defer c.http.CloseIdleConnections()
	defer c.watch.Close()
	if c.owner == nil {
		return nil
	}
	defer c.owner.Close()
	if c.Err() == nil {
		// Its end has the better reason for calls in flight when it is asked
		// for. Whether or not this reaches it, the pipe does.
		quick, cancel := context.WithTimeout(ctx, 2*time.Second)
		if resp, err := c.send(quick, http.MethodPost, control.StopPath+"?mode="+string(control.StopNow), nil); err == nil {
			resp.Body.Close()
		}
		cancel()
	}
	c.owner.Close()
	return c.cleanUp(ctx)
}
