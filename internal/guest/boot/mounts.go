package boot

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Folders of the initramfs.
const (
	rootDisk = "/lower" // the guest image, read-only
	dataDisk = "/data"  // the VM's own disk
	newRoot  = "/newroot"
)

type mount struct {
	source, target, kind string
	flags                uintptr
	options              string
}

func (m mount) do() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.options); err != nil {
		return fmt.Errorf("mount %s on %s: %w", m.kind, m.target, err)
	}
	return nil
}

const secure = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// system is what programs expect of every Linux, in the order of mounting.
var system = []mount{
	{"proc", "/proc", "proc", secure, ""},
	{"sysfs", "/sys", "sysfs", secure, ""},
	{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755"},
	{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "gid=5,mode=0620,ptmxmode=0666"},
	{"tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
	{"tmpfs", "/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=0755"},
	{"tmpfs", "/tmp", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
	{"cgroup2", "/sys/fs/cgroup", "cgroup2", secure, "nsdelegate"},
}

// moved are the mounts that go on into the new root; those inside them go
// along.
var moved = []string{"/proc", "/sys", "/dev", "/run", "/tmp"}

func mountSystem() error {
	for _, m := range system {
		if err := m.do(); err != nil {
			return err
		}
	}
	// devtmpfs knows devices alone.
	for name, target := range map[string]string{
		"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0",
		"/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, name); err != nil {
			return err
		}
	}
	return nil
}

// diskAppears is how long a disk may take to be seen after its driver was
// loaded. It is there at once unless the host is very busy.
const diskAppears = 10 * time.Second

// findDisk returns the device of the virtio disk with this serial.
func findDisk(serial string) (string, error) {
	for deadline := time.Now().Add(diskAppears); ; time.Sleep(10 * time.Millisecond) {
		paths, err := filepath.Glob("/sys/block/vd*/serial")
		if err != nil {
			return "", err
		}
		for _, path := range paths {
			data, err := os.ReadFile(path)
			if err == nil && strings.TrimRight(string(data), "\x00\n") == serial {
				return "/dev/" + filepath.Base(filepath.Dir(path)), nil
			}
		}
		if time.Now().After(deadline) {
			return "", fmt.Errorf("no disk with serial %q among %d virtio disks", serial, len(paths))
		}
	}
}

func mountRootDisk() error {
	device, err := findDisk("root")
	if err != nil {
		return err
	}
	return mount{device, rootDisk, "squashfs", unix.MS_RDONLY | unix.MS_NODEV, ""}.do()
}

// mountDataDisk mounts the VM's own disk and returns a descriptor of it: once
// the root has changed no path leads there any more, and Shutdown wants to
// leave it clean.
func mountDataDisk() (fd int, err error) {
	device, err := findDisk("data")
	if err != nil {
		return 0, err
	}
	// noinit_itable: no kernel thread that goes on writing zeros to a disk whose
	// every written block is one more to keep in a snapshot.
	m := mount{device, dataDisk, "ext4", unix.MS_NOATIME | unix.MS_NODEV, "noinit_itable"}
	if err := m.do(); err != nil {
		return 0, err
	}
	for _, dir := range []string{"upper", "work"} {
		if err := os.MkdirAll(filepath.Join(dataDisk, dir), 0o755); err != nil {
			return 0, err
		}
	}
	fd, err = unix.Open(dataDisk, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, &os.PathError{Op: "open", Path: dataDisk, Err: err}
	}
	return fd, nil
}

// mountOverlay puts the data disk over the root disk.
func mountOverlay() error {
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", rootDisk, dataDisk, dataDisk)
	return mount{"overlay", newRoot, "overlay", unix.MS_NOATIME, options}.do()
}

// enterRoot makes newRoot the root of this process and of all it starts.
func enterRoot() error {
	for _, dir := range moved {
		target := newRoot + dir
		if err := os.MkdirAll(target, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(dir, target, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s to the new root: %w", dir, err)
		}
	}
	if err := unix.Chdir(newRoot); err != nil {
		return fmt.Errorf("enter the new root: %w", err)
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the new root to /: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	return unix.Chdir("/")
}
