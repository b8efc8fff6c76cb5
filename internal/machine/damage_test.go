package machine_test

import (
	"crypto/rand"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestimage"
	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/vm"
)

// flip changes one byte of a file in place.
func flip(t *testing.T, path string, at int64) {
	t.Helper()
	f := writable(t, path)
	defer f.Close()
	var b [1]byte
	_, err := f.ReadAt(b[:], at)
	if err == nil {
		b[0] ^= 0x40
		_, err = f.WriteAt(b[:], at)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func writable(t *testing.T, path string) *os.File {
	t.Helper()
	os.Chmod(path, 0o600)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// scribble replaces all of a file by random bytes.
func scribble(t *testing.T, path string) {
	t.Helper()
	f := writable(t, path)
	defer f.Close()
	if _, err := io.CopyN(f, rand.Reader, 64<<10); err != nil {
		t.Fatal(err)
	}
}

// forge publishes a copy of a snapshot with another manifest, and files as
// change leaves them; its digests are right.
func forge(t *testing.T, id string, manifest func(*snapshots.Manifest), change map[string]func(path string)) string {
	t.Helper()
	ctx, s := testContext(t), snapshots.In(home)
	was, err := s.Open(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	defer was.Close()
	m := was.Manifest()
	d, err := s.Draft(ctx, snapshots.NewID())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Discard()
	for _, f := range m.Files {
		if err := store.CopySparse(filepath.Join(home.SnapshotsDir(), id, f.Name), d.Path(f.Name)); err != nil {
			t.Fatal(err)
		}
		if err := vm.Own(d.Path(f.Name)); err != nil {
			t.Fatal(err)
		}
		if change[f.Name] != nil {
			change[f.Name](d.Path(f.Name))
		}
	}
	if i := slices.Index(m.Disks, id); i >= 0 {
		m.Disks[i] = d.ID()
	}
	manifest(&m)
	made, err := d.Publish(ctx, m)
	if err != nil {
		t.Fatal(err)
	}
	made.Close()
	return d.ID()
}

// wantRefused checks that a snapshot is not restored, soon, and that nothing
// of the attempt is left.
func wantRefused(t *testing.T, id string, kind error, words ...string) {
	t.Helper()
	folders, processes := vmFolders(), qemus(t)
	began := time.Now()
	m, err := machine.Restore(testContext(t), id, options())
	took := time.Since(began)
	if err == nil {
		closeMachine(t, m)
		t.Fatal("it was restored")
	}
	if kind != nil && !errors.Is(err, kind) {
		t.Errorf("err %q, want %v", err, kind)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("err %q, want one with %q", err, word)
		}
	}
	if took > 20*time.Second {
		t.Errorf("it was refused after %v", took)
	}
	if now := vmFolders(); len(now) != len(folders) {
		t.Errorf("folders: %q before, %q after", folders, now)
	}
	if now := qemus(t); len(now) != len(processes) {
		t.Errorf("processes of QEMU: %q before, %q after", processes, now)
	}
	t.Logf("%v: %v", took.Round(time.Millisecond), err)
}

// qemus are the processes of the tests' own VMs.
func qemus(t *testing.T) (pids []string) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range all {
		data, _ := os.ReadFile(path)
		if strings.Contains(string(data), "qemu-system") && descends(filepath.Base(filepath.Dir(path)), os.Getpid()) {
			pids = append(pids, filepath.Base(filepath.Dir(path)))
		}
	}
	return pids
}

func TestWhatCannotBeRestoredIsRefusedBeforeAVMStarts(t *testing.T) {
	m := create(t)
	tell(t, m, "echo one > /root/f; sync")
	one := save(t, m)
	closeMachine(t, m)
	m = create(t)
	tell(t, m, "echo two > /root/f; head -c 100000 /dev/urandom > /root/g; sync")
	two := save(t, m)
	closeMachine(t, m)
	if !one.DiskChanged || !two.DiskChanged {
		t.Fatal("the snapshots have no disk")
	}
	path := func(name string) string { return filepath.Join(home.SnapshotsDir(), one.ID, name) }

	for _, name := range []string{"state", "memory", "disk.qcow2", "manifest.json"} {
		data, err := os.ReadFile(path(name))
		if err != nil {
			t.Fatal(err)
		}
		other, err := os.ReadFile(filepath.Join(home.SnapshotsDir(), two.ID, name))
		if err != nil {
			t.Fatal(err)
		}
		flipped := slices.Clone(data)
		flipped[len(flipped)/2] ^= 1
		for how, content := range map[string][]byte{
			"one bit": flipped, "cut short": data[:len(data)-1], "empty": {}, "another's": other, "longer": append(slices.Clone(data), 0),
		} {
			t.Run(name+", "+how, func(t *testing.T) {
				if name == "memory" || name == "state" || name == "disk.qcow2" {
					if string(content) == string(data) {
						t.Skip("both have the same")
					}
				}
				overwrite(t, path(name), content)
				wantRefused(t, one.ID, snapshots.ErrDamaged, one.ID)
			})
		}
		t.Run(name+", missing", func(t *testing.T) {
			if err := os.Rename(path(name), path("away")); err != nil {
				t.Fatal(err)
			}
			wantRefused(t, one.ID, snapshots.ErrDamaged, one.ID)
			os.Rename(path("away"), path(name))
		})
		overwrite(t, path(name), data)
	}
	m = restore(t, one.ID) // put back it is as good as before
	if got := tell(t, m, "cat /root/f"); got != "one" {
		t.Errorf("got %q", got)
	}
	closeMachine(t, m)

	nothing := map[string]func(string){}
	for _, tt := range []struct {
		name   string
		change func(*snapshots.Manifest)
		files  map[string]func(string)
		kind   error
		word   string
	}{
		{"another QEMU", func(m *snapshots.Manifest) { m.Machine.QEMU = "9.9.9 (other)" }, nothing, machine.ErrIncompatible, "9.9.9"},
		{"another processor", func(m *snapshots.Manifest) { m.Machine.CPUModel = "Z80" }, nothing, machine.ErrIncompatible, "Z80"},
		{"another firmware", func(m *snapshots.Manifest) { m.Machine.Firmware = "OpenBoot" }, nothing, machine.ErrIncompatible, "OpenBoot"},
		{"another image", func(m *snapshots.Manifest) { m.ImageID = strings.Repeat("ab", 12) }, nothing, guestimage.ErrNotBuilt, "abab"},
		{"devices that are none", func(*snapshots.Manifest) {}, map[string]func(string){"state": func(p string) { scribble(t, p) }}, nil, "device"},
		{"memory that is none", func(*snapshots.Manifest) {}, map[string]func(string){"memory": func(p string) { scribble(t, p) }}, nil, "memory"},
		{"a disk that is none", func(*snapshots.Manifest) {}, map[string]func(string){"disk.qcow2": func(p string) { scribble(t, p) }}, nil, "QEMU"},
		{"half the devices", func(*snapshots.Manifest) {}, map[string]func(string){"state": func(p string) { os.Truncate(p, 20000) }}, nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			id := forge(t, one.ID, tt.change, tt.files)
			wantRefused(t, id, tt.kind, tt.word)
			if err := snapshots.In(home).Delete(testContext(t), id); err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("a newer format", func(t *testing.T) {
		data, err := os.ReadFile(path("manifest.json"))
		if err != nil {
			t.Fatal(err)
		}
		overwrite(t, path("manifest.json"), []byte(strings.Replace(string(data), `"format": 1`, `"format": 9`, 1)))
		wantRefused(t, one.ID, snapshots.ErrNewer)
		overwrite(t, path("manifest.json"), data)
	})
	t.Run("a folder of somebody else", func(t *testing.T) {
		dir := filepath.Join(home.SnapshotsDir(), "foreign")
		os.MkdirAll(dir, 0o700)
		os.WriteFile(filepath.Join(dir, "readme"), []byte("mine"), 0o600)
		wantRefused(t, "foreign", snapshots.ErrDamaged)
		os.RemoveAll(dir)
	})
	wantRefused(t, "s-nowhere", snapshots.ErrNotFound)
	wantRefused(t, "../../etc", nil)
	for _, id := range []string{one.ID, two.ID} {
		if err := snapshots.In(home).Delete(testContext(t), id); err != nil {
			t.Error(err)
		}
	}
}

// overwrite changes a file's content in place.
func overwrite(t *testing.T, path string, data []byte) {
	t.Helper()
	f := writable(t, path)
	defer f.Close()
	err := f.Truncate(0)
	if err == nil {
		_, err = f.WriteAt(data, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestADamagedTemplateIsReplacedAlthoughSnapshotsNeedIt(t *testing.T) {
	o := small()
	o.CPUs, o.MemMB = 1, 192
	m, err := machine.Create(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	info := save(t, m)
	defer closeMachine(t, m)
	id, err := machine.Template(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(home.SnapshotsDir(), id, "state")
	flip(t, state, 1000)
	next, err := machine.Create(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	tell(t, next, "true")
	closeMachine(t, next)
	if now, err := machine.Template(testContext(t), o); err != nil || now == id {
		t.Errorf("the template was %s, is %s (%v)", id, now, err)
	}
	flip(t, state, 1000)
	if err := snapshots.In(home).Verify(testContext(t), info.ID, nil); err != nil {
		t.Error(err)
	}
}

// Whoever has an archive of a home's template, removed there since, could make
// another of that id.
func TestAnotherTemplateOfTheSameIDIsNotUsed(t *testing.T) {
	o := small()
	o.CPUs, o.MemMB = 1, 208
	id, err := machine.Template(testContext(t), o)
	if err != nil {
		t.Fatal(err)
	}
	file := appointmentOf(t, id)
	for name, said := range map[string]string{"another digest": id + " " + strings.Repeat("0", 64), "no digest": id} {
		if err := os.WriteFile(file, []byte(said), 0o600); err != nil {
			t.Fatal(err)
		}
		now, err := machine.Template(testContext(t), o)
		if err != nil || now == id {
			t.Errorf("%s: template %s is used as one that was made here (%v)", name, id, err)
		}
		id = now
	}
	if again, err := machine.Template(testContext(t), o); err != nil || again != id {
		t.Errorf("template %s was not used again but %s (%v)", id, again, err)
	}
}

// appointmentOf is the file of the cache that says which template is in use.
func appointmentOf(t *testing.T, id string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(home.Cache(), "template-*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if data, err := os.ReadFile(file); err == nil && strings.HasPrefix(string(data), id+" ") {
			return file
		}
	}
	t.Fatalf("no file of %s names template %s", home.Cache(), id)
	return ""
}
