package files

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestStatDescribesEveryKindOfFile(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/file", "12345")
	ok(t, os.Chmod(dir+"/file", 0o640))
	ok(t, os.Symlink("nowhere", dir+"/link"))
	ok(t, syscall.Mkfifo(dir+"/pipe", 0o600))
	for name, want := range map[string]string{"file": "file", "link": "symlink", "pipe": "pipe", ".": "dir"} {
		info, err := Stat(filepath.Join(dir, name))
		if err != nil || info.Type != want {
			t.Errorf("%s: %+v, %v", name, info, err)
		}
	}
	info, err := Stat("/dev/null")
	if err != nil || info.Type != "device" {
		t.Errorf("/dev/null: %+v, %v", info, err)
	}
	if info, err = Stat(dir + "/file"); info.Size != 5 || info.Mode != 0o640 || int(info.UID) != os.Geteuid() {
		t.Errorf("file: %+v, %v", info, err)
	}
	if info, err = Stat(dir + "/link"); info.Link != "nowhere" {
		t.Errorf("link: %+v, %v", info, err)
	}
	for _, bad := range []string{"", "relative", "/a\x00b"} {
		var path *BadPathError
		if _, err := Stat(bad); !errors.As(err, &path) {
			t.Errorf("%q: error %v", bad, err)
		}
	}
	if _, err := Stat(dir + "/absent"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent: error %v", err)
	}
}

func TestListIsSortedAndBounded(t *testing.T) {
	dir := t.TempDir()
	for i := range 3000 {
		write(t, filepath.Join(dir, "f"+string(rune('a'+i%26))+strings.Repeat("x", i/26)), "")
	}
	all, err := List(dir, 0)
	if err != nil || len(all.Entries) != 3000 || all.Truncated {
		t.Fatalf("%d entries, truncated %v, %v", len(all.Entries), all.Truncated, err)
	}
	some, err := List(dir, 10)
	if err != nil || !some.Truncated {
		t.Fatalf("truncated %v, %v", some.Truncated, err)
	}
	if diff := cmp.Diff(all.Entries[:10], some.Entries); diff != "" {
		t.Error(diff)
	}
	for i := 1; i < len(all.Entries); i++ {
		if all.Entries[i-1].Name >= all.Entries[i].Name {
			t.Fatalf("%q before %q", all.Entries[i-1].Name, all.Entries[i].Name)
		}
	}
	if _, err := List(dir, -1); err == nil {
		t.Error("a negative limit was taken")
	}
}

func TestListLengthIsNeverGuessedTooSmall(t *testing.T) {
	for _, s := range []string{"plain", "\"\\\x01\x1f<>&", "\xff\xfe", "日本", "\u2028"} {
		text, err := json.Marshal(s)
		ok(t, err)
		if n := jsonLen(s); n < len(text)-2 {
			t.Errorf("%q: %d, in truth %d", s, n, len(text)-2)
		}
	}
}

func TestRemoveRemovesLinksNotTheirTargets(t *testing.T) {
	dir := t.TempDir()
	ok(t, os.MkdirAll(dir+"/keep/deep", 0o755))
	write(t, dir+"/keep/deep/file", "kept")
	ok(t, os.Mkdir(dir+"/go", 0o755))
	ok(t, os.Symlink("../keep", dir+"/go/link"))
	if err := Remove(dir+"/go", false); !errors.Is(err, syscall.ENOTEMPTY) {
		t.Errorf("full folder: error %v", err)
	}
	ok(t, Remove(dir+"/go", true))
	if read(t, dir+"/keep/deep/file") != "kept" {
		t.Error("the target is gone")
	}
	if err := Remove(dir+"/go", true); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("again: error %v", err)
	}
	for _, root := range []string{"/", "//", "/.", "/tmp/.."} {
		if err := Remove(root, true); err == nil {
			t.Fatalf("%s was removed", root)
		}
	}
}

func TestOpenRefusesWhatCouldBlockForEver(t *testing.T) {
	dir := t.TempDir()
	ok(t, syscall.Mkfifo(dir+"/pipe", 0o600))
	for _, path := range []string{dir + "/pipe", dir, "/dev/zero"} {
		var bad *BadPathError
		if f, err := Open(path, 0); !errors.As(err, &bad) {
			t.Errorf("%s: %v, %v", path, f, err)
		}
	}
}

