package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"github.com/warren-vm/warren/internal/guestimage"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/vm"
	"github.com/warren-vm/warren/internal/vm/accel"
)

// The oldest QEMU everything here was run with.
const qemuMajor, qemuMinor = 7, 2

var qemuVersion = regexp.MustCompile(`version (\d+)\.(\d+)(\.\d+)?`)

func lookQEMU(ctx context.Context, _ Options) Check {
	const consequence = "no VM can run"
	install := "sudo apt-get install qemu-system-x86"
	path, err := exec.LookPath(qemuProgram)
	if err != nil {
		return fail(qemuProgram+" is not in PATH", consequence, install)
	}
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	m := qemuVersion.FindStringSubmatch(string(out))
	if err != nil || m == nil {
		return fail(fmt.Sprintf("%s --version gave no version (%v)", path, err), consequence, "reinstall it: "+install)
	}
	major, _ := strconv.Atoi(m[1])
	minor, _ := strconv.Atoi(m[2])
	found := fmt.Sprintf("QEMU %s.%s%s, %s", m[1], m[2], m[3], path)
	if major < qemuMajor || major == qemuMajor && minor < qemuMinor {
		return fail(found, fmt.Sprintf("it is older than %d.%d, which Warren was written for", qemuMajor, qemuMinor), "upgrade it: "+install)
	}
	return ok(found)
}

func lookAccelerator(ctx context.Context, o Options) Check {
	choice, err := vm.ChooseAccel(ctx, o.Home.Cache())
	if err != nil {
		return fail(err.Error(), "how to run VMs is not known", "choose with `kosa8 run --accel tcg`")
	}
	found := fmt.Sprintf("%s: %s", choice.Accel, choice.Evidence)
	// A host without hardware virtualization is a first-class one; one that
	// keeps it from this user is not as it should be.
	if choice.Verdict == accel.NoPermission {
		return warn(found, "guests are translated instead of run by the processor, some ten times slower", choice.Remedy)
	}
	return ok(found)
}

// lookConfinement makes the namespaces QEMU is put into.
func lookConfinement(ctx context.Context, _ Options) Check {
	kinds := uintptr(syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET |
		syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS | syscall.CLONE_NEWCGROUP)
	cmd := exec.CommandContext(ctx, "/bin/true")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: kinds}
	how := "as root, QEMU runs as an unprivileged user"
	if os.Getuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: os.Getuid(), HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: os.Getgid(), HostID: os.Getgid(), Size: 1}}
		how = "in a user namespace"
	}
	if err := cmd.Run(); err != nil {
		return fail(fmt.Sprintf("new namespaces are refused: %v", err), "QEMU cannot be confined, and no VM runs without",
			namespaceRemedy())
	}
	return ok("namespaces work, " + how)
}

// namespaceRemedy names the switch that is off on this host.
func namespaceRemedy() string {
	for _, s := range []struct{ file, off, remedy string }{
		{"/proc/sys/kernel/unprivileged_userns_clone", "0", "sudo sysctl kernel.unprivileged_userns_clone=1"},
		{"/proc/sys/user/max_user_namespaces", "0", "sudo sysctl user.max_user_namespaces=10000"},
		{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0"},
	} {
		if data, err := os.ReadFile(s.file); err == nil && strings.TrimSpace(string(data)) == s.off {
			return s.remedy
		}
	}
	return "allow unprivileged user namespaces; inside a container, allow it to make namespaces"
}

func lookImage(ctx context.Context, o Options) Check {
	img, err := guestimage.OpenContext(ctx, o.Home.Dir())
	switch {
	case errors.Is(err, guestimage.ErrNotBuilt):
		return fail("not built", "there is nothing to boot", "kosa8 image build")
	case err != nil:
		return fail(err.Error(), "there is nothing to boot", "build it anew: kosa8 image build")
	}
	return ok(fmt.Sprintf("%s, verified", img.Manifest.ImageID))
}

func lookSupervisor(ctx context.Context, o Options) Check {
	path, err := supervisor.FindVMM("")
	if err != nil {
		return fail(err.Error(), "no VM can run", "build it beside kosa8: make build")
	}
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	build := strings.TrimSpace(strings.TrimPrefix(string(out), supervisor.Name))
	switch {
	case err != nil:
		return fail(fmt.Sprintf("%s --version: %v", path, err), "no VM can run", "build it anew: make build")
	case build != o.Build:
		return fail(fmt.Sprintf("%s is of build %s, kosa8 of %s", path, build, o.Build),
			"they may not understand each other", "install both from one build: make build")
	}
	return ok(path + ", same build as kosa8")
}
