package machine_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/supervisor"
	"github.com/warren-vm/warren/internal/supervisor/server"
)

// supervise is what abox-vmm does, with a disk that fails as a file in the home
// says: the n-th write from when it was written, and with which error. This
// test binary is started as a supervisor for it.
func supervise() error {
	config, err := supervisor.ReadConfig(os.Stdin)
	if err != nil {
		return err
	}
	dir, err := store.AdoptVM(config.Dir, os.NewFile(supervisor.LockFD, "lock"))
	if err != nil {
		return err
	}
	unix.CloseOnExec(supervisor.LockFD)
	unix.CloseOnExec(supervisor.OwnerFD)
	unix.SetNonblock(supervisor.OwnerFD, true)
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGPIPE)
	return server.Run(context.Background(), server.Options{
		Config: config, Dir: dir, Events: os.Stdout, Owner: os.NewFile(supervisor.OwnerFD, "owner"),
		Faults: faultsOf(store.HomeOf(config.Dir)),
	})
}

// faultsOf fails writes as the file says; what was hit goes to another file.
func faultsOf(home store.Home) func(snapshots.Op, string) error {
	var last string
	var count int
	return func(op snapshots.Op, path string) error {
		plan, err := os.ReadFile(filepath.Join(home.Dir(), "fault"))
		if err != nil {
			return nil
		}
		if string(plan) != last {
			last, count = string(plan), 0
		}
		var round, n, errno int
		fmt.Sscan(last, &round, &n, &errno)
		if count++; count != n {
			return nil
		}
		os.WriteFile(filepath.Join(home.Dir(), "fault-hit"), []byte(string(op)+" "+path), 0o600)
		return syscall.Errno(errno)
	}
}

func TestAWriteThatFailsCostsTheSnapshotAndNothingElse(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := machine.Template(testContext(t), small()); err != nil {
		t.Fatal(err)
	}
	o := small()
	o.VMM = self
	m, err := machine.Create(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeMachine(t, m) })
	python(t, m, count)
	awaits(t, m, "test -e /dev/shm/n")
	plan, hit := filepath.Join(home.Dir(), "fault"), filepath.Join(home.Dir(), "fault-hit")
	t.Cleanup(func() { os.Remove(plan); os.Remove(hit) })

	errnos := []syscall.Errno{syscall.ENOSPC, syscall.EIO, syscall.EROFS}
	row, most, failures := 0, 0, 0
	for n := 1; n < 60; n++ {
		errno := errnos[n%len(errnos)]
		os.Remove(hit)
		const look = "cat /root/n /dev/shm/m; cat /root/r* | sha256sum"
		sums := tell(t, m, fmt.Sprintf("echo %d > /root/n; echo %d > /dev/shm/m; head -c 50000 /dev/urandom > /root/r%d; sync; ", n, n, n%5)+look)
		if err := os.WriteFile(plan, fmt.Appendf(nil, "%d %d %d", n, n, int(errno)), 0o600); err != nil {
			t.Fatal(err)
		}
		info, err := m.Save(testContext(t), "")
		os.Remove(plan)
		where, _ := os.ReadFile(hit)
		if len(where) == 0 {
			if err != nil {
				t.Fatalf("no write failed, and yet: %v", err)
			}
			t.Logf("a snapshot takes %d writes; %d failed, up to %d in a row", n-1, failures, most)
			break
		}
		if err == nil {
			if strings.Contains(string(where), home.Cache()) {
				continue // a flat file that is made aside
			}
			t.Fatalf("%s failed, and the snapshot %s is said to be there", where, info.ID)
		}
		if !strings.Contains(err.Error(), errno.Error()) {
			t.Errorf("%s: err %q does not say %q", where, err, errno.Error())
		}
		failures, row = failures+1, row+1
		most = max(most, row)
		// The machine is as it was.
		began := time.Now()
		if got := tell(t, m, look); got != sums {
			t.Errorf("%s: has %q, had %q", where, got, sums)
		}
		if soak || n%7 == 0 {
			wantCounting(t, m)
		}
		if took := time.Since(began); took > time.Minute {
			t.Errorf("%s: it took %v to answer", where, took)
		}
		if n%7 != 0 && !soak {
			continue // several may fail one after the other
		}
		// The next one holds all of it, with what was frozen in vain.
		sums = tell(t, m, "echo more > /root/more; test $(( $(cat /root/n) % 8 )) = 0 || sync; "+look)
		id := save(t, m).ID
		row = 0
		c := restore(t, id)
		if got := tell(t, c, look); got != sums {
			t.Errorf("after %s: the copy has %q, the original %q", where, got, sums)
		}
		tell(t, c, "echo 3 > /proc/sys/vm/drop_caches; cat /root/more /root/r* > /dev/null; dmesg | grep -i 'ext4.*error' && exit 1; true")
		wantCounting(t, c)
		closeMachine(t, c)
		if err := snapshots.In(home).Verify(testContext(t), id, nil); err != nil {
			t.Error(err)
		}
	}
	if failures < 15 {
		t.Errorf("only %d writes failed", failures)
	}
	if left, _ := filepath.Glob(filepath.Join(home.SnapshotsDir(), ".[nd]e*")); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestHoweverManySnapshotsFailedTheNextHasItAll(t *testing.T) {
	self, _ := os.Executable()
	if _, err := machine.Template(testContext(t), small()); err != nil {
		t.Fatal(err)
	}
	o := small()
	o.VMM = self
	m, err := machine.Create(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeMachine(t, m) })
	plan := filepath.Join(home.Dir(), "fault")
	t.Cleanup(func() { os.Remove(plan); os.Remove(plan + "-hit") })
	const failures = snapshots.MaxOverlays + 3
	for i := range failures {
		tell(t, m, fmt.Sprintf("echo %d | tee /root/n > /root/n%d; sync", i, i))
		os.WriteFile(plan, fmt.Appendf(nil, "%d %d %d", i, 5, int(syscall.EIO)), 0o600)
		_, err := m.Save(testContext(t), "")
		os.Remove(plan)
		if err == nil || !strings.Contains(err.Error(), syscall.EIO.Error()) {
			t.Fatalf("snapshot %d: %v", i, err)
		}
	}
	info := save(t, m)
	if made, err := snapshots.In(home).Open(testContext(t), info.ID); err != nil || made.Manifest().Parent != "" {
		t.Errorf("more overlays than a snapshot can have, and it is no root: %v", err)
	} else {
		made.Close()
	}
	c := restore(t, info.ID)
	if got := tell(t, c, "cat /root/n; ls /root/n* | wc -l"); got != fmt.Sprintf("%d\n%d", failures-1, failures+1) {
		t.Errorf("the copy has %q", got)
	}
	closeMachine(t, c)
	tell(t, m, "echo on > /root/n; sync")
	c = restore(t, save(t, m).ID)
	if got := tell(t, c, "cat /root/n"); got != "on" {
		t.Errorf("the snapshot after it has %q", got)
	}
}

