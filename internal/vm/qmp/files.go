package qmp

import (
	"context"
	"fmt"
	"os"
)

// GetFD gives QEMU a descriptor under a name, for commands that take one
// ("fd:NAME", migrate-incoming and the like). QEMU drops it when it is used.
func (c *Client) GetFD(ctx context.Context, name string, f *os.File) error {
	return c.DoWithFiles(ctx, "getfd", map[string]any{"fdname": name}, nil, f)
}

// AddFD gives QEMU a descriptor as a file it can open by the path returned,
// which is how a confined QEMU gets at a file that is not in its jail. f must be
// open exactly as QEMU will open it: for reading, for writing (a state that is
// saved) or for both (a disk); otherwise QEMU says "Permission denied".
// RemoveFD takes it away once QEMU no longer has it open.
func (c *Client) AddFD(ctx context.Context, set int, f *os.File) (path string, err error) {
	args := map[string]any{"fdset-id": set}
	if err := c.DoWithFiles(ctx, "add-fd", args, nil, f); err != nil {
		return "", err
	}
	return fmt.Sprintf("/dev/fdset/%d", set), nil
}

// RemoveFD undoes AddFD.
func (c *Client) RemoveFD(ctx context.Context, set int) error {
	return c.Do(ctx, "remove-fd", map[string]any{"fdset-id": set}, nil)
}
