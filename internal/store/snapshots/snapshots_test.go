package snapshots

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/warren-vm/warren/internal/store"
)

func newStore(t testing.TB, options ...Option) *Store {
	t.Helper()
	return In(store.Home(filepath.Join(t.TempDir(), "home")), options...)
}

func plan(kind Kind, parent string, disks ...string) Manifest {
	m := Manifest{
		Kind: kind, Label: "a label", Parent: parent, ImageID: "0123456789abcdef01234567",
		Machine: Machine{CPUs: 2, MemMB: 1, Accel: "kvm", QEMU: "7.2.0", CPUModel: "a <cpu>", Firmware: "qboot"},
		Memory:  Memory{Kind: MemoryFlat}, Disks: disks,
	}
	if parent != "" {
		m.Memory = Memory{Kind: MemoryDifference, Bytes: 7}
	}
	return m
}

// fill writes the files that a plan needs.
func fill(t testing.TB, d *Draft, m Manifest) {
	t.Helper()
	if err := fillFiles(d, m); err != nil {
		t.Fatal(err)
	}
}

func fillFiles(d *Draft, m Manifest) error {
	memory := []byte("what changed in " + d.ID())
	if m.Parent == "" {
		memory = make([]byte, 1<<20)
		copy(memory[300<<10:], "memory of "+d.ID())
	}
	files := map[string][]byte{StateName: []byte("state of " + d.ID()), MemoryName: memory}
	if slices.Contains(m.Disks, d.ID()) {
		files[DiskName(0)] = append(make([]byte, 128<<10), "disk of "+d.ID()...)
	}
	for name, data := range files {
		if err := os.WriteFile(d.Path(name), data, 0o600); err != nil {
			return err
		}
	}
	return nil
}

func publish(t testing.TB, s *Store, id string, m Manifest) *Snapshot {
	t.Helper()
	d, err := s.Draft(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	fill(t, d, m)
	sn, err := d.Publish(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sn.Close() })
	return sn
}

// published is publish, not held.
func published(t testing.TB, s *Store, id string, m Manifest) {
	t.Helper()
	if err := publish(t, s, id, m).Close(); err != nil {
		t.Fatal(err)
	}
}

func open(t testing.TB, s *Store, id string) *Snapshot {
	t.Helper()
	sn, err := s.Open(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sn.Close() })
	return sn
}

func listed(t testing.TB, s *Store) []string {
	t.Helper()
	all, problems, err := s.List(t.Context())
	if err != nil || len(problems) > 0 {
		t.Fatal(err, problems)
	}
	ids := []string{}
	for _, m := range all {
		ids = append(ids, m.ID)
	}
	slices.Sort(ids)
	return ids
}

func leftoversIn(t testing.TB, s *Store) []string {
	t.Helper()
	entries, err := os.ReadDir(s.dir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), newPrefix) || strings.HasPrefix(e.Name(), deadPrefix) {
			names = append(names, e.Name())
		}
	}
	return names
}

func wantIs(t testing.TB, err, want error, says ...string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got %v, want %v", err, want)
	}
	for _, text := range says {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%q does not say %q", err, text)
		}
	}
}

func TestWhatIsPublishedOpensAsItWas(t *testing.T) {
	s := newStore(t)
	published(t, s, "base", plan(KindTemplate, "", "base"))
	published(t, s, "one", plan(KindFork, "base", "base", "one"))
	sn := publish(t, s, "two", plan(KindSnapshot, "one", "base", "one"))
	if err := sn.Close(); err != nil {
		t.Fatal(err)
	}
	again := open(t, s, "two")
	m := again.Manifest()
	if m.ID != "two" || m.Format != 1 || m.Created.IsZero() || len(m.Files) != 2 || m.Label != "a label" {
		t.Errorf("manifest %+v", m)
	}
	flat, differences := again.Base()
	if flat != s.folder("base")+"/memory" || !slices.Equal(differences, []string{s.folder("one") + "/memory", s.folder("two") + "/memory"}) {
		t.Errorf("base %s, %s", flat, differences)
	}
	if got := again.Overlays(); !slices.Equal(got, []string{s.folder("base") + "/disk.qcow2", s.folder("one") + "/disk.qcow2"}) {
		t.Errorf("overlays %s", got)
	}
	if data, err := os.ReadFile(again.State()); string(data) != "state of two" {
		t.Error(string(data), err)
	}
	if again.Size() < 8<<10 {
		t.Errorf("size %d", again.Size())
	}
	if got := leftoversIn(t, s); len(got) > 0 {
		t.Error(got)
	}
}