// interrupted fails after some bytes.
type interrupted struct{ left int }

var errInterrupted = errors.New("interrupted")

func (r *interrupted) Read(p []byte) (int, error) {
	if r.left == 0 {
		return 0, errInterrupted
	}
	n := min(len(p), r.left)
	r.left -= n
	return n, nil
}

func TestWriteIsWholeOrNotAtAll(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/file", "old")
	if err := Write(dir+"/file", &interrupted{1 << 20}, WriteOptions{}); !errors.Is(err, errInterrupted) {
		t.Fatalf("error %v", err)
	}
	if got := read(t, dir+"/file"); got != "old" {
		t.Errorf("the file holds %q", got)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

func TestWriteKeepsModeAndFollowsLinks(t *testing.T) {
	dir := t.TempDir()
	ok(t, os.MkdirAll(dir+"/real/sub", 0o755))
	write(t, dir+"/real/file", "old")
	ok(t, syscall.Chmod(dir+"/real/file", 0o4750))
	ok(t, os.Symlink("real/sub", dir+"/sub"))
	ok(t, os.Symlink("../file", dir+"/real/sub/link"))
	ok(t, Write(dir+"/sub/link", strings.NewReader("new"), WriteOptions{}))
	if got := read(t, dir+"/real/file"); got != "new" {
		t.Errorf("the target holds %q", got)
	}
	info, err := Stat(dir + "/real/file")
	if err != nil || info.Mode != 0o4750 {
		t.Errorf("mode %o, %v", info.Mode, err)
	}
	if info, err = Stat(dir + "/real/sub/link"); info.Type != "symlink" {
		t.Errorf("the link became %+v, %v", info, err)
	}
	mode := uint32(0o600)
	ok(t, Write(dir+"/fresh", strings.NewReader(""), WriteOptions{Mode: &mode}))
	if info, err = Stat(dir + "/fresh"); err != nil || info.Mode != 0o600 || info.Size != 0 {
		t.Errorf("fresh: %+v, %v", info, err)
	}
	ok(t, os.Symlink("loop", dir+"/loop"))
	for _, bad := range []string{dir, dir + "/absent/file", dir + "/loop", dir + "/fresh/x", "/dev/null"} {
		if err := Write(bad, strings.NewReader("x"), WriteOptions{}); err == nil {
			t.Errorf("%s was written", bad)
		}
	}
}

// tree makes a tree with every kind of entry that an archive keeps.
func tree(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	ok(t, os.MkdirAll(dir+"/a/b", 0o755))
	write(t, dir+"/a/b/deep", strings.Repeat("deep", 100_000))
	write(t, dir+"/empty", "")
	write(t, dir+"/"+strings.Repeat("long", 50), "long name")
	ok(t, os.Symlink("/usr/bin/python3", dir+"/a/python"))
	ok(t, os.Link(dir+"/a/b/deep", dir+"/hard"))
	ok(t, os.Chmod(dir+"/a/b", 0o555))
	ok(t, syscall.Chmod(dir+"/empty", 0o4711))
	ok(t, os.Chtimes(dir+"/a", time.Unix(1e9, 0), time.Unix(1e9, 0)))
	ok(t, os.Chtimes(dir+"/empty", time.Unix(1e9+1, 0), time.Unix(1e9+1, 0)))
	t.Cleanup(func() { os.Chmod(dir+"/a/b", 0o755) })
	return dir
}

// describeTree is everything about a tree that must survive.
func describeTree(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	ok(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		ok(t, err)
		info, err := Stat(path)
		ok(t, err)
		name, err := filepath.Rel(dir, path)
		ok(t, err)
		if name == "." {
			return nil
		}
		if info.Type == "dir" {
			info.Size = 0
		}
		if info.Type == "symlink" {
			info.MTime = 0
		}
		text, err := json.Marshal(info)
		ok(t, err)
		all[name] = string(text)
		if info.Type == "file" {
			all[name] += read(t, path)
		}
		return nil
	}))
	return all
}

