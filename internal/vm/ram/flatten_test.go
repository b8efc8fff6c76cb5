package ram

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// opened is a difference of a RAM of testPages pages.
func opened(t *testing.T, entries ...entry) *Difference {
	t.Helper()
	path := filepath.Join(t.TempDir(), "difference")
	if err := os.WriteFile(path, written(entries, nil, nil), 0o600); err != nil {
		t.Fatal(err)
	}
	d, err := OpenDifference(path, testPages*PageSize)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// applied is what base and diffs come to, made the slow way.
func applied(base []byte, diffs ...*Difference) []byte {
	b := bytes.Clone(base)
	for _, d := range diffs {
		for _, e := range d.table {
			for page := e.first; page < e.end(); page++ {
				content := byte(0)
				if e.kind == data {
					content = byte(page)
				}
				copy(b[page*PageSize:], bytes.Repeat([]byte{content}, PageSize))
			}
		}
	}
	return b
}

func TestFlattenLaysDifferencesOverTheBase(t *testing.T) {
	base := noiseFile(t, testPages)
	diffs := []*Difference{
		opened(t, entry{0, 20, data}, entry{40, 10, zero}),
		opened(t, entry{5, 5, zero}, entry{42, 3, data}, entry{60, 4, zero}),
		opened(t, entry{6, 1, data}, entry{7, 1, zero}, entry{61, 1, data}),
	}
	want := applied(readAll(t, base), diffs...)
	same(t, "copied", readAll(t, flat(t, base, diffs...)), want)
	same(t, "from zeros", readAll(t, flat(t, "", diffs...)), applied(make([]byte, testPages*PageSize), diffs...))
	same(t, "without differences", readAll(t, flat(t, base)), readAll(t, base))

	// As on a file system with reflinks.
	dst := newFile(t)
	cloned := false
	err := flatten(t.Context(), dst, base, diffs, func(dst, src *os.File) bool {
		cloned = true
		_, err := io.Copy(dst, src)
		return err == nil
	})
	if err != nil || !cloned {
		t.Fatal(cloned, err)
	}
	same(t, "cloned", readAll(t, dst.Name()), want)
}

func TestFlattenWorksAcrossFileSystems(t *testing.T) {
	base := noiseFile(t, testPages)
	d := opened(t, entry{0, 20, data}, entry{40, 10, zero})
	dst, err := os.CreateTemp("/dev/shm", "warren-ram-test")
	if err != nil {
		t.Skip(err)
	}
	defer os.Remove(dst.Name())
	defer dst.Close()
	if err := Flatten(t.Context(), dst, base, []*Difference{d}); err != nil {
		t.Fatal(err)
	}
	same(t, "flat file", readAll(t, dst.Name()), applied(readAll(t, base), d))
}

func TestPumpCopiesWhatTheKernelCannot(t *testing.T) {
	src, dst := noiseFile(t, 700), newFile(t)
	f, err := os.Open(src)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := pump(t.Context(), dst, 0, f, 700*PageSize); err != nil {
		t.Fatal(err)
	}
	if err := pump(t.Context(), dst, 600*PageSize, nothing{}, 100*PageSize); err != nil {
		t.Fatal(err)
	}
	want := readAll(t, src)
	clear(want[600*PageSize:])
	same(t, "copy", readAll(t, dst.Name()), want)
	if err := pump(t.Context(), dst, 0, strings.NewReader("short"), 6); err == nil {
		t.Error("a source that ends early is no error")
	}
}

func TestFlattenKeepsHoles(t *testing.T) {
	d := opened(t, entry{0, 1, data}, entry{1, 63, zero})
	for name, base := range map[string]string{"zeros": "", "noise": noiseFile(t, testPages)} {
		if n := allocated(t, flat(t, base, d)); n > 2*PageSize {
			t.Errorf("over %s: %d bytes on the disk for one page", name, n)
		}
	}
}

func TestFlattenSaysWhatIsWrong(t *testing.T) {
	full := newFile(t)
	if _, err := full.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	d := opened(t, entry{0, 20, data})
	gone, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("no longer wanted"))
	tests := []struct {
		name  string
		ctx   context.Context
		dst   *os.File
		base  string
		diffs []*Difference
		want  string
	}{
		{"nothing to do", t.Context(), newFile(t), "", nil, "neither a base nor a difference"},
		{"sizes that differ", t.Context(), newFile(t), noiseFile(t, 65), []*Difference{d}, "is for a RAM of 262144 bytes, not 266240"},
		{"a file with something in it", t.Context(), full, "", []*Difference{d}, "is not empty"},
		{"no base", t.Context(), newFile(t), "/nowhere/ram", nil, "no such file"},
		{"a base of no pages", t.Context(), newFile(t), full.Name(), nil, "must be a multiple of 4096"},
		{"given up in a difference", gone, newFile(t), "", []*Difference{d}, "no longer wanted"},
		{"given up in the base", gone, newFile(t), noiseFile(t, 64), nil, "no longer wanted"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := Flatten(tt.ctx, tt.dst, tt.base, tt.diffs)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v; want %q", err, tt.want)
			}
		})
	}
}

func TestTrimTakesZerosFromTheDiskAndChangesNothing(t *testing.T) {
	const pages = 1500 // more than one buffer
	content := make([]byte, pages*PageSize+100)
	for _, run := range []Run{{0, 1}, {7, 2}, {255, 2}, {700, 1}, {1499, 1}} {
		fill(content[run.First*PageSize:(run.First+run.Count)*PageSize], run.First+1)
	}
	content[300*PageSize+4095] = 1 // a page is zero only as a whole
	f := newFile(t)
	if _, err := f.Write(content); err != nil {
		t.Fatal(err)
	}
	if err := Trim(f); err != nil {
		t.Fatal(err)
	}
	if got := readAll(t, f.Name()); !bytes.Equal(got, content) {
		t.Fatal("trim changed what the file holds")
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	if n := allocated(t, f.Name()); n > 10*PageSize {
		t.Errorf("%d bytes on the disk, want 9 pages", n)
	}
	if err := Trim(f); err != nil {
		t.Error("once more:", err)
	}
}

// allocated is what a file takes on the disk.
func allocated(t *testing.T, path string) int64 {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}
