package rootdisk

import (
	"archive/tar"
	"strings"

	"github.com/warren-vm/warren/internal/guestapi"
)

// agentID is the user and group of the one ordinary user.
const agentID = 1000

// edits change files of the distribution.
var edits = map[string]func([]byte) []byte{
	"etc/passwd":  adding("agent:x:1000:1000::/home/agent:/bin/bash"),
	"etc/group":   adding("agent:x:1000:"),
	"etc/gshadow": adding("agent:!::"),
	"etc/shadow":  func(old []byte) []byte { return adding("agent:!:::::::")(undated(old)) },
}

// adding adds a line to a file, in the place of one with the same name.
func adding(line string) func([]byte) []byte {
	name, _, _ := strings.Cut(line, ":")
	return func(old []byte) []byte {
		var b strings.Builder
		for l := range strings.Lines(string(old)) {
			if !strings.HasPrefix(l, name+":") {
				b.WriteString(strings.TrimSuffix(l, "\n") + "\n")
			}
		}
		b.WriteString(line + "\n")
		return []byte(b.String())
	}
}

// undated removes the day of the last change of each password: it is the day
// of the build.
func undated(shadow []byte) []byte {
	var b strings.Builder
	for l := range strings.Lines(string(shadow)) {
		f := strings.Split(strings.TrimSuffix(l, "\n"), ":")
		if len(f) > 2 {
			f[2] = ""
		}
		b.WriteString(strings.Join(f, ":") + "\n")
	}
	return []byte(b.String())
}

// folders are mount points and places to write, empty.
var folders = []struct {
	name string
	mode int64
	id   int
}{
	{"boot", 0o755, 0}, {"dev", 0o755, 0}, {"home", 0o755, 0}, {"home/agent", 0o755, agentID}, {"media", 0o755, 0},
	{"mnt", 0o755, 0}, {"proc", 0o555, 0}, {"root", 0o700, 0}, {"run", 0o755, 0}, {"srv", 0o755, 0}, {"sys", 0o555, 0},
	{"tmp", 0o1777, 0}, {"usr/local/bin", 0o755, 0}, {"var/cache/apt/archives/partial", 0o755, 0},
	{"var/lib/apt/lists/partial", 0o755, 0}, {"var/log/apt", 0o755, 0}, {"var/tmp", 0o1777, 0},
	{"workspace", 0o755, agentID},
}

// files are written by us. The agent fills in the host name of each VM, the
// network its resolv.conf, both in the overlay.
var files = []struct{ name, content string }{
	{"etc/hostname", "warren\n"},
	{"etc/hosts", "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"},
	{"etc/resolv.conf", "# written when the guest has a network\n"},
	{"etc/default/locale", "LANG=C.UTF-8\n"},
	{"etc/locale.conf", "LANG=C.UTF-8\n"},
	{"etc/apt/sources.list", "# none: the building host's own sources are its own affair\n"},
	{"etc/dpkg/dpkg.cfg.d/warren", strings.Join(exclude, "\n") + "\n"},
}

// own adds what is ours.
func (w *writer) own() error {
	for _, d := range folders {
		if err := w.dir(d.name, d.mode, d.id); err != nil {
			return err
		}
	}
	for _, f := range files {
		if err := w.file(f.name, 0o644, 0, []byte(f.content)); err != nil {
			return err
		}
	}
	if err := w.header(tar.Header{Typeflag: tar.TypeSymlink, Name: "etc/machine-id", Linkname: guestapi.MachineIDFile, Mode: 0o777, ModTime: w.newest}); err != nil {
		return err
	}
	for _, f := range []string{".bashrc", ".profile"} {
		if err := w.file("home/agent/"+f, 0o644, agentID, []byte("# empty on purpose: this shell starts as fast as it can\n")); err != nil {
			return err
		}
	}
	return nil
}
