package boot

import (
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestapi"
)

// newIdentityFiles are those of a guest with folders alone.
func newIdentityFiles(t *testing.T) *identityFiles {
	t.Helper()
	fs := &identityFiles{root: t.TempDir()}
	for _, dir := range []string{"/etc", "/run"} {
		if err := os.Mkdir(fs.root+dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(guestapi.MachineIDFile, fs.root+"/etc/machine-id"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { fs.machineID.close(); fs.generation.close() })
	if err := fs.write(anIdentity); err != nil {
		t.Fatal(err)
	}
	return fs
}

// another is an identity with all its files of another length or content.
func another(generation uint64) guestapi.Identity {
	id := anIdentity
	id.MachineID, id.Generation = strings.Repeat("1b", 16), generation
	return id
}

func (fs *identityFiles) want(t *testing.T, id guestapi.Identity, generation string) {
	t.Helper()
	if got := read(t, fs.root+guestapi.MachineIDFile); got != id.MachineID+"\n" {
		t.Errorf("machine id %q", got)
	}
	if got := read(t, fs.root+guestapi.GenerationFile); got != generation+"\n" {
		t.Errorf("generation %q", got)
	}
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Sys().(*syscall.Stat_t).Ino
}

func TestIdentityIsWrittenWhereItIs(t *testing.T) {
	fs := newIdentityFiles(t)
	fs.want(t, anIdentity, "18446744073709551615")
	if target, err := os.Readlink(fs.root + "/etc/machine-id"); err != nil || target != guestapi.MachineIDFile {
		t.Errorf("the link is %q, %v", target, err)
	}
	was := inode(t, fs.root+guestapi.GenerationFile)
	if err := fs.write(another(2)); err != nil {
		t.Fatal(err)
	}
	fs.want(t, another(2), "2")
	if inode(t, fs.root+guestapi.GenerationFile) != was {
		t.Error("the generation is a new file: a guest without room could not be copied")
	}
}

func TestIdentityFilesThatAProgramRemovedOrReplacedAreMadeAnew(t *testing.T) {
	fs := newIdentityFiles(t)
	if err := os.RemoveAll(fs.root + "/run/warren"); err != nil {
		t.Fatal(err)
	}
	if err := fs.write(another(2)); err != nil {
		t.Fatal(err)
	}
	fs.want(t, another(2), "2")
	path := fs.root + guestapi.GenerationFile
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	victim := fs.root + "/victim"
	if err := os.WriteFile(victim, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, path); err != nil {
		t.Fatal(err)
	}
	if err := fs.write(another(3)); err != nil {
		t.Fatal(err)
	}
	fs.want(t, another(3), "3")
	if read(t, victim) != "mine" {
		t.Error("it was written through a link")
	}
}

func TestMachineIDOfAProgramIsReplacedToo(t *testing.T) {
	fs := newIdentityFiles(t)
	link := fs.root + "/etc/machine-id"
	for name, put := range map[string]func() error{
		"file":   func() error { return os.WriteFile(link, []byte("old\n"), 0o644) },
		"link":   func() error { return os.Symlink("/nowhere", link) },
		"nobody": func() error { return nil },
	} {
		if err := os.RemoveAll(link); err != nil {
			t.Fatal(err)
		}
		if err := put(); err != nil {
			t.Fatal(err)
		}
		if err := fs.write(another(2)); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := read(t, link); got != another(2).MachineID+"\n" {
			t.Errorf("%s: %q", name, got)
		}
	}
	// A folder holds no id that two machines could share.
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(link+"/in-the-way", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := fs.write(another(3)); err != nil {
		t.Error(err)
	}
	fs.want(t, another(3), "3")
}

func TestGenerationIsTheLastToChange(t *testing.T) {
	fs := newIdentityFiles(t)
	// A file of the machine id that cannot be replaced.
	path := fs.root + guestapi.MachineIDFile
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(path+"/in-the-way", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := fs.write(another(2)); err == nil {
		t.Error("no error")
	}
	if got := read(t, fs.root+guestapi.GenerationFile); got != "18446744073709551615\n" {
		t.Errorf("generation %q", got)
	}
}

func TestMachineIDThatIsMountedIsWrittenThrough(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting takes root, as the guest's agent is")
	}
	fs := newIdentityFiles(t)
	link, other := fs.root+"/etc/machine-id", fs.root+"/other"
	for _, path := range []string{link + ".new", other} {
		if err := os.WriteFile(path, []byte("old, and longer than an id is in this file of a program\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Rename(link+".new", link); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(other, link, "", unix.MS_BIND, ""); err != nil {
		t.Skip("no mounts here: ", err)
	}
	defer unix.Unmount(link, unix.MNT_DETACH)
	if err := fs.write(another(2)); err != nil {
		t.Fatal(err)
	}
	if got := read(t, link); got != another(2).MachineID+"\n" {
		t.Errorf("%q", got)
	}
}
