package vm

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTheLogKeepsTheFirstAndTheNewest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "console.log")
	const max = 16 << 10
	log, err := BoundedLog(path, max)
	if err != nil {
		t.Fatal(err)
	}
	var all bytes.Buffer
	for i := range 20_000 {
		line := fmt.Sprintf("line %d\n", i)
		all.WriteString(line)
		if n, err := log.Write([]byte(line)); n != len(line) || err != nil {
			t.Fatal(n, err)
		}
		if i%500 == 0 {
			check(t, path, all.Bytes(), max)
		}
	}
	check(t, path, all.Bytes(), max)
	if err := errors.Join(log.Close(), log.Close()); err != nil {
		t.Error(err)
	}
	if _, err := log.Write([]byte("x")); !errors.Is(err, os.ErrClosed) {
		t.Errorf("write after close: %v", err)
	}
	text, _ := os.ReadFile(path)
	if !strings.HasPrefix(string(text), "line 0\nline 1\n") || !strings.HasSuffix(string(text), "line 19999\n") || !strings.Contains(string(text), " bytes left out …]\n") {
		t.Error("the first, the newest or the mark is missing")
	}
}

// check compares the log with all that was written to it.
func check(t *testing.T, path string, all []byte, max int64) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 || info.Size() > max {
		t.Fatalf("%v, %v", info, err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, cut := bytes.Cut(text, []byte("\n[… "))
	if !cut {
		if !bytes.Equal(text, all) {
			t.Fatal("the log is not what was written")
		}
		return
	}
	count, newest, _ := bytes.Cut(rest, []byte(" bytes left out …]\n"))
	if int64(len(head)) != max/4 || !bytes.HasPrefix(all, head) || !bytes.HasSuffix(all, newest) {
		t.Fatalf("head of %d bytes, newest part of %d bytes: not what was written", len(head), len(newest))
	}
	if want := fmt.Sprint(len(all) - len(head) - len(newest)); string(count) != want {
		t.Fatalf("%s bytes are said to be missing, %s are", count, want)
	}
	if int64(len(newest)) < max/4 {
		t.Fatalf("only %d bytes of the newest are left", len(newest))
	}
}

func TestOneHugeWriteIsBoundedToo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	log, err := BoundedLog(path, MinLog)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	all := bytes.Repeat([]byte("0123456789abcde\n"), 10_000)
	if n, err := log.Write(all); n != len(all) || err != nil {
		t.Fatal(n, err)
	}
	check(t, path, all, MinLog)
}

func TestALogIsPrivateAndItsOwnFile(t *testing.T) {
	dir := t.TempDir()
	if _, err := BoundedLog(filepath.Join(dir, "a"), 10); err == nil {
		t.Error("a log of ten bytes")
	}
	victim := filepath.Join(dir, "victim")
	os.WriteFile(victim, []byte("precious"), 0o600)
	os.Symlink(victim, filepath.Join(dir, "link"))
	if _, err := BoundedLog(filepath.Join(dir, "link"), MinLog); err == nil {
		t.Error("a link was followed")
	}
	if text, _ := os.ReadFile(victim); string(text) != "precious" {
		t.Errorf("victim holds %q", text)
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errors.New("disk full") }

func TestAConsoleThatCannotBeKeptIsStillEmptied(t *testing.T) {
	for _, w := range []io.Writer{failing{}, nil} {
		r := strings.NewReader(strings.Repeat("x", 1<<20))
		drain(w, r)
		if r.Len() != 0 {
			t.Errorf("%T: %d bytes left", w, r.Len())
		}
	}
}

func TestTheTailIsTheNewestAndBounded(t *testing.T) {
	w := tail{keep: 100}
	var all bytes.Buffer
	for i := range 1000 {
		s := strings.Repeat(fmt.Sprint(i), 1+i%70)
		all.WriteString(s)
		w.Write([]byte(s))
		got := w.bytes()
		if len(got) > 200 || len(got) < min(100, all.Len()) || !bytes.HasSuffix(all.Bytes(), got) {
			t.Fatalf("after %d writes: %d bytes", i+1, len(got))
		}
	}
}
