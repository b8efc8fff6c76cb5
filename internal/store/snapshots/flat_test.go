package snapshots

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

func TestAFlatIsMadeOnceAndFound(t *testing.T) {
	s := newStore(t)
	published(t, s, "base", plan(KindTemplate, ""))
	published(t, s, "one", plan(KindFork, "base"))
	published(t, s, "two", plan(KindSnapshot, "one"))
	one := open(t, s, "one")
	if _, ok := one.Flat(); ok {
		t.Fatal("a flat before it was made")
	}
	built := 0
	build := func(dst *os.File, base string, differences []string) error {
		built++
		if base != filepath.Join(s.folder("base"), MemoryName) || len(differences) != 1 {
			t.Error(base, differences)
		}
		return buildFlat(dst, base, differences)
	}
	path, err := one.MakeFlat(t.Context(), build)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := open(t, In(s.home), "one").MakeFlat(t.Context(), build); again != path || err != nil || built != 1 {
		t.Error(again, err, built)
	}
	two := open(t, s, "two")
	if flat, differences := two.Base(); flat != path || !slices.Equal(differences, []string{s.folder("two") + "/memory"}) {
		t.Error(flat, differences)
	}
	// Another file in its place is not the one that was made.
	if err := os.Rename(path, path+".x"); err != nil {
		t.Fatal(err)
	}
	os.WriteFile(path, make([]byte, 1<<20), 0o600)
	if flat, ok := open(t, s, "one").Flat(); ok {
		t.Error(flat)
	}
}

func TestTheCacheKeepsWhatIsHeldAndTheNewest(t *testing.T) {
	s := newStore(t)
	published(t, s, "base", plan(KindTemplate, ""))
	var first *Snapshot
	for i := range 11 {
		id := fmt.Sprintf("s%d", i)
		sn := publish(t, s, id, plan(KindSnapshot, "base"))
		path, err := sn.MakeFlat(t.Context(), buildFlat)
		if err != nil {
			t.Fatal(err)
		}
		at := time.Now().Add(time.Duration(i-100) * time.Minute)
		os.Chtimes(stampOf(path), at, at)
		if i == 0 {
			first = sn
		} else {
			sn.Close()
		}
	}
	old := filepath.Join(s.cacheRoot(ramCache), "another-boot")
	if err := os.MkdirAll(old, 0o700); err != nil {
		t.Fatal(err)
	}
	dir, _ := s.cacheDir(ramCache)
	for _, id := range []string{"s1", "s2"} { // went when others were made
		for _, end := range []string{"", ".stamp", ".lock"} {
			if _, err := os.Lstat(filepath.Join(dir, id+end)); err == nil {
				t.Errorf("beyond the newest: %s%s", id, end)
			}
		}
	}
	if got := collect(t, s, nil); len(got.Flats) > 0 {
		t.Error(got.Flats)
	}
	if _, err := os.Stat(old); err == nil {
		t.Error("the cache of another boot is still there")
	}
	if _, ok := first.Flat(); !ok { // it is the newest now
		t.Error("a held flat went")
	}
	first.Close()
	if got := collect(t, s, nil); !slices.Equal(got.Flats, []string{"s3"}) {
		t.Error(got.Flats)
	}
	if err := s.Delete(t.Context(), "s10"); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(dir + "/s10*"); len(left) > 0 {
		t.Error(left)
	}
}
