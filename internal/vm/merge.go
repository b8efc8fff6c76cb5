package vm

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/vm/jail"
)

// mergeLimit bounds the merging of overlays.
const mergeLimit = 10 * time.Minute

// Merger is a function that writes what overlays, oldest first, hold over the
// raw image base into one qcow2 overlay, for snapshots.Snapshot.MergeOverlays.
// The files may be hostile: a guest that has taken over its QEMU wrote them.
// They are read by qemu-img in a jail like a VM's.
func Merger(ctx context.Context, base string) func(dst *os.File, overlays []string) error {
	return func(dst *os.File, overlays []string) error {
		if err := merge(ctx, base, dst.Name(), overlays); err != nil {
			return fmt.Errorf("qemu-img: %w", err)
		}
		return nil
	}
}

func merge(ctx context.Context, base, dst string, overlays []string) error {
	c, err := mergeCommand(base, dst, overlays)
	if err != nil {
		return err
	}
	output, theirs, err := os.Pipe()
	if err != nil {
		return err
	}
	defer output.Close()
	c.Output = theirs
	ctx, cancel := context.WithTimeout(ctx, mergeLimit)
	defer cancel()
	p, err := jail.Start(ctx, c)
	theirs.Close()
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { p.Signal(syscall.SIGKILL) })()
	said, _ := io.ReadAll(io.LimitReader(output, maxStderr))
	<-p.Done()
	switch state := p.State(); {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case state == nil || !state.Success():
		return fmt.Errorf("%v: %s", state, guestapi.CleanLineTail(said, 300))
	}
	return nil
}

// mergeCommand is qemu-img in its room.
func mergeCommand(base, dst string, overlays []string) (jail.Command, error) {
	found, err := exec.LookPath("qemu-img")
	if err != nil {
		return jail.Command{}, fmt.Errorf("%w; install it with `sudo apt-get install qemu-utils`", err)
	}
	path, prefixes, err := jail.Prefixes(found)
	if err != nil {
		return jail.Command{}, err
	}
	user, err := vmUser(TCG)
	if err != nil {
		return jail.Command{}, err
	}
	info, err := os.Stat(base)
	if err != nil {
		return jail.Command{}, err
	}
	const out = "/vm/merged.qcow2"
	c := jail.Command{
		Path: path, Prefixes: prefixes, Env: environment,
		Limits: jail.Limits{FileSize: uint64(info.Size()) + uint64(info.Size())/8 + 1<<30, OpenFiles: 4096},
		Files: []jail.File{
			{Host: base, Inside: inJail.DataBase},
			{Host: dst, Inside: out, Writable: true},
		},
	}
	if user != nil {
		c.User = &user.User
	}
	source := map[string]any{"driver": "raw", "file": fileNode(inJail.DataBase)}
	for i, overlay := range overlays {
		c.Files = append(c.Files, jail.File{Host: overlay, Inside: inJail.Overlay(i)})
		source = map[string]any{"driver": "qcow2", "file": fileNode(inJail.Overlay(i)), "backing": source}
	}
	chain, err := json.Marshal(source)
	if err != nil {
		return jail.Command{}, err
	}
	// -U: a VM has its frozen overlays open, too. The options are those of the
	// empty overlay that every VM starts with.
	c.Args = []string{"convert", "-U", "-O", "qcow2", "-o", "cluster_size=128k,extended_l2=on",
		"-B", inJail.DataBase, "-F", "raw", "json:" + string(chain), out}
	return c, nil
}

func fileNode(path string) map[string]any {
	return map[string]any{"driver": "file", "filename": path, "locking": "off"}
}