func TestAFullDiskCostsTheSnapshotAlone(t *testing.T) {
	dir := smallDisk(t, "420M")
	full := store.Home(filepath.Join(dir, "home"))
	if err := full.Make(); err != nil {
		t.Fatal(err)
	}
	os.Remove(full.Guest())
	guest, err := filepath.EvalSymlinks(home.Guest())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(guest, full.Guest()); err != nil {
		t.Fatal(err)
	}
	o := small()
	o.Home = full.Dir()
	m, err := machine.Create(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close(context.Background())
	if _, err := m.Save(testContext(t), ""); err != nil {
		t.Fatal(err)
	}
	tell(t, m, "echo here > /root/f; head -c 40000000 /dev/urandom > /dev/shm/r; sync")
	sum := tell(t, m, "sha256sum < /dev/shm/r; cat /root/f")
	python(t, m, count)
	awaits(t, m, "test -e /dev/shm/n")
	fill(t, dir, 12<<20)
	overlays := -1
	for try := range 4 {
		_, err = m.Save(testContext(t), "")
		if err == nil || !errors.Is(err, syscall.ENOSPC) && !strings.Contains(err.Error(), syscall.ENOSPC.Error()) {
			t.Fatalf("try %d: err %v", try, err)
		}
		if !strings.Contains(err.Error(), "free some space") {
			t.Errorf("err %q gives no advice", err)
		}
		wantCounting(t, m)
		made, _ := filepath.Glob(filepath.Join(m.Dir(), "data*.qcow2"))
		if overlays >= 0 && len(made) != overlays {
			t.Errorf("try %d: %d overlays, there were %d", try, len(made), overlays)
		}
		overlays = len(made)
	}
	if got := tell(t, m, "sha256sum < /dev/shm/r; cat /root/f"); got != sum {
		t.Errorf("has %q, had %q", got, sum)
	}
	if err := os.Remove(filepath.Join(dir, "filler")); err != nil {
		t.Fatal(err)
	}
	info, err := m.Save(testContext(t), "")
	if err != nil {
		t.Fatal(err)
	}
	o.CPUs, o.MemMB = 0, 0
	c, err := machine.Restore(testContext(t), info.ID, o)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(context.Background())
	if got := tell(t, c, "sha256sum < /dev/shm/r; cat /root/f"); got != sum {
		t.Errorf("the copy has %q, the original %q", got, sum)
	}
	wantCounting(t, c)
}

// smallDisk mounts a disk of its own. It is no tmpfs: there a guest that only
// reads memory nobody has written takes space, and on a full one it ends.
func smallDisk(t *testing.T, size string) string {
	t.Helper()
	image, dir := filepath.Join(t.TempDir(), "disk"), t.TempDir()
	for _, argv := range [][]string{
		{"truncate", "-s", size, image},
		{"mkfs.ext4", "-q", "-m", "0", image},
		{"mount", "-o", "loop", image, dir},
	} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Skipf("cannot mount a small disk: %q: %v: %s", argv, err, out)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil { // a jail that ends may have it still
			t.Error(err)
		}
	})
	return dir
}

// fill leaves so many bytes of a file system free.
func fill(t *testing.T, dir string, leave int64) {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(st.Bavail)*st.Bsize-leave); err != nil {
		t.Fatal(err)
	}
}
