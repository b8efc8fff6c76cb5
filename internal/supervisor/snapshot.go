package supervisor

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// SnapshotRequest and SnapshotInfo are of the call Snapshot.
type (
	SnapshotRequest = control.SnapshotRequest
	SnapshotInfo    = control.SnapshotInfo
)

// Snapshot saves the VM as it is at one instant, while it runs or is paused.
//
// When it returns without an error the snapshot survives a power cut. When it
// returns an error no snapshot exists and the VM is as it was, unless ctx ended
// first: then the snapshot may yet come to be.
func (c *Client) Snapshot(ctx context.Context, req SnapshotRequest) (SnapshotInfo, error) {
	return ask[SnapshotRequest, SnapshotInfo](ctx, c, control.SnapshotPath, req)
}

// Pause stops the VM: its programs, then its processors. Calls of the guest
// wait, each for its own deadline. Pausing a paused VM does nothing.
func (c *Client) Pause(ctx context.Context) error {
	_, err := ask[guestapi.Empty, guestapi.Empty](ctx, c, control.PausePath, guestapi.Empty{})
	return err
}

// Resume lets a paused VM go on, with its clock right again.
func (c *Client) Resume(ctx context.Context) error {
	_, err := ask[guestapi.Empty, guestapi.Empty](ctx, c, control.ResumePath, guestapi.Empty{})
	return err
}

// ask makes one call of the supervisor itself.
func ask[Req, Resp any](ctx context.Context, c *Client, path string, req Req) (Resp, error) {
	var none Resp
	body, err := json.Marshal(req)
	if err != nil {
		return none, &CallError{ErrBadRequest, err.Error()}
	}
	resp, err := c.send(ctx, http.MethodPost, path, bytes.NewReader(body))
	if err != nil {
		return none, err
	}
	defer resp.Body.Close()
	return answer(ctx, c, resp.Body, guestapi.Decode[Resp], control.MaxFault)
}
