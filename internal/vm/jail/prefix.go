package jail

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Prefixes returns the folders outside /usr that a program needs, for
// Command.Prefixes, and the program's path without symbolic links.
//
// A program under PREFIX/bin has its libraries and data under PREFIX; one from
// a Nix or Guix store has them all over the store. A prefix that would show
// the program a home folder or the system's configuration is refused.
func Prefixes(program string) (path string, prefixes []string, err error) {
	path, err = filepath.EvalSymlinks(program)
	if err != nil {
		return "", nil, err
	}
	if path, err = filepath.Abs(path); err != nil {
		return "", nil, err
	}
	dir := filepath.Dir(path)
	for _, system := range []string{"/usr", "/bin", "/sbin"} {
		if within(system, dir) {
			return path, nil, nil
		}
	}
	for _, store := range []string{"/nix/store", "/gnu/store"} {
		if within(store, dir) {
			return path, []string{store}, nil
		}
	}
	if base := filepath.Base(dir); base == "bin" || base == "sbin" {
		dir = filepath.Dir(dir)
	}
	if holds := holdsPrivate(dir); holds != "" {
		return "", nil, fmt.Errorf("%s would show the VM's process %s; install it under /usr, /opt or a folder of its own", path, holds)
	}
	return path, []string{dir}, nil
}

// holdsPrivate names what a prefix would show that it must not, or is "".
func holdsPrivate(prefix string) string {
	private := []string{"/etc", "/root", "/home", "/var", "/run", "/tmp", "/proc", "/sys", "/dev", "/srv", "/mnt", "/media"}
	if home, err := os.UserHomeDir(); err == nil {
		private = append(private, home)
		if real, err := filepath.EvalSymlinks(home); err == nil {
			private = append(private, real)
		}
	}
	i := slices.IndexFunc(private, func(p string) bool { return within(prefix, p) })
	if i < 0 {
		return ""
	}
	return private[i]
}

// within reports whether path is dir or lies in it; both are clean.
func within(dir, path string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}
