package snapshots

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func survey(t *testing.T, s *Store) Survey {
	t.Helper()
	found, err := s.Survey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestASurveyOfNothingIsClean(t *testing.T) {
	if got := survey(t, newStore(t)); !got.Clean() || len(got.Kept) > 0 {
		t.Errorf("%+v", got)
	}
}

func TestASurveyFindsWhatCollectWillRemoveAndChangesNothing(t *testing.T) {
	s := newStore(t)
	published(t, s, "base", plan(KindTemplate, ""))
	published(t, s, "kept", plan(KindSnapshot, "base"))
	published(t, s, "fork", plan(KindFork, "base"))
	for _, name := range []string{newPrefix + "killed", deadPrefix + "half"} {
		if err := os.Mkdir(filepath.Join(s.dir(), name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	being, err := s.Draft(t.Context(), "being-made")
	if err != nil {
		t.Fatal(err)
	}
	defer being.Discard()
	old := filepath.Join(s.cacheRoot(ramCache), "another-boot")
	if err := os.MkdirAll(old, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(old, "flat"), make([]byte, 8192), 0o600); err != nil {
		t.Fatal(err)
	}
	running := open(t, s, "fork")
	if got := survey(t, s); len(got.Forks) > 0 {
		t.Errorf("a fork that a VM runs on is called needless: %+v", got)
	}
	running.Close()
	for range 2 {
		got := survey(t, s)
		if !slices.Equal(got.Forks, []string{"fork"}) || got.Leftovers != 2 || got.OldCache < 8192 ||
			!slices.Equal(got.Kept, []string{"kept"}) || len(got.Damaged)+len(got.Unusable) > 0 || got.Clean() {
			t.Errorf("%+v", got)
		}
	}
	done := collect(t, s, nil)
	if !slices.Equal(done.Removed, []string{"fork"}) || done.Leftovers != 2 {
		t.Errorf("%+v", done)
	}
	if got := survey(t, s); !got.Clean() {
		t.Errorf("after Collect %+v", got)
	}
}

func TestASurveyNamesWhatIsOfNoUseWithoutTheDamaged(t *testing.T) {
	s := newStore(t)
	published(t, s, "base", plan(KindTemplate, ""))
	published(t, s, "first", plan(KindSnapshot, "base"))
	published(t, s, "second", plan(KindSnapshot, "first"))
	published(t, s, "other", plan(KindSnapshot, "base"))
	if err := os.Remove(filepath.Join(s.folder("first"), StateName)); err != nil {
		t.Fatal(err)
	}
	got := survey(t, s)
	if !slices.Equal(got.Damaged, []string{"first"}) || !slices.Equal(got.Unusable, []string{"second"}) || !slices.Equal(got.Kept, []string{"other"}) {
		t.Errorf("%+v", got)
	}
}

func TestFilesOfACopiedHomeAreGivenToTheirOwner(t *testing.T) {
	var given []string
	s := newStore(t)
	published(t, s, "base", plan(KindTemplate, "", "base"))
	WithOwner(func(path string) error { given = append(given, filepath.Base(path)); return nil })(s)
	open(t, s, "base").Close()
	// All are this process's own, as those of a home that it copied are.
	if !slices.Contains(given, MemoryName) || !slices.Contains(given, DiskName(0)) || slices.Contains(given, StateName) {
		t.Errorf("given away: %q", given)
	}
}
