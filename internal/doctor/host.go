package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/guestimage"
	"github.com/warren-vm/warren/internal/machine"
)

// Figures that divide ok from warn from fail, in MiB.
const (
	diskLow    = 4 << 10 // a build of the guest image, and some room for guests
	diskNone   = 256     // what a guest writes soon fills it
	memoryLow  = machine.DefaultMemMB + 256
	memoryNone = machine.MinMemMB + 128
)

// lookHome checks that state can be kept, and by this user alone.
func lookHome(_ context.Context, o Options) Check {
	dir := o.Home.Dir()
	info, err := os.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		parent := existing(dir)
		if err := unix.Access(parent, unix.W_OK|unix.X_OK); err != nil {
			return fail(fmt.Sprintf("%s is not there and cannot be made: %s: %v", dir, parent, err),
				"there is nowhere to keep guest images and VMs",
				"set WARREN_HOME to a folder of yours")
		}
		return ok(dir + " is not there yet and will be made")
	}
	if err != nil {
		return fail(err.Error(), "there is nowhere to keep guest images and VMs", "set WARREN_HOME to a folder of yours")
	}
	if !info.IsDir() {
		return fail(dir+" is not a folder", "there is nowhere to keep guest images and VMs", "move it away, or set WARREN_HOME")
	}
	st, is := info.Sys().(*syscall.Stat_t)
	foreign := is && int(st.Uid) != os.Getuid()
	switch err := unix.Access(dir, unix.W_OK|unix.X_OK); {
	case errors.Is(err, unix.EROFS):
		return fail(fmt.Sprintf("%s: %v", dir, err), "no VM's folder can be made", "set WARREN_HOME to a folder on a disk that can be written")
	case err != nil:
		remedy := "chmod u+rwx " + dir
		if foreign {
			remedy = "set WARREN_HOME to a folder of yours" // whose it is has to stay so
		}
		return fail(fmt.Sprintf("%s: %v", dir, err), "no VM's folder can be made", remedy)
	}
	if foreign {
		return warn(fmt.Sprintf("%s belongs to user %d, we are %d", dir, st.Uid, os.Getuid()),
			"its owner can change what your VMs start from", "set WARREN_HOME to a folder of yours")
	}
	if perm := info.Mode().Perm(); perm&0o077 != 0 {
		return warn(fmt.Sprintf("%s has mode %04o", dir, perm), "other users can look into it", "chmod 700 "+dir)
	}
	return ok(dir + ", private")
}

// existing is the nearest folder above path, or path itself, that is there.
func existing(path string) string {
	for {
		if _, err := os.Stat(path); err == nil || path == filepath.Dir(path) {
			return path
		}
		path = filepath.Dir(path)
	}
}

func lookDisk(_ context.Context, o Options) Check {
	dir := existing(o.Home.Dir())
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return warn(fmt.Sprintf("%s: %v", dir, err), "whether there is room cannot be told", "look with `df "+dir+"`")
	}
	freeMB := int64(fs.Bavail) * int64(fs.Bsize) >> 20
	found := fmt.Sprintf("%s free in %s", cli.FormatMB(freeMB), dir)
	const remedy = "free some space, or set WARREN_HOME to a folder on a larger disk"
	switch {
	case freeMB < diskNone:
		return warn(found, "a VM has no room for what its guest writes, nor for a snapshot", remedy)
	case freeMB < diskLow:
		return warn(found, "a guest image cannot be built, and guests that write much get an I/O error", remedy)
	}
	return ok(found)
}

func lookMemory(context.Context, Options) Check {
	total := int64(machine.HostMemMB())
	free := availableMB()
	if total == 0 || free == 0 {
		return warn("/proc/meminfo cannot be read", "whether there is enough memory cannot be told", "look with `free -m`")
	}
	found := fmt.Sprintf("%s of %s available", cli.FormatMB(free), cli.FormatMB(total))
	switch {
	case free < memoryNone:
		return fail(found, "not even a small VM can run", "end some programs")
	case free < memoryLow:
		return warn(found, fmt.Sprintf("a VM of the usual size (%s) may be killed for want of memory", cli.FormatMB(machine.DefaultMemMB)),
			"use --memory 256m, or end some programs")
	}
	return ok(found)
}

func availableMB() int64 {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(data), "MemAvailable:")
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		return 0
	}
	kb, _ := strconv.ParseInt(fields[0], 10, 64)
	return kb / 1024
}

func lookLeftOvers(ctx context.Context, o Options) Check {
	vms, err := o.Home.VMs()
	if err != nil {
		return warn(err.Error(), "what dead VMs left cannot be told", "look at the folder's permissions")
	}
	var live, dead []string
	for _, vm := range vms {
		if vm.Held {
			live = append(live, vm.ID)
		} else {
			dead = append(dead, vm.ID)
		}
	}
	found := "none"
	if len(live) > 0 {
		found = "none; " + cli.Count(len(live), "VM") + " running"
	}
	builds := guestimage.Leftovers(o.Home.Dir())
	if o.Repair {
		guestimage.Sweep(o.Home.Dir())
		swept, err := o.Home.Sweep(ctx)
		if err != nil && len(dead) > 0 {
			return warn(err.Error(), "files of dead VMs take up space", "remove them by hand")
		}
		if n := len(swept.Removed); n > 0 {
			found = fmt.Sprintf("removed what %s left (%s)", cli.Count(n, "dead VM"), strings.Join(swept.Removed, ", "))
			if k := len(swept.Killed); k > 0 {
				found += fmt.Sprintf(", killed what still ran of it: %d", k)
			}
		}
		if n := len(builds); n > 0 {
			found += fmt.Sprintf("; removed what killed builds or imports of guest images left (%s)", strings.Join(builds, ", "))
		}
		return ok(found)
	}
	var left []string
	if len(dead) > 0 {
		left = append(left, fmt.Sprintf("%s left files: %s", cli.Count(len(dead), "dead VM"), strings.Join(dead, ", ")))
	}
	if len(builds) > 0 {
		left = append(left, "a killed build or import of a guest image left "+strings.Join(builds, ", "))
	}
	if len(left) > 0 {
		return warn(strings.Join(left, "; "), "it takes up space until a later command removes it", "kosa8 doctor --repair")
	}
	return ok(found)
}

// buildTools are what a build of the guest image runs, with the package that
// has each.
var buildTools = []struct{ program, pkg string }{
	{"mmdebstrap", "mmdebstrap"},
	{"mksquashfs", "squashfs-tools"},
	{"mkfs.ext4", "e2fsprogs"},
	{"qemu-img", "qemu-utils"},
	{"apt-get", "apt"},
	{"dpkg-deb", "dpkg"},
}

func lookBuildTools(_ context.Context, o Options) Check {
	var missing, packages []string
	for _, t := range buildTools {
		if findProgram(t.program) == "" {
			missing = append(missing, t.program)
			packages = append(packages, t.pkg)
		}
	}
	if len(missing) == 0 {
		return ok("all there")
	}
	return warn("missing: "+strings.Join(missing, ", "), "the guest image cannot be built or renewed",
		"sudo apt-get install "+strings.Join(packages, " "))
}

// findProgram looks in PATH and in the folders of root's PATH, where Debian
// keeps mkfs.
func findProgram(name string) string {
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	for _, dir := range []string{"/usr/local/sbin", "/usr/sbin", "/sbin"} {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path
		}
	}
	return ""
}
