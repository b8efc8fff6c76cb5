package snapshots

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestEveryChangeOfAFileIsFound(t *testing.T) {
	for name, damage := range map[string]func(path string) error{
		"a byte": func(path string) error {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteAt([]byte("!"), 3)
			return errors.Join(err, f.Close())
		},
		"shorter": func(path string) error { return os.Truncate(path, 2) },
		"longer":  func(path string) error { return os.Truncate(path, 4<<20) },
		"gone":    os.Remove,
		"a link": func(path string) error {
			return errors.Join(os.Rename(path, path+".x"), os.Symlink(path+".x", path))
		},
		"a folder": func(path string) error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o700)) },
	} {
		for _, file := range []string{"base/memory", "base/disk.qcow2", "top/state", "top/memory", "top/disk.qcow2"} {
			t.Run(name+" of "+file, func(t *testing.T) {
				s := newStore(t)
				published(t, s, "base", plan(KindTemplate, "", "base"))
				published(t, s, "top", plan(KindSnapshot, "base", "base", "top"))
				path := filepath.Join(s.dir(), file)
				os.Chmod(path, 0o600)
				if err := damage(path); err != nil {
					t.Fatal(err)
				}
				_, err := s.Open(t.Context(), "top")
				wantIs(t, err, ErrDamaged, filepath.Base(file))
				wantIs(t, s.Verify(t.Context(), "top", nil), ErrDamaged)
				if err := s.Delete(t.Context(), "top"); err != nil {
					t.Errorf("a damaged snapshot cannot be deleted: %v", err)
				}
			})
		}
	}
}

func TestATouchedFileCostsItsDigestOnce(t *testing.T) {
	s := newStore(t)
	published(t, s, "x", plan(KindSnapshot, ""))
	path := filepath.Join(s.folder("x"), MemoryName)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(path), os.WriteFile(path, data, 0o600)); err != nil {
		t.Fatal(err)
	}
	before := readStamps(filepath.Join(s.folder("x"), stampName), open(t, s, "x").n.m.SHA256)
	is, _, err := look(path)
	if err != nil || before.Files[MemoryName] != is {
		t.Errorf("stamped %v, is %v, %v", before.Files[MemoryName], is, err)
	}
}

// Who opens a copied snapshot gives its files to QEMU's user, and another may
// do so while this one reads them.
func TestAFileThatIsGivenAwayWhileItIsReadIsNotDamaged(t *testing.T) {
	var given []string
	s := newStore(t, WithOwner(func(path string) error { given = append(given, filepath.Base(path)); return nil }))
	published(t, s, "base", plan(KindTemplate, "", "base"))
	published(t, s, "top", plan(KindSnapshot, "base", "base", "top"))
	sn := open(t, s, "top")
	if got := strings.Join(given, " "); got != "memory disk.qcow2 disk.qcow2" {
		t.Errorf("%s were given away; QEMU opens no state and no difference", got)
	}
	for _, f := range sn.n.m.Files {
		before, _, err := look(sn.n.path(f.Name))
		if err != nil {
			t.Fatal(err)
		}
		was := before
		was.ChangedNS--
		if got, err := sn.n.read(t.Context(), f, was); err != nil || got != before {
			t.Errorf("%s: stamp %v, want %v, %v", f.Name, got, before, err)
		}
	}
}

func TestVerifyReadsEverything(t *testing.T) {
	s := newStore(t)
	published(t, s, "base", plan(KindTemplate, "", "base"))
	published(t, s, "top", plan(KindSnapshot, "base", "base"))
	var read bytes.Buffer
	if err := s.Verify(t.Context(), "top", func(step string) { read.WriteString(step + "\n") }); err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(read.String(), "\n"); got != 5 {
		t.Errorf("read %s", read.String())
	}
}