func TestTreeSurvivesPackingAndUnpacking(t *testing.T) {
	from, to := tree(t), t.TempDir()
	var archive bytes.Buffer
	ok(t, Pack(&archive, from))
	ok(t, Unpack(bytes.NewReader(archive.Bytes()), to, nil))
	t.Cleanup(func() { os.Chmod(to+"/a/b", 0o755) })
	want := describeTree(t, from)
	if diff := cmp.Diff(want, describeTree(t, to)); diff != "" {
		t.Error(diff)
	}
	one, err1 := os.Stat(to + "/hard")
	two, err2 := os.Stat(to + "/a/b/deep")
	if err1 != nil || err2 != nil || !os.SameFile(one, two) {
		t.Errorf("the hard link is a copy (%v, %v)", err1, err2)
	}
	// Again, over what is there.
	if os.Geteuid() == 0 {
		ok(t, Unpack(bytes.NewReader(archive.Bytes()), to, nil))
		if diff := cmp.Diff(want, describeTree(t, to)); diff != "" {
			t.Errorf("the second time: %s", diff)
		}
	}
}

func TestSingleFileIsPackedUnderItsName(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/file", "content")
	ok(t, os.Symlink("file", dir+"/link"))
	var archive bytes.Buffer
	ok(t, Pack(&archive, dir+"/link"))
	tr := tar.NewReader(&archive)
	h, err := tr.Next()
	ok(t, err)
	data, err := io.ReadAll(tr)
	if err != nil || h.Name != "link" || h.Typeflag != tar.TypeReg || string(data) != "content" {
		t.Errorf("%+v %q %v", h, data, err)
	}
	for _, bad := range []string{dir + "/absent", "/dev/null", "rel"} {
		if err := Pack(io.Discard, bad); err == nil {
			t.Errorf("%s was packed", bad)
		}
	}
}

// entry is one of a hand-made archive.
type entry struct {
	name, link, text string
	kind             byte
}

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Linkname: e.link, Typeflag: e.kind, Mode: 0o755, Size: int64(len(e.text)),
			Uid: os.Geteuid(), Gid: os.Getegid()}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.text); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func TestNoEntryLeavesTheTarget(t *testing.T) {
	const reg, sym, hard, dir = tar.TypeReg, tar.TypeSymlink, tar.TypeLink, tar.TypeDir
	for name, entries := range map[string][]entry{
		"parent":                    {{"../victim", "", "bad", reg}},
		"parent inside":             {{"a/../../victim", "", "bad", reg}},
		"absolute":                  {{"/tmp/warren-victim", "", "bad", reg}},
		"through a link":            {{"l", "..", "", sym}, {"l/victim", "", "bad", reg}},
		"through an absolute link":  {{"l", "@", "", sym}, {"l/victim", "", "bad", reg}},
		"through two links":         {{"m", "l", "", sym}, {"l", "..", "", sym}, {"m/victim", "", "bad", reg}},
		"link after its folder":     {{"d/x", "", "", reg}, {"d/l", "../..", "", sym}, {"d/l/victim", "", "bad", reg}},
		"folder through a link":     {{"l", "..", "", sym}, {"l/victimdir/", "", "", dir}},
		"hard link to outside":      {{"h", "../victim", "", hard}},
		"hard link, absolute":       {{"h", "/etc/passwd", "", hard}},
		"hard link through a link":  {{"l", "..", "", sym}, {"h", "l/victim", "", hard}},
		"link made through a link":  {{"l", "..", "", sym}, {"l/s", "x", "", sym}},
		"a link that is there":      {{"present/victim", "", "bad", reg}},
		"folder over outgoing link": {{"present/", "", "", dir}, {"present/victim", "", "bad", reg}, {"present/../../victim", "", "bad", reg}},
	} {
		t.Run(name, func(t *testing.T) {
			base := t.TempDir()
			target := base + "/target"
			ok(t, os.Mkdir(target, 0o755))
			write(t, base+"/victim", "untouched")
			ok(t, os.Symlink("..", target+"/present"))
			for i := range entries {
				entries[i].link = strings.ReplaceAll(entries[i].link, "@", base)
			}
			err := Unpack(bytes.NewReader(archive(t, entries...)), target, nil)
			var fault *ArchiveError
			if !errors.As(err, &fault) {
				t.Errorf("error %v", err)
			}
			if got := read(t, base+"/victim"); got != "untouched" {
				t.Errorf("the victim holds %q", got)
			}
			if names, err := filepath.Glob(base + "/*"); err != nil || len(names) != 2 {
				t.Errorf("outside: %v, %v", names, err)
			}
			if _, err := os.Lstat("/tmp/warren-victim"); err == nil {
				t.Error("an absolute name was written")
			}
		})
	}
}

