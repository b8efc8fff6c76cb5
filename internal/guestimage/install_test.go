package guestimage

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// packed is a generation on its way: the files' names and what is in them.
type packed struct {
	name string
	data []byte
}

func pack(t *testing.T, img *Image) []packed {
	t.Helper()
	files, err := img.Carry(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	var all []packed
	for _, f := range files {
		data, err := os.ReadFile(f.Path)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, packed{f.Name, data})
	}
	return all
}

func install(t *testing.T, home, id string, files []packed) (fresh bool, err error) {
	t.Helper()
	in, err := Install(t.Context(), home, func() {})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := in.Close(); err != nil {
			t.Error(err)
		}
	}()
	for _, f := range files {
		if err := in.Take(f.name, int64(len(f.data)), bytes.NewReader(f.data)); err != nil {
			return false, err
		}
	}
	return in.Publish(id)
}

func TestAGenerationMovesToAnotherHome(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	img := generation(t, from, "root disk", []byte("agent"))
	// A disk with holes and a short end.
	rewriteData(t, img)
	files := pack(t, img)
	id := img.Manifest.ImageID
	if fresh, err := install(t, to, id, files); err != nil || !fresh {
		t.Fatalf("fresh %v, %v", fresh, err)
	}
	got, err := Open(to)
	if err != nil || got.Manifest != img.Manifest || !got.stamped() {
		t.Fatalf("got %+v, %v", got, err)
	}
	if err := Verify(t.Context(), to, nil); err != nil {
		t.Error(err)
	}
	for _, f := range got.files() {
		if info, err := os.Stat(f.path); err != nil || info.Mode().Perm() != 0o444 {
			t.Errorf("%s: %v, %v", f.path, info.Mode(), err)
		}
	}
	if release, err := got.Hold(); err != nil {
		t.Error(err)
	} else {
		release()
	}
	if left := generations(t, to); len(left) != 1 {
		t.Errorf("beside it: %v", left)
	}
	t.Run("again changes nothing", func(t *testing.T) {
		if fresh, err := install(t, to, id, files); err != nil || fresh {
			t.Errorf("fresh %v, %v", fresh, err)
		}
	})
	t.Run("a damaged one is replaced", func(t *testing.T) {
		rewrite(t, got.Kernel, "KERNEL")
		if fresh, err := install(t, to, id, files); err != nil || !fresh {
			t.Errorf("fresh %v, %v", fresh, err)
		}
		if err := Verify(t.Context(), to, nil); err != nil {
			t.Error(err)
		}
	})
	t.Run("the one in use stays in use", func(t *testing.T) {
		other := t.TempDir()
		used := generation(t, other, "another root disk", []byte("agent"))
		if fresh, err := install(t, other, id, files); err != nil || !fresh {
			t.Errorf("fresh %v, %v", fresh, err)
		}
		if now, err := Open(other); err != nil || now.Dir != used.Dir {
			t.Errorf("in use %+v, %v", now, err)
		}
		if _, err := OpenGeneration(t.Context(), other, id); err != nil {
			t.Error(err)
		}
	})
}

// rewriteData publishes img anew with a data disk that has holes.
func rewriteData(t *testing.T, img *Image) {
	t.Helper()
	if err := os.Chmod(img.DataBase, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(img.DataBase, os.O_RDWR|os.O_TRUNC, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, one := f.WriteAt([]byte("beginning"), 100)
	_, two := f.WriteAt([]byte("middle"), 5<<20)
	_, three := f.WriteAt(make([]byte, 4<<10), 6<<20)
	_, four := f.WriteAt([]byte("end"), 8<<20+4096*3+17)
	if err := errors.Join(one, two, three, four, f.Close(), os.Chmod(img.DataBase, 0o444)); err != nil {
		t.Fatal(err)
	}
	m := img.Manifest
	for _, file := range img.files() {
		if file.path == img.DataBase {
			if m.DataSHA256, err = file.sum(t.Context(), file.path); err != nil {
				t.Fatal(err)
			}
		}
	}
	m.ImageID = m.id()
	dir := filepath.Join(filepath.Dir(img.Dir), m.ImageID)
	if err := os.Rename(img.Dir, dir); err != nil {
		t.Fatal(err)
	}
	*img = *imageIn(dir)
	img.Manifest = m
	path := img.Disk + manifestSuffix
	if err := errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, m.encode(), 0o600)); err != nil {
		t.Fatal(err)
	}
}

func TestNothingIsLeftOfAHostileGeneration(t *testing.T) {
	img := generation(t, t.TempDir(), "root disk", []byte("agent"))
	good := pack(t, img)
	change := func(at int, data []byte) []packed {
		files := append([]packed(nil), good...)
		files[at].data = data
		return files
	}
	for _, tt := range []struct {
		name  string
		files []packed
		id    string
		says  string
	}{
		{"a file is missing", good[:5], img.Manifest.ImageID, "root.raw is missing"},
		{"nothing at all", nil, img.Manifest.ImageID, "manifest.json is missing"},
		{"another order", []packed{good[0], good[2]}, img.Manifest.ImageID, `"initramfs" is out of its place`},
		{"one more", append(append([]packed(nil), good...), packed{"kernel", nil}), img.Manifest.ImageID, "out of its place"},
		{"a path", []packed{{"../../x", nil}}, img.Manifest.ImageID, "out of its place"},
		{"no manifest", change(0, []byte("{}")), img.Manifest.ImageID, "is missing"},
		{"an id of its own choice", change(0, bytes.Replace(good[0].data, []byte(img.Manifest.ImageID), []byte(strings.Repeat("0", 24)), 1)), img.Manifest.ImageID, "image id"},
		{"another kernel", change(1, []byte("KERNEL")), img.Manifest.ImageID, "kernel has the digest"},
		{"another root disk", change(5, []byte("root disc")), img.Manifest.ImageID, "root.raw has the digest"},
		{"a data disk cut short", change(4, good[4].data[:18]), img.Manifest.ImageID, "data.sparse is cut short"},
		{"an empty data disk", change(4, nil), img.Manifest.ImageID, "data.sparse is cut short"},
		{"an endless data disk", change(4, bytes.Repeat([]byte{0xff}, 16)), img.Manifest.ImageID, "too large"},
		{"a block beyond the end", change(4, append(append([]byte(nil), good[4].data[:8]...), 0, 0, 0, 0, 0, 0, 1, 0)), img.Manifest.ImageID, "block 256 is out of its place"},
		{"a block twice", change(4, append(append([]byte(nil), good[4].data...), good[4].data[8:]...)), img.Manifest.ImageID, "block 0 is out of its place"},
		{"another image", good, strings.Repeat("0", 24), "it is guest image"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			home := t.TempDir()
			_, err := install(t, home, tt.id, tt.files)
			if err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("err %v, want one about %q", err, tt.says)
			}
			if left := generations(t, home); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
			if _, err := Open(home); !errors.Is(err, ErrNotBuilt) {
				t.Errorf("in use: %v", err)
			}
		})
	}
	in, err := Install(t.Context(), t.TempDir(), func() {})
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if err := in.Take(carriedManifest, maxManifest+1, strings.NewReader("")); err == nil {
		t.Error("a manifest of any size is taken")
	}
}
