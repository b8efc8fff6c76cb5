package snapshots

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/warren-vm/warren/internal/store"
)

// faults lets the n-th write fail, and counts them.
type faults struct {
	n, count int
	err      error
}

func (f *faults) fault(Op, string) error {
	f.count++
	if f.count == f.n {
		return f.err
	}
	return nil
}

var (
	allWays = [][]error{{syscall.ENOSPC}, {syscall.EIO}, {syscall.EROFS}}
	inTurn  = [][]error{{syscall.ENOSPC, syscall.EIO, syscall.EROFS}}
)

// everyFault runs try with each of its writes failing, each way in turn or
// all ways.
func everyFault(t *testing.T, ways [][]error, try func(t *testing.T, f *faults) (failed error)) {
	for _, errnos := range ways {
		for n := 1; ; n++ {
			f := &faults{n: n, err: errnos[n%len(errnos)]}
			t.Run(fmt.Sprintf("%d %v", n, f.err), func(t *testing.T) {
				err := try(t, f)
				if f.count >= n {
					wantIs(t, err, f.err)
				} else if err != nil {
					t.Error(err)
				}
			})
			if f.count < n {
				if n < 4 {
					t.Errorf("only %d writes", f.count)
				}
				break
			}
		}
	}
}

func TestAFailedPublishLeavesNothing(t *testing.T) {
	everyFault(t, allWays, func(t *testing.T, f *faults) error {
		home := store.Home(t.TempDir())
		clean := In(home)
		published(t, clean, "base", plan(KindTemplate, "", "base"))
		s := In(home, WithFaults(f.fault))
		m := plan(KindSnapshot, "base", "base", "x")
		err := func() error {
			d, err := s.Draft(t.Context(), "x")
			if err != nil {
				return err
			}
			defer func() {
				if err := d.Discard(); err != nil {
					t.Error(err)
				}
			}()
			fill(t, d, m)
			sn, err := d.Publish(t.Context(), m)
			if err != nil {
				return err
			}
			return sn.Close()
		}()
		if err != nil {
			if got := listed(t, s); !slices.Equal(got, []string{"base"}) {
				t.Error(got)
			}
			if got := leftoversIn(t, s); len(got) > 0 {
				t.Error(got)
			}
			published(t, clean, "x", m)
		}
		open(t, clean, "x")
		return err
	})
}

func TestAFailedFlatLeavesNothing(t *testing.T) {
	everyFault(t, allWays, func(t *testing.T, f *faults) error {
		home := store.Home(t.TempDir())
		published(t, In(home), "base", plan(KindTemplate, ""))
		published(t, In(home), "x", plan(KindSnapshot, "base"))
		sn := open(t, In(home, WithFaults(f.fault)), "x")
		_, err := sn.MakeFlat(t.Context(), buildFlat)
		if err == nil {
			return nil
		}
		if path, ok := sn.Flat(); ok {
			t.Error(path)
		}
		if flat, differences := sn.Base(); len(differences) != 1 {
			t.Error(flat, differences)
		}
		if _, err := sn.MakeFlat(t.Context(), buildFlat); err != nil {
			t.Error(err)
		}
		return err
	})
}

func TestAFailedImportLeavesNothing(t *testing.T) {
	archive := exported(t)
	everyFault(t, inTurn, func(t *testing.T, f *faults) error {
		s := newStore(t, WithFaults(f.fault))
		_, err := importBytes(t, s, archive)
		if err == nil {
			return nil
		}
		if got := listed(t, s); len(got) > 0 {
			t.Error(got)
		}
		if got := leftoversIn(t, s); len(got) > 0 {
			t.Error(got)
		}
		if _, err := importBytes(t, s, archive); err != nil {
			t.Error(err)
		}
		return err
	})
}

func TestNoSpaceSaysWhatToDo(t *testing.T) {
	s := newStore(t, WithFaults(func(op Op, path string) error {
		if op == OpSync && filepath.Base(path) == MemoryName {
			return syscall.ENOSPC
		}
		return nil
	}))
	d, err := s.Draft(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Discard()
	m := plan(KindSnapshot, "")
	fill(t, d, m)
	_, err = d.Publish(t.Context(), m)
	wantIs(t, err, syscall.ENOSPC, "publish snapshot x: ", "free some space")
}

func buildFlat(dst *os.File, base string, differences []string) error {
	_, err := dst.WriteString("flat of " + base)
	return errors.Join(err, dst.Truncate(1<<20))
}
