package boot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// rootModule is the last module that the root disk needs.
const rootModule = "squashfs.ko"

// moduleOrder is what dir/order lists, one file name a line, in load order:
// the modules that the root disk needs and those after them.
func moduleOrder(dir string) (root, others []string, err error) {
	order, err := os.ReadFile(filepath.Join(dir, "order"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil, nil // all built into the kernel
	}
	if err != nil {
		return nil, nil, err
	}
	names := strings.Fields(string(order))
	n := slices.Index(names, rootModule) + 1
	return names[:n], names[n:], nil
}

// loadModules loads modules of dir and removes their files: in an initramfs
// they are memory. A module that the kernel has already, or whose device or
// processor is not here, is passed over.
//
// One after the other on purpose. Two at a time was measured under emulation:
// no gain on an idle host and up to twice the time on a busy one, because the
// kernel interrupts all processors for each piece of code that it patches.
func loadModules(dir string, names []string) error {
	for _, name := range names {
		if err := loadModule(filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("module %s: %w", name, err)
		}
	}
	return nil
}

func loadModule(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.FinitModule(fd, "", 0); err != nil && err != unix.EEXIST && err != unix.ENODEV {
		return err
	}
	return unix.Unlink(path)
}