func TestFilesHaveTheModesThatQEMUNeeds(t *testing.T) {
	s := newStore(t)
	published(t, s, "base", plan(KindTemplate, "", "base"))
	for name, want := range map[string]fs.FileMode{
		StateName: 0o400, manifestName: 0o400, MemoryName: 0o600, DiskName(0): 0o600, stampName: 0o600,
	} {
		info, err := os.Stat(filepath.Join(s.folder("base"), name))
		if err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
}

func TestAFlatMemoryKeepsItsHolesAndCountsItsBytes(t *testing.T) {
	s := newStore(t)
	m := plan(KindSnapshot, "")
	d, err := s.Draft(t.Context(), "flat")
	if err != nil {
		t.Fatal(err)
	}
	fill(t, d, m)
	os.Remove(d.Path(MemoryName))
	if err := errors.Join(os.WriteFile(d.Path(MemoryName), []byte("a"), 0o600), os.Truncate(d.Path(MemoryName), 1<<20)); err != nil {
		t.Fatal(err)
	}
	sn, err := d.Publish(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	defer sn.Close()
	if got := sn.Manifest().Memory.Bytes; got <= 0 || got > 64<<10 {
		t.Errorf("%d bytes", got)
	}
}

func TestPublishRefusesWhatDoesNotFit(t *testing.T) {
	s := newStore(t)
	published(t, s, "base", plan(KindTemplate, "", "base"))
	published(t, s, "diskless", plan(KindSnapshot, ""))
	for name, c := range map[string]struct {
		change func(m *Manifest)
		extra  func(d *Draft)
		says   string
	}{
		"no such parent":     {change: func(m *Manifest) { m.Parent = "gone" }, says: "gone"},
		"no such disk":       {change: func(m *Manifest) { m.Disks = []string{"gone"} }, says: "gone"},
		"disk without one":   {change: func(m *Manifest) { m.Disks = []string{"diskless"} }, says: "which has none"},
		"own disk not last":  {change: func(m *Manifest) { m.Disks = []string{"x", "base"} }, says: "not the last"},
		"disk twice":         {change: func(m *Manifest) { m.Disks = []string{"base", "base"} }, says: "twice"},
		"own parent":         {change: func(m *Manifest) { m.Parent = "x" }, says: "parent"},
		"parent of flat":     {change: func(m *Manifest) { m.Memory.Kind = MemoryFlat }, says: "no parent"},
		"other memory":       {change: func(m *Manifest) { m.Machine.MemMB = 2 }, says: "2 MB"},
		"no kind":            {change: func(m *Manifest) { m.Kind = "" }, says: "kind"},
		"long label":         {change: func(m *Manifest) { m.Label = strings.Repeat("a", 201) }, says: "label"},
		"label not UTF-8":    {change: func(m *Manifest) { m.Label = "\xff" }, says: "label"},
		"image id":           {change: func(m *Manifest) { m.ImageID = "../x" }, says: "image"},
		"flat of other size": {change: func(m *Manifest) { m.Parent, m.Memory.Kind = "", MemoryFlat }, says: "the machine 1048576"},
		"no state":           {extra: func(d *Draft) { os.Remove(d.Path(StateName)) }, says: "state"},
		"memory a link": {extra: func(d *Draft) {
			os.Remove(d.Path(MemoryName))
			os.Symlink("/etc/hosts", d.Path(MemoryName))
		}, says: "memory"},
		"disk of nothing": {extra: func(d *Draft) { os.WriteFile(d.Path(DiskName(0)), nil, 0o600) }, says: "not part"},
	} {
		t.Run(name, func(t *testing.T) {
			d, err := s.Draft(t.Context(), "x")
			if err != nil {
				t.Fatal(err)
			}
			defer d.Discard()
			m := plan(KindSnapshot, "base", "base")
			fill(t, d, m)
			if c.change != nil {
				c.change(&m)
			}
			if c.extra != nil {
				c.extra(d)
			}
			if _, err := d.Publish(t.Context(), m); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v", err)
			}
		})
	}
	if got := listed(t, s); !slices.Equal(got, []string{"base", "diskless"}) {
		t.Error(got)
	}
	if got := leftoversIn(t, s); len(got) > 0 {
		t.Error(got)
	}
}

func TestTwoOfOneIDIsAnErrorNotAReplacement(t *testing.T) {
	s := newStore(t)
	m := plan(KindSnapshot, "")
	first, err := s.Draft(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	second, err := s.Draft(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	defer second.Discard()
	fill(t, first, m)
	fill(t, second, m)
	sn, err := first.Publish(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	defer sn.Close()
	_, err = second.Publish(t.Context(), m)
	wantIs(t, err, ErrExists)
	_, err = s.Draft(t.Context(), "x")
	wantIs(t, err, ErrExists)
}

func TestWhatIsNotThereSaysWhatIs(t *testing.T) {
	s := newStore(t)
	_, err := s.Open(t.Context(), "x")
	wantIs(t, err, ErrNotFound, "no snapshots in "+s.dir())
	published(t, s, "here", plan(KindSnapshot, ""))
	_, err = s.Open(t.Context(), "x")
	wantIs(t, err, ErrNotFound, `"x"; there are here`)
	wantIs(t, s.Delete(t.Context(), "x"), ErrNotFound)
	if _, err := s.Open(t.Context(), "../x"); err == nil || !strings.Contains(err.Error(), "snapshot id") {
		t.Error(err)
	}
}

func TestAnotherSnapshotOfTheSameIDIsNotWhatOneWasMadeOn(t *testing.T) {
	s := newStore(t)
	published(t, s, "base", plan(KindTemplate, "", "base"))
	published(t, s, "first", plan(KindSnapshot, "base", "base", "first"))
	published(t, s, "second", plan(KindSnapshot, "first", "base", "first"))
	if err := os.Rename(s.folder("base"), filepath.Join(t.TempDir(), "base")); err != nil {
		t.Fatal(err)
	}
	another := plan(KindTemplate, "", "base")
	another.Label = "made later"
	published(t, s, "base", another)
	open(t, s, "base").Close()
	for _, id := range []string{"first", "second"} {
		_, err := s.Open(t.Context(), id)
		wantIs(t, err, ErrDamaged, "another than the one it was made on")
		wantIs(t, s.Verify(t.Context(), id, nil), ErrDamaged, "another than the one it was made on")
	}
	found, err := s.Survey(t.Context())
	if err != nil || !slices.Equal(found.Unusable, []string{"first", "second"}) {
		t.Errorf("%+v, %v", found, err)
	}
	for _, id := range []string{"second", "first"} {
		if err := s.Delete(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
}

func homeOf(t testing.TB) store.Home {
	return store.Home(filepath.Join(t.TempDir(), "home"))
}
