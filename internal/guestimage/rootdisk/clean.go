package rootdisk

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"time"

	"github.com/warren-vm/warren/internal/guestimage/kernel"
)

// drop are the paths, with all below them, that differ from build to build,
// belong to the building host, or are of no use in a guest. A folder with a
// slash at the end stays and is emptied.
var drop = []string{
	"dev/", "proc/", "sys/", "run/", "tmp/", "var/tmp/", "boot/", "media/", "srv/",
	"var/cache/", "var/log/", "var/lib/apt/lists/", "var/lib/systemd/", "var/backups/",
	"var/lib/dpkg/status-old", "var/lib/dpkg/available-old", "var/lib/dpkg/diversions-old", "var/lib/dpkg/statoverride-old",
	"var/lib/dpkg/lock", "var/lib/dpkg/lock-frontend", "var/lib/dpkg/triggers/Lock", "var/lib/apt/periodic/",
	"etc/passwd-", "etc/group-", "etc/shadow-", "etc/gshadow-", "etc/subuid-", "etc/subgid-", "etc/.pwd.lock",
	// Everything of the host's sources: they may name its own mirrors.
	"etc/apt/sources.list", "etc/apt/sources.list.d/", "etc/apt/apt.conf.d/99mmdebstrap", "etc/dpkg/dpkg.cfg.d/99mmdebstrap",
	// Replaced by files of ours.
	"etc/hostname", "etc/hosts", "etc/resolv.conf", "etc/machine-id", "var/lib/dbus/machine-id", "etc/locale.conf",
	"etc/default/locale", "home/",
	"usr/share/man/", "usr/share/info/", "usr/share/locale/", "usr/share/lintian/", "usr/share/bug/",
}

// dropped says whether a path is left out.
func dropped(name string) bool {
	for _, d := range drop {
		if folder, ok := strings.CutSuffix(d, "/"); ok {
			if strings.HasPrefix(name, d) && name != folder {
				return true
			}
		} else if name == d {
			return true
		}
	}
	// usr/share/doc keeps the licences.
	depth := strings.Count(name, "/")
	return strings.HasPrefix(name, "usr/share/doc/") && (depth > 4 || depth == 4 && path.Base(name) != "copyright")
}

// Contents is what a bootstrapped tree holds.
type Contents struct {
	// Newest is the newest time of a file that came out of a package. Files
	// that were made while packages were installed are newer; no file of the
	// disk is. Times of packaged files stay as they are: Python compares them
	// with the ones in its compiled files.
	Newest time.Time
	// Status is the digest of dpkg's list of what is installed in which
	// version: two trees with the same one have to give the same disk.
	Status string
}

// Examine reads a tar that Bootstrap made.
func Examine(r io.Reader) (Contents, error) {
	var c Contents
	packaged := map[string]bool{}
	times := map[string]time.Time{}
	t := tar.NewReader(r)
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return c, err
		}
		name := clean(h.Name)
		if h.Typeflag == tar.TypeReg {
			times[name] = h.ModTime
		}
		switch {
		case name == "var/lib/dpkg/status":
			sum := sha256.New()
			if _, err := io.Copy(sum, t); err != nil {
				return c, err
			}
			c.Status = hex.EncodeToString(sum.Sum(nil))
		case strings.HasPrefix(name, "var/lib/dpkg/info/") && strings.HasSuffix(name, ".list"):
			list, err := io.ReadAll(io.LimitReader(t, 16<<20))
			if err != nil {
				return c, err
			}
			for line := range strings.Lines(string(list)) {
				packaged[clean(strings.TrimSpace(line))] = true
			}
		}
	}
	for name, at := range times {
		if packaged[name] && at.After(c.Newest) {
			c.Newest = at
		}
	}
	if c.Newest.IsZero() || c.Status == "" {
		return c, errors.New("there is nothing in it that dpkg installed")
	}
	c.Newest = c.Newest.Truncate(time.Second)
	return c, nil
}

func clean(name string) string { return strings.TrimPrefix(path.Clean("/"+name), "/") }

