package rootdisk

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestimage/tool"
)

var (
	packagedAt = time.Date(2025, 5, 1, 10, 0, 0, 0, time.UTC)
	builtAt    = time.Date(2026, 11, 30, 16, 0, 0, 123456789, time.UTC)
)

type entry struct {
	name    string
	mode    int64
	kind    byte
	content string
	at      time.Time
}

// tree is what mmdebstrap would give, built at that time.
func tree(t *testing.T, at time.Time) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range []entry{
		{"./", 0o700, tar.TypeDir, "", at},
		{"./dev/", 0o755, tar.TypeDir, "", at},
		{"./dev/null", 0o666, tar.TypeChar, "", at},
		{"./etc/", 0o755, tar.TypeDir, "", at},
		{"./etc/passwd", 0o644, tar.TypeReg, "root:x:0:0:root:/root:/bin/bash\nagent:x:7:7::/:/bin/false", at},
		{"./etc/group", 0o644, tar.TypeReg, "root:x:0:\n", at},
		{"./etc/shadow", 0o640, tar.TypeReg, "root:*:" + at.Format("05150") + ":0:99999:7:::\n", at},
		{"./etc/resolv.conf", 0o644, tar.TypeReg, "nameserver " + at.String(), at},
		{"./etc/hostname", 0o644, tar.TypeReg, "builder", at},
		{"./etc/apt/sources.list", 0o644, tar.TypeReg, "deb http://mirror.test/ x main", at},
		{"./etc/apt/sources.list.d/", 0o755, tar.TypeDir, "", at},
		{"./usr/", 0o755, tar.TypeDir, "", at},
		{"./usr/bin/", 0o755, tar.TypeDir, "", at},
		{"./usr/bin/su", 0o4755, tar.TypeReg, "su", packagedAt},
		{"./usr/bin/wall", 0o2755, tar.TypeReg, "wall", packagedAt},
		{"./usr/bin/made", 0o755, tar.TypeReg, "made", at},
		{"./usr/bin/same", 0o755, tar.TypeLink, "./usr/bin/su", packagedAt},
		{"./usr/share/doc/su/", 0o755, tar.TypeDir, "", at},
		{"./usr/share/doc/su/copyright", 0o644, tar.TypeReg, "GPL", packagedAt},
		{"./usr/share/doc/su/README", 0o644, tar.TypeReg, "read", packagedAt},
		{"./usr/share/doc/su/examples/", 0o755, tar.TypeDir, "", at},
		{"./usr/share/doc/su/examples/copyright", 0o644, tar.TypeReg, "x", packagedAt},
		{"./var/cache/ldconfig/aux-cache", 0o600, tar.TypeReg, at.String(), at},
		{"./var/log/dpkg.log", 0o644, tar.TypeReg, at.String(), at},
		{"./var/lib/dpkg/info/su.list", 0o644, tar.TypeReg, "/.\n/usr\n/usr/bin/su\n/usr/bin/wall\n", at},
		{"./var/lib/dpkg/status", 0o644, tar.TypeReg, "Package: su\n", at},
		{"./tmp/", 0o1777, tar.TypeDir, "", at},
		{"./tmp/x", 0o644, tar.TypeReg, "x", at},
	} {
		h := &tar.Header{Name: e.name, Mode: e.mode, Typeflag: e.kind, ModTime: e.at, Format: tar.FormatPAX,
			PAXRecords: map[string]string{"SCHILY.xattr.security.capability": "cap"}}
		if e.kind == tar.TypeLink {
			h.Linkname = e.content
		} else {
			h.Size = int64(len(e.content))
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := io.WriteString(w, e.content); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func cleaned(t *testing.T, at time.Time) []byte {
	t.Helper()
	in := tree(t, at)
	c, err := Examine(bytes.NewReader(in))
	if err != nil || !c.Newest.Equal(packagedAt) || c.Status == "" {
		t.Fatalf("got %+v, %v", c, err)
	}
	var out bytes.Buffer
	if err := Clean(&out, bytes.NewReader(in), c.Newest, "", nil); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestTheDayOfTheBuildLeavesNoTrace(t *testing.T) {
	a, b := cleaned(t, builtAt), cleaned(t, builtAt.Add(1000*time.Hour+7*time.Second))
	if sha256.Sum256(a) != sha256.Sum256(b) {
		t.Error("the same packages on another day give another disk")
	}
}

func TestTheRootDiskIsClean(t *testing.T) {
	found := map[string]*tar.Header{}
	content := map[string]string{}
	r := tar.NewReader(bytes.NewReader(cleaned(t, builtAt)))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(h.Name, "/")
		if found[name] != nil {
			t.Errorf("%s is there twice", name)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		found[name], content[name] = h, string(data)
		switch {
		case h.Mode&0o6000 != 0:
			t.Errorf("%s is setuid or setgid: %o", name, h.Mode)
		case h.ModTime.After(packagedAt):
			t.Errorf("%s is from %v", name, h.ModTime)
		case len(h.PAXRecords) > 0:
			t.Errorf("%s has %v", name, h.PAXRecords)
		case h.Typeflag == tar.TypeChar:
			t.Errorf("%s is a device", name)
		}
	}
	for _, gone := range []string{"dev/null", "var/cache/ldconfig/aux-cache", "var/log/dpkg.log", "tmp/x",
		"usr/share/doc/su/README", "usr/share/doc/su/examples/copyright"} {
		if found[gone] != nil {
			t.Errorf("%s is there", gone)
		}
	}
	for name, want := range map[string]string{
		"etc/passwd":                 "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000::/home/agent:/bin/bash\n",
		"etc/group":                  "root:x:0:\nagent:x:1000:\n",
		"etc/shadow":                 "root:*::0:99999:7:::\nagent:!:::::::\n",
		"etc/machine-id":             "",
		"usr/share/doc/su/copyright": "GPL",
		"usr/bin/su":                 "su",
		"var/lib/dpkg/status":        "Package: su\n",
		"etc/hostname":               "warren\n",
		"var/lib/apt/lists/partial":  "",
		"etc/apt/sources.list.d":     "",
		"usr/share/doc/su":           "",
		"home/agent":                 "",
		"proc":                       "",
		"usr/bin/same":               "",
		"var/lib/dpkg/info/su.list":  "/.\n/usr\n/usr/bin/su\n/usr/bin/wall\n",
		"home/agent/.bashrc":         content["home/agent/.profile"],
		"var/cache/apt/archives":     "",
		"etc/dpkg/dpkg.cfg.d/warren": strings.Join(exclude, "\n") + "\n",
	} {
		if found[name] == nil {
			t.Errorf("%s is missing", name)
		} else if content[name] != want {
			t.Errorf("%s is %q, want %q", name, content[name], want)
		}
	}
	if strings.Contains(content["etc/resolv.conf"]+content["etc/apt/sources.list"], "mirror") || strings.Contains(content["etc/resolv.conf"], "nameserver") {
		t.Error("something of the building host's network is on the disk")
	}
	if h := found["home/agent"]; h.Uid != agentID || h.Gid != agentID || found["tmp"].Mode != 0o1777 || found["usr/bin/same"].Linkname != "usr/bin/su" ||
		found["etc/machine-id"].Linkname != "/run/warren/machine-id" {
		t.Errorf("home %+v, tmp %o, link %s", h, found["tmp"].Mode, found["usr/bin/same"].Linkname)
	}
}

func TestAnEmptyTreeIsRefused(t *testing.T) {
	var b bytes.Buffer
	if err := tar.NewWriter(&b).Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Examine(&b); err == nil || !strings.Contains(err.Error(), "nothing in it that dpkg installed") {
		t.Errorf("got %v", err)
	}
}

func TestQuoteKeepsAShellFromReadingAPath(t *testing.T) {
	if got := quote(`/home/o'brien/$(x)`); got != `'/home/o'\''brien/$(x)'` {
		t.Errorf("got %s", got)
	}
}

func TestTheRootFolderIsTheSameWhoeverWritesTheDisk(t *testing.T) {
	var disks [2][]byte
	for i := range disks {
		path := filepath.Join(t.TempDir(), "disk")
		if err := squash(t.Context(), &tool.Runner{}, bytes.NewReader(cleaned(t, builtAt)), path, packagedAt); err != nil {
			t.Fatal(err)
		}
		// Times are in seconds: the second disk is written in another one.
		time.Sleep(1100 * time.Millisecond)
		var err error
		if disks[i], err = os.ReadFile(path); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(disks[0], disks[1]) {
		t.Error("two disks of the same tree differ")
	}
	bad := filepath.Join(t.TempDir(), "bad")
	if err := os.WriteFile(bad, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := setRootTime(bad, packagedAt); err == nil || err.Error() != "not a squashfs of version 4" {
		t.Errorf("got %v", err)
	}
}
