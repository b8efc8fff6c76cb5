package store

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func newHome(t *testing.T) Home {
	t.Helper()
	return Home(filepath.Join(t.TempDir(), "warren"))
}

func create(t *testing.T, h Home, id string) *VMDir {
	t.Helper()
	d, err := h.CreateVM(id)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// wantVMs checks what is in the vms folder, hidden names included.
func wantVMs(t *testing.T, h Home, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(h.VMsDir())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		if e.Name() != ".lock" {
			got = append(got, e.Name())
		}
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("the vms folder holds %q, want %q", got, want)
	}
}

func TestHomeIsWhereTheEnvironmentSays(t *testing.T) {
	for _, row := range []struct{ name, warren, xdg, want, fault string }{
		{name: "warren", warren: "/w", xdg: "/x", want: "/w"},
		{name: "xdg", xdg: "/x", want: "/x/warren"},
		{name: "neither", want: "/home/u/.local/share/warren"},
		{name: "relative", warren: "w", fault: `WARREN_HOME is "w"; set it to an absolute path or unset it`},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Setenv("HOME", "/home/u")
			t.Setenv("WARREN_HOME", row.warren)
			t.Setenv("XDG_DATA_HOME", row.xdg)
			got, err := DefaultHome()
			if row.fault != "" {
				if err == nil || err.Error() != row.fault {
					t.Fatalf("error %v, want %s", err, row.fault)
				}
				return
			}
			if err != nil || string(got) != row.want {
				t.Fatalf("%q, %v; want %q", got, err, row.want)
			}
		})
	}
}

func TestVMFolderIsPrivateAndHeld(t *testing.T) {
	h := newHome(t)
	d := create(t, h, "one")
	for _, path := range []string{h.Dir(), h.VMsDir(), d.Path} {
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v; want 0700", path, info.Mode(), err)
		}
	}
	vms, err := h.VMs()
	if err != nil || len(vms) != 1 || vms[0].ID != "one" || !vms[0].Held {
		t.Fatalf("%+v, %v", vms, err)
	}
	d.Close()
	if vms, err = h.VMs(); err != nil || len(vms) != 1 || vms[0].Held {
		t.Fatalf("after close: %+v, %v", vms, err)
	}
}

func TestCreateVMRefusesATakenNameAndABadOne(t *testing.T) {
	h := newHome(t)
	create(t, h, "one")
	if _, err := h.CreateVM("one"); !errors.Is(err, ErrExists) {
		t.Errorf("second create: %v", err)
	}
	for _, id := range []string{"", "a/b", "..", ".new-x", "A", "-a", strings.Repeat("a", 64)} {
		if _, err := h.CreateVM(id); err == nil || !strings.Contains(err.Error(), "use 1 to 63 of") {
			t.Errorf("id %q: %v", id, err)
		}
	}
	wantVMs(t, h, "one")
}

func TestLockPassesToAChildWithoutAGap(t *testing.T) {
	h := newHome(t)
	d := create(t, h, "one")
	child := exec.Command("sleep", "1000")
	child.ExtraFiles = []*os.File{d.LockFile()}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	d.Close()
	if swept, err := h.Sweep(t.Context()); err != nil || len(swept.Removed) != 0 {
		t.Errorf("the child holds it, yet: %+v, %v", swept, err)
	}
	child.Process.Kill()
	child.Wait()
	if swept, err := h.Sweep(t.Context()); err != nil || len(swept.Removed) != 1 {
		t.Errorf("the child is gone, yet: %+v, %v", swept, err)
	}
	wantVMs(t, h)
}

func TestAdoptVMRefusesALockThatIsNotTheFoldersOwn(t *testing.T) {
	h := newHome(t)
	one, two := create(t, h, "one"), create(t, h, "two")
	if _, err := AdoptVM(one.Path, two.LockFile()); err == nil || !strings.Contains(err.Error(), "another folder") {
		t.Errorf("foreign lock: %v", err)
	}
	again, err := os.OpenFile(filepath.Join(one.Path, lockName), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if _, err := AdoptVM(one.Path, again); !errors.Is(err, ErrHeld) {
		t.Errorf("lock held by another: %v", err)
	}
	if _, err := AdoptVM(one.Path, one.LockFile()); err != nil {
		t.Errorf("its own lock: %v", err)
	}
}

func TestRemoveLeavesNothingAndFreesTheName(t *testing.T) {
	h := newHome(t)
	d := create(t, h, "one")
	if err := os.WriteFile(filepath.Join(d.Path, "memory"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.Remove(); err != nil {
		t.Fatal(err)
	}
	wantVMs(t, h)
	create(t, h, "one")
}

func TestRecordComesBackAsWritten(t *testing.T) {
	h := newHome(t)
	d := create(t, h, "one")
	self, err := FindProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if err := d.WriteRecord(Record{ID: "one", Supervisor: self, Outlive: true}); err != nil {
		t.Fatal(err)
	}
	got, err := ReadRecord(d.Path)
	if err != nil || got.Supervisor != self || !got.Outlive {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := ReadRecord(h.VMDir("none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no record: %v", err)
	}
}
