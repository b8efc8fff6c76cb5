package vm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/vm/jail"
)

// findQEMU returns the program's path; configured is Spec.QEMU.
func findQEMU(configured string) (string, error) {
	name := configured
	if name == "" {
		name = DefaultQEMU
	}
	path, err := exec.LookPath(name)
	switch {
	case err == nil:
		return path, nil
	case configured != "":
		var inner *exec.Error
		if errors.As(err, &inner) {
			err = inner.Err
		}
		return "", fmt.Errorf("%w: %s: %w", ErrNoQEMU, configured, err)
	}
	return "", fmt.Errorf("%w: no %s in PATH; install it with `sudo apt-get install qemu-system-x86`", ErrNoQEMU, DefaultQEMU)
}

// VMUser is the user that QEMU runs as when Warren is root and the system has
// such a user; FallbackUID is used when it has none.
const (
	VMUser      = "warren"
	FallbackUID = 65532
)

// vmIdentity is who QEMU runs as when we are root.
type vmIdentity struct{ jail.User }

// vmUser returns nil when we are not root: QEMU then keeps our identity.
func vmUser(a Accel) (*vmIdentity, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	id := &vmIdentity{jail.User{UID: FallbackUID, GID: FallbackUID}}
	if u, err := user.Lookup(VMUser); err == nil {
		uid, uidErr := strconv.Atoi(u.Uid)
		gid, gidErr := strconv.Atoi(u.Gid)
		if uidErr != nil || gidErr != nil || uid == 0 || gid == 0 {
			return nil, fmt.Errorf("user %s has ids %s:%s; QEMU needs an unprivileged one", VMUser, u.Uid, u.Gid)
		}
		id.UID, id.GID = uid, gid
	}
	if a != KVM {
		return id, nil
	}
	// /dev/kvm usually belongs to a group; a device all may use needs none.
	info, err := os.Stat("/dev/kvm")
	if err != nil {
		return id, nil // Check says so
	}
	switch st := info.Sys().(*syscall.Stat_t); {
	case info.Mode().Perm()&0o006 == 0o006:
	case info.Mode().Perm()&0o060 == 0o060 && st.Gid != 0:
		id.Groups = []int{int(st.Gid)}
	default:
		return nil, fmt.Errorf("/dev/kvm has mode %04o: QEMU, as user %d, cannot use it; `chgrp kvm /dev/kvm && chmod 0660 /dev/kvm`, or use --accel tcg", info.Mode().Perm(), id.UID)
	}
	return id, nil
}

func (id *vmIdentity) canRead(info fs.FileInfo) bool {
	st := info.Sys().(*syscall.Stat_t)
	switch {
	case int(st.Uid) == id.UID:
		return st.Mode&unix.S_IRUSR != 0
	case int(st.Gid) == id.GID:
		return st.Mode&unix.S_IRGRP != 0
	}
	return st.Mode&unix.S_IROTH != 0
}

// quickFirmware does no more than a kernel needs that QEMU itself has loaded.
const quickFirmware = "qboot.rom"

// QuickFirmware is the Firmware with which a guest gets to its kernel soonest:
// quickFirmware when qemu ("" is DefaultQEMU) comes with it, else "". An
// emulated processor takes 230 ms longer for the usual one, which looks for
// disks and keyboards that are not there; with KVM it was not measured, and
// the usual one stays.
func QuickFirmware(qemu string, a Accel) string {
	if a != TCG {
		return ""
	}
	path, err := findQEMU(qemu)
	if err != nil {
		return ""
	}
	// QEMU finds its data in the same way, from where it really is.
	if path, err = filepath.EvalSymlinks(path); err != nil {
		return ""
	}
	info, err := os.Stat(filepath.Join(filepath.Dir(path), "..", "share", "qemu", quickFirmware))
	if err != nil || !info.Mode().IsRegular() {
		return ""
	}
	return quickFirmware
}
