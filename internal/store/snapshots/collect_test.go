package snapshots

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/warren-vm/warren/internal/store"
)

func collect(t testing.TB, s *Store, keepTemplate func(Manifest) bool) Collected {
	t.Helper()
	done, err := s.Collect(t.Context(), keepTemplate)
	if err != nil {
		t.Fatal(err)
	}
	return done
}

func TestWhatIsNeededIsNotDeleted(t *testing.T) {
	s := newStore(t)
	published(t, s, "base", plan(KindTemplate, "", "base"))
	for i := range 5 {
		published(t, s, fmt.Sprintf("s%d", i), plan(KindSnapshot, "base"))
	}
	wantIs(t, s.Delete(t.Context(), "base"), ErrNeeded, "snapshot base is needed by s0, s1, s2 and 2 more")
	for i := range 5 {
		if err := s.Delete(t.Context(), fmt.Sprintf("s%d", i)); err != nil {
			t.Fatal(err)
		}
	}
	published(t, s, "top", plan(KindSnapshot, "", "base"))
	wantIs(t, s.Delete(t.Context(), "base"), ErrNeeded, "needed by top")
	sn := open(t, s, "top")
	wantIs(t, s.Delete(t.Context(), "top"), ErrNeeded, "running VM")
	sn.Close()
	for _, id := range []string{"top", "base"} {
		if err := s.Delete(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	if got := append(listed(t, s), leftoversIn(t, s)...); len(got) > 0 {
		t.Error(got)
	}
}

func TestForksGoWithWhatNeededThemAndSnapshotsStay(t *testing.T) {
	s := newStore(t)
	published(t, s, "base", plan(KindTemplate, ""))
	published(t, s, "f1", plan(KindFork, "base"))
	published(t, s, "f2", plan(KindFork, "f1"))
	published(t, s, "kept", plan(KindSnapshot, "f1"))
	running := open(t, s, "f2")
	if got := collect(t, s, nil); len(got.Removed) > 0 {
		t.Fatal("removed what a VM runs on", got.Removed)
	}
	running.Close()
	got := collect(t, s, nil)
	if !slices.Equal(got.Removed, []string{"f2"}) || got.Bytes <= 0 {
		t.Error(got)
	}
	if err := s.Delete(t.Context(), "kept"); err != nil {
		t.Fatal(err)
	}
	no := func(Manifest) bool { return false }
	if got := collect(t, s, no); !slices.Equal(got.Removed, []string{"f1", "base"}) {
		t.Error(got)
	}
	if got := append(listed(t, s), leftoversIn(t, s)...); len(got) > 0 {
		t.Error(got)
	}
}

func TestNothingIsCollectedWhileNeedsAreUnknown(t *testing.T) {
	s := newStore(t)
	published(t, s, "base", plan(KindTemplate, ""))
	published(t, s, "other", plan(KindFork, ""))
	published(t, s, "top", plan(KindSnapshot, "base"))
	path := filepath.Join(s.folder("top"), manifestName)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	os.Chmod(path, 0o600)
	if err := os.WriteFile(path, []byte(strings.Replace(string(data), `"format": 1`, `"format": 2`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	got := collect(t, s, func(Manifest) bool { return false })
	if len(got.Removed) > 0 || len(got.Unreadable) != 1 {
		t.Error(got)
	}
	wantIs(t, s.Delete(t.Context(), "base"), ErrNeeded, "by top")
	if err := s.Delete(t.Context(), "top"); err != nil {
		t.Fatal(err)
	}
	if got := collect(t, s, func(Manifest) bool { return false }); len(got.Removed) != 2 {
		t.Error(got)
	}
}

func TestCollectLeavesDraftsInTheMakingAlone(t *testing.T) {
	s := newStore(t)
	d, err := s.Draft(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	m := plan(KindSnapshot, "")
	fill(t, d, m)
	dead := s.temporary(deadPrefix, "y")
	if err := os.MkdirAll(filepath.Join(dead, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	if got := collect(t, s, nil); got.Leftovers != 1 {
		t.Error(got)
	}
	sn, err := d.Publish(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	sn.Close()
	left, err := s.Draft(t.Context(), "z")
	if err != nil {
		t.Fatal(err)
	}
	left.lock.Close() // as the kernel does for a killed process
	if got := collect(t, s, nil); got.Leftovers != 1 {
		t.Error(got)
	}
	if got := leftoversIn(t, s); len(got) > 0 {
		t.Error(got)
	}
}

func TestAMissingParentIsDamageAndCyclesAreFound(t *testing.T) {
	s := newStore(t)
	published(t, s, "a", plan(KindSnapshot, ""))
	published(t, s, "b", plan(KindSnapshot, "a"))
	if err := os.Rename(s.folder("a"), s.folder("c")); err != nil {
		t.Fatal(err)
	}
	_, err := s.Open(t.Context(), "b")
	wantIs(t, err, ErrDamaged, "snapshot b", "snapshot a is gone")
	_, err = s.Open(t.Context(), "c")
	wantIs(t, err, ErrDamaged, "that of snapshot a")
	m, err := readManifest(s.folder("b"), "b")
	if err != nil {
		t.Fatal(err)
	}
	m.ID, m.Parent, m.NeedsSHA256 = "a", "b", nil
	m.SHA256 = m.sum()
	if err := os.Mkdir(s.folder("a"), 0o700); err != nil {
		t.Fatal(err)
	}
	os.WriteFile(filepath.Join(s.folder("a"), lockName), nil, 0o600)
	os.WriteFile(filepath.Join(s.folder("a"), manifestName), m.encode(), 0o400)
	_, err = s.Open(t.Context(), "b")
	wantIs(t, err, ErrDamaged, "needs itself")
}

func TestALongChainOpens(t *testing.T) {
	s := newStore(t)
	published(t, s, "s0", plan(KindTemplate, ""))
	for i := 1; i <= 200; i++ {
		published(t, s, fmt.Sprintf("s%d", i), plan(KindFork, fmt.Sprintf("s%d", i-1)))
	}
	sn := open(t, s, "s200")
	if _, differences := sn.Base(); len(differences) != 200 {
		t.Error(len(differences))
	}
	if got := collect(t, s, nil); len(got.Removed) > 0 {
		t.Error(got)
	}
	sn.Close()
	if got := collect(t, s, nil); len(got.Removed) != 200 {
		t.Error(len(got.Removed))
	}
}

func TestOneTemplateIsMadeAtATime(t *testing.T) {
	s := newStore(t)
	release, err := s.TemplateLock(t.Context(), "key", func() {})
	if err != nil {
		t.Fatal(err)
	}
	collect(t, s, nil)
	other, err := s.TemplateLock(t.Context(), "other", func() { t.Error("waits for another key") })
	if err != nil {
		t.Fatal(err)
	}
	other()
	got := make(chan error)
	go func() {
		again, err := In(s.home).TemplateLock(t.Context(), "key", func() {})
		if err == nil {
			again()
		}
		got <- err
	}()
	select {
	case <-got:
		t.Error("two at once")
	case <-time.After(50 * time.Millisecond):
	}
	release()
	if err := <-got; err != nil {
		t.Error(err)
	}
	collect(t, s, nil)
	if names, _ := filepath.Glob(s.dir() + "/.template*"); len(names) > 0 {
		t.Error(names)
	}
}

func TestAReadOnlyLookMakesNothing(t *testing.T) {
	home := store.Home(filepath.Join(t.TempDir(), "home"))
	s := In(home)
	if got := listed(t, s); len(got) > 0 {
		t.Error(got)
	}
	collect(t, s, nil)
	if _, err := os.Stat(home.Dir()); err == nil {
		t.Error("it made the home")
	}
}

func TestAllAtOnceDoNotDisturbEachOther(t *testing.T) {
	s := newStore(t)
	published(t, s, "base", plan(KindTemplate, "", "base"))
	published(t, s, "shared", plan(KindSnapshot, "base"))
	var built atomic.Int32
	var all errgroup.Group
	for range 4 {
		all.Go(func() error {
			for range 6 {
				if err := oneOfMany(t.Context(), s, &built); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		t.Fatal(err)
	}
	if built.Load() != 1 {
		t.Errorf("the flat was made %d times", built.Load())
	}
	collect(t, s, nil)
	if got := append(listed(t, s), leftoversIn(t, s)...); !slices.Equal(got, []string{"base", "shared"}) {
		t.Error(got)
	}
}

func oneOfMany(ctx context.Context, s *Store, built *atomic.Int32) error {
	id := NewID()
	sn, err := churnPublish(ctx, s, id, plan(KindSnapshot, "shared", "base", id))
	if err != nil {
		return err
	}
	shared, err := s.Open(ctx, "shared")
	if err != nil {
		return err
	}
	_, err = shared.MakeFlat(ctx, func(dst *os.File, base string, differences []string) error {
		built.Add(1)
		return buildFlat(dst, base, differences)
	})
	if err != nil {
		return err
	}
	if flat, differences := sn.Base(); !strings.HasSuffix(flat, "shared") || len(differences) != 1 {
		return fmt.Errorf("base %s, %s", flat, differences)
	}
	if err := errors.Join(shared.Close(), sn.Close()); err != nil {
		return err
	}
	if _, err := s.Collect(ctx, nil); err != nil {
		return err
	}
	return s.Delete(ctx, id)
}
