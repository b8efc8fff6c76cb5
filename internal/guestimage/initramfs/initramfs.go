package initramfs

import (
	"bytes"
	"fmt"
	"io"
	"path"

	"github.com/warren-vm/warren/internal/guestimage/kernel"
)

// folders are there before the agent runs. It makes others itself: the
// initramfs is a tmpfs by then.
var folders = []struct {
	name string
	perm uint32
}{
	{"dev", 0o755}, {"modules", 0o755}, {"proc", 0o555}, {"root", 0o700},
	{"run", 0o755}, {"sys", 0o555}, {"tmp", 0o1777},
}

// Write writes the initramfs: first an archive with the folders, the console
// and the modules, then one with the agent as /init. It returns the size of
// the first, so that a new agent can be put behind the same modules without
// the kernel package (see Replace).
//
// The modules lie in /modules, named in load order in /modules/order, one file
// name per line.
func Write(w io.Writer, modules []kernel.Module, agent []byte) (modulesSize int64, err error) {
	a := NewArchive(w)
	for _, d := range folders {
		if err := a.Dir(d.name, d.perm); err != nil {
			return 0, err
		}
	}
	// The kernel opens it for PID 1 before anything is mounted.
	if err := a.CharDevice("dev/console", 0o600, 5, 1); err != nil {
		return 0, err
	}
	var order bytes.Buffer
	for _, m := range modules {
		name := path.Base(m.Path)
		content, err := m.Content()
		if err != nil {
			return 0, err
		}
		if err := a.File("modules/"+name, 0o644, content); err != nil {
			return 0, err
		}
		fmt.Fprintln(&order, name)
	}
	if err := a.File("modules/order", 0o644, order.Bytes()); err != nil {
		return 0, err
	}
	if err := a.Close(); err != nil {
		return 0, err
	}
	return a.Size(), writeAgent(w, agent)
}

// Replace writes an initramfs with another agent behind the modules of old,
// whose first archive is modulesSize bytes long.
func Replace(w io.Writer, old io.Reader, modulesSize int64, agent []byte) error {
	if _, err := io.CopyN(w, old, modulesSize); err != nil {
		return fmt.Errorf("copy the modules of the initramfs: %w", err)
	}
	return writeAgent(w, agent)
}

func writeAgent(w io.Writer, agent []byte) error {
	a := NewArchive(w)
	if err := a.File("init", 0o755, agent); err != nil {
		return err
	}
	return a.Close()
}
