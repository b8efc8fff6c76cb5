package jail

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestPrefixesShowNothingPrivate(t *testing.T) {
	root := t.TempDir() // below /tmp, which is private as a whole but not below
	program := filepath.Join(root, "qemu", "bin", "qemu-system-x86_64")
	os.MkdirAll(filepath.Dir(program), 0o755)
	os.WriteFile(program, nil, 0o755)
	path, prefixes, err := Prefixes(program)
	real, _ := filepath.EvalSymlinks(program)
	if err != nil || path != real || len(prefixes) != 1 || prefixes[0] != filepath.Dir(filepath.Dir(real)) {
		t.Errorf("%s, %v, %v", path, prefixes, err)
	}
	// A program in the home's bin would show the whole home.
	t.Setenv("HOME", filepath.Join(root, "qemu"))
	if _, _, err := Prefixes(program); err == nil || !strings.Contains(err.Error(), "would show the VM's process "+os.Getenv("HOME")) {
		t.Errorf("home: %v", err)
	}
	// A link is followed to where the program is.
	sleep := filepath.Join(root, "link")
	os.Symlink("/usr/bin/sleep", sleep)
	if path, prefixes, err := Prefixes(sleep); err != nil || !strings.HasPrefix(path, "/usr/bin/") || prefixes != nil {
		t.Errorf("link: %s, %v, %v", path, prefixes, err)
	}
	if _, _, err := Prefixes(filepath.Join(root, "none")); err == nil {
		t.Error("a program that is not there")
	}
	for _, dir := range []string{"/", "/home", "/etc", "/var/lib/../../var"} {
		if holdsPrivate(filepath.Clean(dir)) == "" {
			t.Errorf("%s is let through", dir)
		}
	}
}

func TestAProgramOutsideUsrRunsFromItsPrefix(t *testing.T) {
	root := t.TempDir()
	t.Setenv("HOME", filepath.Join(root, "home"))
	bin := filepath.Join(root, "opt", "bin")
	os.MkdirAll(bin, 0o755)
	for dir := bin; dir != root; dir = filepath.Dir(dir) {
		os.Chmod(dir, 0o755)
	}
	src, err := os.ReadFile("/usr/bin/true")
	if err != nil {
		t.Fatal(err)
	}
	os.WriteFile(filepath.Join(bin, "mine"), src, 0o755)
	path, prefixes, err := Prefixes(filepath.Join(bin, "mine"))
	if err != nil {
		t.Fatal(err)
	}
	c := command("true")
	c.Path, c.Prefixes = path, prefixes
	if _, state := run(t, c); !state.Success() {
		t.Errorf("ended with %v", state)
	}
}
