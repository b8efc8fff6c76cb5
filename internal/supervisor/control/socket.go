package control

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/store"
)

// maxSocketPath is what fits into a sockaddr_un with its final NUL.
const maxSocketPath = 107

// Listen makes the control socket in a VM's folder, which the caller holds
// the lock of; what a dead supervisor left is replaced. Closing the listener
// leaves the file.
func Listen(dir string) (*Listener, error) {
	path := filepath.Join(dir, store.ControlName)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	short, done, err := shorten(path)
	if err != nil {
		return nil, err
	}
	defer done()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: short, Net: "unix"})
	if err != nil {
		return nil, store.WithRemedy(err)
	}
	l.SetUnlinkOnClose(false) // by then the short name is no more
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, err
	}
	return &Listener{l}, nil
}

// Listener accepts connections of this user and of root alone. The folder
// keeps others out already; this holds when somebody opens the folder up.
type Listener struct{ *net.UnixListener }

// Accept waits for the next connection that is allowed.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		if ours(c) {
			return c, nil
		}
		c.Close()
	}
}

func ours(c *net.UnixConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	var cred *unix.Ucred
	if ctlErr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); ctlErr != nil || err != nil {
		return false
	}
	return cred.Uid == 0 || int(cred.Uid) == os.Geteuid()
}

// Dial connects to the supervisor of the VM in dir.
func Dial(ctx context.Context, dir string) (*net.UnixConn, error) {
	short, done, err := shorten(filepath.Join(dir, store.ControlName))
	if err != nil {
		return nil, err
	}
	defer done()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", short)
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// shorten gives a name for path that fits into a socket address: through an
// open folder when it is too long itself. The name is good until done.
func shorten(path string) (name string, done func(), err error) {
	if len(path) <= maxSocketPath {
		return path, func() {}, nil
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return "", nil, err
	}
	name = fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path))
	return name, func() { dir.Close() }, nil
}