// Clean copies a root tree from one tar to another without what differs from
// build to build, without setuid and setgid bits, capabilities and device
// nodes, with no time after newest, with the user agent, our own few files
// and the kernel's modules.
func Clean(w io.Writer, r io.Reader, newest time.Time, kernelVersion string, modules []kernel.Module) error {
	out := &writer{tar: tar.NewWriter(w), newest: newest, have: map[string]bool{}}
	in := tar.NewReader(r)
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if err := out.copy(h, in); err != nil {
			return fmt.Errorf("%s: %w", h.Name, err)
		}
	}
	if err := out.own(); err != nil {
		return err
	}
	if err := out.modules(kernelVersion, modules); err != nil {
		return err
	}
	return out.tar.Close()
}

type writer struct {
	tar    *tar.Writer
	newest time.Time
	have   map[string]bool
}

func (w *writer) copy(h *tar.Header, content io.Reader) error {
	name := clean(h.Name)
	switch {
	case name == "" || dropped(name):
		return nil
	case h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock || h.Typeflag == tar.TypeFifo:
		return nil
	}
	// A folder that the archive leaves out would be made by sqfstar, with the
	// time of the build.
	if err := w.dir(path.Dir(name), 0o755, 0); err != nil {
		return err
	}
	w.have[name] = true
	n := tar.Header{
		Typeflag: h.Typeflag, Name: name, Linkname: h.Linkname, Size: h.Size,
		// The sticky bit stays; the setuid and setgid bits go: nobody in a
		// guest has a use for them, and whoever breaks out of a container
		// would.
		Mode: h.Mode & 0o1777, Uid: h.Uid, Gid: h.Gid, ModTime: h.ModTime,
	}
	if h.Typeflag == tar.TypeLink {
		n.Linkname = clean(h.Linkname)
	}
	if edit := edits[name]; edit != nil && h.Typeflag == tar.TypeReg {
		old, err := io.ReadAll(io.LimitReader(content, 1<<20))
		if err != nil {
			return err
		}
		n.ModTime = w.newest
		return w.put(n, edit(old))
	}
	if err := w.header(n); err != nil {
		return err
	}
	if h.Typeflag == tar.TypeReg {
		_, err := io.Copy(w.tar, content)
		return err
	}
	return nil
}

func (w *writer) header(h tar.Header) error {
	if h.ModTime.After(w.newest) {
		h.ModTime = w.newest
	}
	h.ModTime = h.ModTime.Truncate(time.Second)
	if h.Typeflag == tar.TypeDir {
		h.Name += "/"
	}
	h.Format = tar.FormatPAX
	return w.tar.WriteHeader(&h)
}

func (w *writer) put(h tar.Header, content []byte) error {
	h.Size = int64(len(content))
	if err := w.header(h); err != nil {
		return err
	}
	_, err := w.tar.Write(content)
	return err
}

// dir adds a folder and its parents, where they are not there yet.
func (w *writer) dir(name string, mode int64, id int) error {
	if name == "." || name == "" || w.have[name] {
		return nil
	}
	if err := w.dir(path.Dir(name), 0o755, 0); err != nil {
		return err
	}
	w.have[name] = true
	return w.header(tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: mode, Uid: id, Gid: id, ModTime: w.newest})
}

func (w *writer) file(name string, mode int64, id int, content []byte) error {
	if err := w.dir(path.Dir(name), 0o755, 0); err != nil {
		return err
	}
	return w.put(tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Uid: id, Gid: id, ModTime: w.newest}, content)
}

// modules puts the modules where modprobe would look for them, with the
// modules.dep that tells what each needs.
func (w *writer) modules(version string, modules []kernel.Module) error {
	root := path.Join("usr/lib/modules", version)
	var dep bytes.Buffer
	for _, m := range modules {
		content, err := m.Content()
		if err != nil {
			return err
		}
		if err := w.file(path.Join(root, m.Path), 0o644, 0, content); err != nil {
			return err
		}
		fmt.Fprintf(&dep, "%s:", m.Path)
		// modules.dep names the nearest first.
		for i := len(m.Needs) - 1; i >= 0; i-- {
			fmt.Fprintf(&dep, " %s", m.Needs[i])
		}
		dep.WriteByte('\n')
	}
	if version == "" {
		return nil
	}
	return w.file(path.Join(root, "modules.dep"), 0o644, 0, dep.Bytes())
}
