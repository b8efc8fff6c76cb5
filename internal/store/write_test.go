package store

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

func TestWriteFileIsWholeOrNotAtAll(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := WriteFile(path, []byte("one"), 0o600); err != nil {
		t.Fatal(err)
	}
	broken := io.MultiReader(strings.NewReader("tw"), brokenReader{})
	if err := WriteStream(path, broken, 0o644); !errors.Is(err, errBroken) {
		t.Fatalf("error %v", err)
	}
	data, err := os.ReadFile(path)
	if err != nil || string(data) != "one" {
		t.Errorf("%q, %v", data, err)
	}
	if entries, _ := os.ReadDir(filepath.Dir(path)); len(entries) != 1 {
		t.Errorf("left behind: %v", entries)
	}
	if err := WriteFile(path, []byte("three"), 0o640); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o640 || info.Size() != 5 {
		t.Errorf("%v, %v", info, err)
	}
}

var errBroken = errors.New("broken")

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, errBroken }

func TestErrorsOfTheDiskSayWhatToDo(t *testing.T) {
	for _, row := range []struct {
		errno error
		want  string
	}{
		{syscall.ENOSPC, "free some space"},
		{syscall.EDQUOT, "your disk quota is used up"},
		{syscall.EROFS, "can be written"},
		{syscall.EACCES, "make the folder yours"},
		{syscall.ENOTDIR, "set WARREN_HOME to a folder"},
	} {
		err := WithRemedy(WithRemedy(&os.PathError{Op: "write", Path: "/f", Err: row.errno}))
		if !errors.Is(err, row.errno) || strings.Count(err.Error(), row.want) != 1 {
			t.Errorf("%v: want one %q", err, row.want)
		}
	}
	if err := WithRemedy(errBroken); err != errBroken {
		t.Errorf("changed %v", err)
	}
}

// A home on a tiny tmpfs is full at every point of a creation in turn.
func TestFullDiskWhileCreatingLeavesNothing(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting a small file system needs root")
	}
	for inodes := 2; ; inodes++ {
		if inodes > 20 {
			t.Fatal("creation never succeeded")
		}
		if fullDisk(t, inodes) {
			return
		}
	}
}

// fullDisk creates a VM where only so many files fit, and reports success.
func fullDisk(t *testing.T, inodes int) bool {
	t.Helper()
	mount := t.TempDir()
	if err := syscall.Mount("tmpfs", mount, "tmpfs", 0, "size=64k,nr_inodes="+strconv.Itoa(inodes)); err != nil {
		t.Skipf("this sandbox of a machine refuses mounts even to root: %v", err)
	}
	defer syscall.Unmount(mount, 0)
	h := Home(filepath.Join(mount, "warren"))
	d, err := h.CreateVM("one")
	if err == nil {
		if err := d.Remove(); err != nil {
			t.Error(err)
		}
		return true
	}
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "create VM one") || !strings.Contains(err.Error(), "free some space") {
		t.Errorf("with %d inodes: %v", inodes, err)
	}
	left, _ := filepath.Glob(filepath.Join(h.VMsDir(), "*one*"))
	if len(left) != 0 {
		t.Errorf("with %d inodes left behind: %v", inodes, left)
	}
	return false
}