func TestFileNeverOverwritesThroughALink(t *testing.T) {
	base := t.TempDir()
	target := base + "/target"
	ok(t, os.Mkdir(target, 0o755))
	write(t, base+"/victim", "untouched")
	write(t, target+"/other", "other")
	ok(t, os.Symlink("../victim", target+"/sym"))
	ok(t, os.Link(target+"/other", target+"/hard"))
	ok(t, Unpack(bytes.NewReader(archive(t,
		entry{"sym", "", "new", tar.TypeReg}, entry{"hard", "", "new", tar.TypeReg})), target, nil))
	for path, want := range map[string]string{
		base + "/victim": "untouched", target + "/other": "other", target + "/sym": "new", target + "/hard": "new",
	} {
		if got := read(t, path); got != want {
			t.Errorf("%s holds %q, not %q", path, got, want)
		}
	}
}

func TestBadArchivesAreRefused(t *testing.T) {
	good := archive(t, entry{"file", "", strings.Repeat("x", 2000), tar.TypeReg})
	for name, data := range map[string][]byte{
		"no archive": []byte(strings.Repeat("this is no archive. ", 100)),
		"cut":        good[:1200],
		"device":     archive(t, entry{"null", "", "", tar.TypeChar}),
		"pipe":       archive(t, entry{"pipe", "", "", tar.TypeFifo}),
	} {
		var fault *ArchiveError
		err := Unpack(bytes.NewReader(data), t.TempDir(), nil)
		if !errors.As(err, &fault) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	dir := t.TempDir()
	ok(t, os.MkdirAll(dir+"/file/inner", 0o755))
	if err := Unpack(bytes.NewReader(good), dir, nil); !errors.Is(err, syscall.EISDIR) {
		t.Errorf("file over a folder: error %v", err)
	}
	if err := Unpack(bytes.NewReader(good), dir+"/absent", nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no target: error %v", err)
	}
}

func TestUnpackedFilesBelongToTheOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give files away; the guest's agent is root")
	}
	dir := t.TempDir()
	ok(t, Unpack(bytes.NewReader(archive(t,
		entry{"made/by/path", "", "x", tar.TypeReg}, entry{"dir/", "", "", tar.TypeDir}, entry{"link", "x", "", tar.TypeSymlink})),
		dir, &Owner{1234, 4321}))
	for _, name := range []string{"made", "made/by", "made/by/path", "dir", "link"} {
		info, err := Stat(filepath.Join(dir, name))
		if err != nil || info.UID != 1234 || info.GID != 4321 {
			t.Errorf("%s: %+v, %v", name, info, err)
		}
	}
}

func FuzzUnpack(f *testing.F) {
	f.Add(archive(f, entry{"a/b", "", "text", tar.TypeReg}, entry{"l", "..", "", tar.TypeSymlink}, entry{"l/x", "", "t", tar.TypeReg}))
	f.Add(archive(f, entry{"d/", "", "", tar.TypeDir}, entry{"h", "d/x", "", tar.TypeLink}))
	f.Fuzz(func(t *testing.T, data []byte) {
		base := t.TempDir()
		target := base + "/target"
		ok(t, os.Mkdir(target, 0o755))
		write(t, base+"/canary", "alive")
		Unpack(io.LimitReader(bytes.NewReader(data), 1<<20), target, nil)
		entries, err := os.ReadDir(base)
		if err != nil || len(entries) != 2 || read(t, base+"/canary") != "alive" {
			t.Errorf("outside the target: %v, %v", entries, err)
		}
		os.Chmod(target, 0o755)
	})
}
