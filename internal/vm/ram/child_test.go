package ram

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// The tests need a process whose RAM they look at. The test binary runs itself
// as one: it maps a file privately and does what its standard input says.

const (
	childFile  = "WARREN_TEST_RAM_FILE"
	childShare = "WARREN_TEST_RAM_SHARED"
)

func TestMain(m *testing.M) {
	if file := os.Getenv(childFile); file != "" {
		if err := serveChild(file); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func serveChild(file string) error {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	flags := unix.MAP_PRIVATE
	if os.Getenv(childShare) != "" {
		flags = unix.MAP_SHARED
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		return err
	}
	lines := bufio.NewScanner(os.Stdin)
	fmt.Println("ok")
	for lines.Scan() {
		var word, path string
		var first, count int
		var seed uint64
		fmt.Sscan(lines.Text(), &word, &first, &count, &seed, &path)
		part := mem[first*PageSize:][:count*PageSize]
		switch word {
		case "fill":
			fill(part, seed)
		case "drop":
			err = unix.Madvise(part, unix.MADV_DONTNEED)
		case "protect":
			err = unix.Mprotect(part, unix.PROT_READ)
		case "dump":
			err = os.WriteFile(path, mem, 0o600)
		}
		if err != nil {
			return err
		}
		fmt.Println("ok")
	}
	return lines.Err()
}

// fill makes pages of noise, or of zeros for seed 0.
func fill(b []byte, seed uint64) {
	if seed == 0 {
		clear(b)
		return
	}
	var key [32]byte
	key[0], key[1], key[2], key[3] = byte(seed), byte(seed>>8), byte(seed>>16), byte(seed>>24)
	_, _ = rand.NewChaCha8(key).Read(b)
}

// child is such a process.
type child struct {
	t     testing.TB
	pid   int
	file  string
	size  int64
	in    io.Writer
	out   *bufio.Reader
	stop  func()
	pages int
}

// startChild starts a process that maps a copy of base, or of zeros.
func startChild(t testing.TB, pages int, env ...string) *child {
	t.Helper()
	file := filepath.Join(t.TempDir(), "ram with a space")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, int64(pages)*PageSize); err != nil {
		t.Fatal(err)
	}
	return startChildOn(t, file, env...)
}

func startChildOn(t testing.TB, file string, env ...string) *child {
	t.Helper()
	info, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), childFile+"="+file), env...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &child{t: t, pid: cmd.Process.Pid, file: file, size: info.Size(), in: in, out: bufio.NewReader(out), pages: int(info.Size() / PageSize)}
	stopped := false
	c.stop = func() {
		if !stopped {
			stopped = true
			in.Close()
			if err := cmd.Wait(); err != nil {
				t.Errorf("child: %v", err)
			}
		}
	}
	t.Cleanup(c.stop)
	c.answer("start")
	return c
}

func (c *child) answer(to string) {
	c.t.Helper()
	line, err := c.out.ReadString('\n')
	if err != nil || line != "ok\n" {
		c.t.Fatalf("child answers %q to %q: %v", line, to, err)
	}
}

// do has the child do something with count pages from first.
func (c *child) do(word string, first, count int, seed uint64) {
	c.t.Helper()
	c.say(fmt.Sprintf("%s %d %d %d -", word, first, count, seed))
}

func (c *child) say(line string) {
	c.t.Helper()
	if _, err := fmt.Fprintln(c.in, line); err != nil {
		c.t.Fatal(err)
	}
	c.answer(line)
}

// dump is the RAM as the child itself sees it.
func (c *child) dump() []byte {
	c.t.Helper()
	path := filepath.Join(c.t.TempDir(), "dump")
	c.say("dump 0 0 0 " + path)
	return readAll(c.t, path)
}

func (c *child) attach() *Process {
	c.t.Helper()
	p, err := Attach(c.pid, c.file, c.size)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { p.Close() })
	return p
}

func readAll(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// snapshot captures, commits and opens the difference.
func snapshot(t testing.TB, tr *Tracker, size int64, keep int) *Difference {
	t.Helper()
	d := captured(t, tr, size, keep, true)
	return d
}

// captured captures and opens the difference.
func captured(t testing.TB, tr *Tracker, size int64, keep int, commit bool) *Difference {
	t.Helper()
	f := newFile(t)
	c, err := tr.capture(f, keep)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Finish(); err != nil {
		t.Fatal(err)
	}
	if commit {
		tr.Commit(c)
	}
	d, err := OpenDifference(f.Name(), size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	gotData, gotZero := d.Pages()
	if wantData, wantZero := c.Pages(); gotData != wantData || gotZero != wantZero || d.Bytes() != int64(wantData)*PageSize {
		t.Errorf("the file has %d data and %d zero pages, the capture %d and %d", gotData, gotZero, wantData, wantZero)
	}
	return d
}

func newFile(t testing.TB) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// flat is the file that base and diffs come to.
func flat(t testing.TB, base string, diffs ...*Difference) string {
	t.Helper()
	f := newFile(t)
	if err := Flatten(t.Context(), f, base, diffs); err != nil {
		t.Fatal(err)
	}
	return f.Name()
}

// same compares two RAMs and names the first page that differs.
func same(t testing.TB, what string, got, want []byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	if len(got) != len(want) {
		t.Fatalf("%s has %d bytes, want %d", what, len(got), len(want))
	}
	var wrong []string
	for at := 0; at < len(got) && len(wrong) < 8; at += PageSize {
		if !bytes.Equal(got[at:at+PageSize], want[at:at+PageSize]) {
			wrong = append(wrong, fmt.Sprint(at/PageSize))
		}
	}
	t.Fatalf("%s differs in pages %s", what, strings.Join(wrong, ", "))
}
