package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Whatever a guest does to itself, the command ends with a clear error or
// with the program's own result.

func TestAKernelPanicIsNamed(t *testing.T) {
	home := vmHome(t)
	k := newKosa8(t, home, "run", "base", "--", "sh", "-c", "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger; sleep 1000")
	wantFailure(t, k, "panic")
}

func TestAKilledAgentIsNamed(t *testing.T) {
	home := vmHome(t)
	// PID 1 takes no signal it has no handler for; a crash it cannot refuse.
	k := newKosa8(t, home, "run", "base", "--", "sh", "-c", "echo o > /proc/sysrq-trigger; sleep 1000")
	wantFailure(t, k, "")
}

func wantFailure(t *testing.T, k *kosa8, word string) {
	t.Helper()
	code := k.start(t).end(t)
	said := k.errs.String()
	if code != 1 || !strings.HasPrefix(said, "kosa8: ") || !strings.Contains(strings.ToLower(said), word) {
		t.Errorf("code %d, stderr %q, want 1 and a line about %q", code, said, word)
	}
	if strings.ContainsAny(said, "\x1b\r\x00") {
		t.Errorf("control characters of the guest in %q", said)
	}
}

func TestAProgramThatEatsTheMemoryIsEndedAndNamed(t *testing.T) {
	home := vmHome(t)
	k := newKosa8(t, home, "run", "--memory", "256m", "base", "--", "sh", "-c", "exec tail /dev/zero")
	code := k.start(t).end(t)
	if code != 137 || !strings.Contains(k.errs.String(), "kosa8: the guest ran out of memory and ended \"sh\"\n  give it more than 256 MiB with --memory\n") {
		t.Errorf("code %d, stderr %q", code, k.errs.String())
	}
}

func TestAFullDiskIsTheProgramsOwnError(t *testing.T) {
	home := vmHome(t)
	// Blocks are reserved, not written: nothing is filled on the host.
	k := newKosa8(t, home, "run", "base", "--", "sh", "-c",
		"fallocate -l 200G /big 2>/dev/null || fallocate -l $(($(stat -f -c '%a*%S' /))) /big; echo x > /small; sync; head -c 8388608 /dev/zero > /more; echo code $?")
	if code := k.start(t).end(t); code != 0 || !strings.Contains(k.errs.String(), "No space left on device") || k.out.String() != "code 1\n" {
		t.Errorf("code %d, stdout %q, stderr %q", code, k.out.String(), k.errs.String())
	}
}

func TestAConsoleFloodDisturbsNothing(t *testing.T) {
	home := vmHome(t)
	k := newKosa8(t, home, "run", "base", "--", "sh", "-c", "timeout 5 yes 'noise on the console' > /dev/console; echo still here")
	if code := k.start(t).end(t); code != 0 || k.out.String() != "still here\n" {
		t.Errorf("code %d, stdout %q, stderr %q", code, k.out.String(), k.errs.String())
	}
}

func TestAFullDiskOnTheHostIsNamedAndLeavesNothing(t *testing.T) {
	k := newKosa8(t, vmHome(t), "run", "base", "true")
	k.onSmallDisk(t, "16k")
	code := k.start(t).end(t)
	if code != 1 || !strings.HasPrefix(k.errs.String(), "kosa8: ") || !strings.Contains(k.errs.String(), "no space left") {
		t.Errorf("code %d, stderr %q, want 1 and a line about space", code, k.errs.String())
	}
	if k.out.Len() > 0 {
		t.Errorf("left: %q", k.out.String())
	}
}

func TestAFullHostDiskEndsTheRunWithItsReason(t *testing.T) {
	k := newKosa8(t, vmHome(t), "run", "base", "--", "sh", "-c", "dd if=/dev/urandom of=/root/x bs=1M count=100 conv=fsync; sleep 1000")
	k.onSmallDisk(t, "24m")
	code := k.start(t).end(t)
	if errs := k.errs.String(); code != 1 || !strings.Contains(errs, "the host's disk is full") {
		t.Errorf("code %d, stderr %q", code, errs)
	}
	if k.out.Len() > 0 {
		t.Errorf("left: %q", k.out.String())
	}
}

// onSmallDisk makes the command keep its VMs on a file system of a size, which
// only this command sees, and print afterwards what is left there.
func (k *kosa8) onSmallDisk(t *testing.T, size string) {
	t.Helper()
	vms := filepath.Join(k.home.Dir(), "vms")
	if err := os.Mkdir(vms, 0o700); err != nil {
		t.Fatal(err)
	}
	argv := []string{"unshare", "--mount"}
	if os.Geteuid() != 0 {
		argv = append(argv, "--map-current-user", "--keep-caps") // QEMU must not take us for root
	}
	k.Path, k.Args = "/usr/bin/unshare", append(append(argv, "sh", "-c",
		`mount -t tmpfs -o mode=0700,size=`+size+` none "$WARREN_HOME/vms" && "$@"; code=$?; find "$WARREN_HOME/vms" -mindepth 1 -type d; exit $code`, "sh"), k.Args...)
}
