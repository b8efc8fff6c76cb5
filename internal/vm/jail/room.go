package jail

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// Attributes of everything that is bound.
const (
	readOnly = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID
	// code may be executed and mapped so; data may not.
	codeAttrs   = readOnly | unix.MOUNT_ATTR_NODEV
	dataAttrs   = readOnly | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC
	writeAttrs  = dataAttrs &^ unix.MOUNT_ATTR_RDONLY
	deviceAttrs = readOnly | unix.MOUNT_ATTR_NOEXEC // one may still write to a device
)

// bind is a piece of the host's file system on its way into the room: cloned,
// with its attributes, but not attached anywhere.
type bind struct {
	inside string
	dir    bool
	fd     int
}

// buildRoom makes the new root file system and leaves the old one. It returns
// the step that went wrong.
func (c Command) buildRoom() (step string, err error) {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return "make mounts private", err
	}
	// Everything is cloned before the tmpfs covers the place it is put on.
	binds, links, step, err := c.collect()
	if err != nil {
		return step, err
	}
	const place = "/usr" // there is one everywhere, and it has been cloned
	if err := unix.Mount("room", place, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "size=64k,nr_inodes=256,mode=755"); err != nil {
		return "mount a tmpfs", err
	}
	if err := unix.Chdir(place); err != nil {
		return "enter the new root", err
	}
	for _, b := range binds {
		if err := b.attach("." + b.inside); err != nil {
			return "bind " + b.inside, err
		}
	}
	for _, l := range links {
		if err := os.Symlink(l.target, "."+l.path); err != nil {
			return "link " + l.path, err
		}
	}
	if err := unix.MountSetattr(unix.AT_FDCWD, ".", 0, &unix.MountAttr{Attr_set: dataAttrs}); err != nil {
		return "make the new root read-only", err
	}
	// pivot_root(".", ".") puts the old root over the new one, from where it
	// is taken away; no place for it is needed.
	if err := unix.PivotRoot(".", "."); err != nil {
		return "change the root", err
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return "let go of the old root", err
	}
	if err := unix.Chdir("/"); err != nil {
		return "enter the new root", err
	}
	if err := unix.Sethostname([]byte("vm")); err != nil {
		return "set the host name", err
	}
	return "", nil
}

type link struct{ path, target string }

// collect clones what goes into the room.
func (c Command) collect() (binds []bind, links []link, step string, err error) {
	add := func(host, inside string, attrs uint64, recursive bool) {
		if err != nil {
			return
		}
		var b bind
		if b, err = clone(host, attrs, recursive); err != nil {
			step = "open " + host
			return
		}
		b.inside = inside
		binds = append(binds, b)
	}
	add("/usr", "/usr", codeAttrs, true)
	for _, dir := range []string{"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"} {
		if target, err := os.Readlink(dir); err == nil {
			links = append(links, link{dir, target})
		} else if info, err := os.Stat(dir); err == nil && info.IsDir() {
			add(dir, dir, codeAttrs, true)
		}
	}
	for _, prefix := range c.Prefixes {
		add(prefix, prefix, codeAttrs, true)
	}
	if _, missing := os.Stat("/etc/ld.so.cache"); missing == nil {
		add("/etc/ld.so.cache", "/etc/ld.so.cache", dataAttrs, false)
	}
	for _, dev := range append([]string{"/dev/null", "/dev/urandom"}, c.Devices...) {
		add(dev, dev, deviceAttrs, false)
	}
	for _, f := range c.Files {
		attrs := uint64(dataAttrs)
		if f.Writable {
			attrs = writeAttrs
		}
		add(f.Host, f.Inside, attrs, false)
	}
	// A prefix inside another, or a file inside a folder, comes after it.
	slices.SortStableFunc(binds, func(a, b bind) int { return len(filepath.Clean(a.inside)) - len(filepath.Clean(b.inside)) })
	return binds, links, step, err
}

// clone copies the mount at a path of the host. A folder is copied with all
// that is mounted below it: in a user namespace the kernel refuses to uncover
// what those mounts hide.
func clone(host string, attrs uint64, recursive bool) (bind, error) {
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC)
	setFlags := uint(unix.AT_EMPTY_PATH)
	if recursive {
		flags |= unix.AT_RECURSIVE
		setFlags |= unix.AT_RECURSIVE
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, host, flags)
	if err != nil {
		return bind{}, err
	}
	// Only ever adds to what the host's mount has.
	if err := unix.MountSetattr(fd, "", setFlags, &unix.MountAttr{Attr_set: attrs}); err != nil {
		return bind{}, fmt.Errorf("make it read-only: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return bind{}, err
	}
	isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	if isDir != recursive {
		return bind{}, errors.New("a folder where a file should be, or the other way round")
	}
	return bind{dir: isDir, fd: fd}, nil
}

// attach puts b at a path of the room, which it makes.
func (b bind) attach(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if b.dir {
		if err := os.MkdirAll(path, 0o755); err != nil {
			return err
		}
	} else {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
		if err != nil {
			return err
		}
		f.Close()
	}
	if err := unix.MoveMount(b.fd, "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return err
	}
	return unix.Close(b.fd)
}
