package digest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func write(t *testing.T, size int64, parts map[int64]string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "f")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for at, text := range parts {
		if _, err := f.WriteAt([]byte(text), at); err != nil {
			t.Fatal(err)
		}
	}
	return path
}

func sparse(t *testing.T, path string) string {
	t.Helper()
	d, err := Sparse(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestSparseDigestDoesNotDependOnHoles(t *testing.T) {
	const size = 40 << 20
	holes := sparse(t, write(t, size, map[int64]string{5000: "a", 30<<20 + 7: "b"}))
	zeros := string(make([]byte, 3<<20))
	written := sparse(t, write(t, size, map[int64]string{5000: "a", 30<<20 + 7: "b", 20 << 20: zeros, 36 << 20: zeros}))
	if holes != written {
		t.Errorf("zeros count: %s, %s", holes, written)
	}
}

func TestSparseDigestSeesEveryDifference(t *testing.T) {
	digests := map[string]string{}
	for name, path := range map[string]string{
		"empty":        write(t, 0, nil),
		"one zero":     write(t, 1, nil),
		"zeros":        write(t, 1<<20, nil),
		"a":            write(t, 1<<20, map[int64]string{0: "a"}),
		"a later":      write(t, 1<<20, map[int64]string{1: "a"}),
		"other block":  write(t, 1<<20, map[int64]string{4096: "a"}),
		"last byte":    write(t, 1<<20, map[int64]string{1<<20 - 1: "a"}),
		"odd end":      write(t, 5001, map[int64]string{5000: "a"}),
		"odd end more": write(t, 5002, map[int64]string{5000: "a"}),
		"two":          write(t, 1<<20, map[int64]string{0: "a", 8192: "a"}),
	} {
		d := sparse(t, path)
		if other, ok := digests[d]; ok {
			t.Errorf("%s and %s have the same digest", name, other)
		}
		digests[d] = name
	}
}

func TestDigestOfALargeSparseFileIsQuickAndCanBeStopped(t *testing.T) {
	// 1 TiB: reading it would take minutes and the test its deadline.
	path := write(t, 1<<40, map[int64]string{1 << 39: "a"})
	if sparse(t, path) == "" {
		t.Fatal("no digest")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Sparse(ctx, path); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if _, err := File(ctx, path); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestFileDigestIsSHA256(t *testing.T) {
	d, err := File(t.Context(), write(t, 3, map[int64]string{0: "abc"}))
	if err != nil || d != "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" {
		t.Fatalf("got %s, %v", d, err)
	}
}

func TestAllZeroIsToldFromNearlyAllZero(t *testing.T) {
	for n := range 70 {
		b := make([]byte, n)
		if !IsZero(b) {
			t.Errorf("%d zeros are not zero", n)
		}
		for i := range b {
			b[i] = 1
			if IsZero(b) {
				t.Errorf("%d bytes with a one at %d are zero", n, i)
			}
			b[i] = 0
		}
	}
	if IsZero([]byte{7, 7, 7}) {
		t.Error("equal bytes are zero")
	}
}
