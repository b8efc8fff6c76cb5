package guestimage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/digest"
)

// Names of the files in a generation.
const (
	kernelName       = "kernel"
	initramfsName    = "initramfs"
	dataName         = "data.raw"
	overlayName      = "data.qcow2"
	buildName        = "build.json"
	stampName        = "stamp.json"
	lockName         = "lock"
	currentName      = "current"
	diskName         = "warren-guest-linux-" + runtime.GOARCH + ".raw"
	manifestSuffix   = ".manifest.json"
	buildPrefix      = ".build-"
	oldPrefix        = ".old-"
	generationDigits = `^[0-9a-f]{24}$`
)

// DataSize is the size of the data disk, in bytes. It is sparse.
const DataSize = 32 << 30

// Errors that callers decide on.
var (
	// ErrNotBuilt says that there is no guest image yet.
	ErrNotBuilt = errors.New("no guest image")
	// ErrDamaged says that a generation is not what its manifest says: a file
	// is missing, is not a regular file, or has another digest.
	ErrDamaged = errors.New("guest image is damaged")
)

// Image is one generation of the guest image, ready to start VMs from. All
// paths are absolute. Nobody may write to any of the files.
type Image struct {
	// Dir is the generation's folder, without the link.
	Dir string
	// Disk is the root disk, DataBase the raw file under every VM's data disk,
	// DataTemplate the empty qcow2 overlay that a VM's own is a copy of.
	Disk, Kernel, Initramfs, DataBase, DataTemplate string
	Manifest                                        Manifest
}

// guestDir is where all generations are.
func guestDir(home string) string { return filepath.Join(home, "guest") }

var generationName = regexp.MustCompile(generationDigits)

// Open finds the guest image in use and makes sure that it is what was built.
//
// It reads the manifest strictly, and compares the files' sizes, inodes and
// change times with the ones recorded when their digests were last computed.
// If those differ it computes the digests (a second or two) and records anew.
// The error is ErrNotBuilt, ErrDamaged, or one of the manifest's.
func Open(home string) (*Image, error) { return OpenContext(context.Background(), home) }

// OpenContext is Open with an end to its patience.
func OpenContext(ctx context.Context, home string) (*Image, error) {
	id, err := current(home)
	if err != nil {
		return nil, err
	}
	return OpenGeneration(ctx, home, id)
}

// OpenGeneration is Open for one generation, whether it is in use or not: what
// was made from one image must go on with it.
func OpenGeneration(ctx context.Context, home, id string) (*Image, error) {
	img, err := load(home, id)
	if err != nil || img.stamped() {
		return img, err
	}
	if err := img.verify(ctx, func(string) {}); err != nil {
		return nil, err
	}
	return img, nil
}

// current is the id of the generation in use.
func current(home string) (string, error) {
	link := filepath.Join(guestDir(home), currentName)
	id, err := os.Readlink(link)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("%w in %s; build it: kosa8 image build", ErrNotBuilt, guestDir(home))
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.ENOTDIR):
		return "", store.WithRemedy(fmt.Errorf("guest image: %w", err))
	case err != nil:
		return "", damaged("%s is not a link to a generation: %w", link, err)
	}
	return id, nil
}

// load reads a generation's manifest and nothing else.
func load(home, id string) (*Image, error) {
	if !generationName.MatchString(id) {
		return nil, damaged("%.60q is not the name of a generation", id)
	}
	dir := filepath.Join(guestDir(home), id)
	info, err := os.Lstat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w %s: %s is gone; build it: kosa8 image build", ErrNotBuilt, id, dir)
	case err != nil:
		return nil, err
	case !info.IsDir():
		return nil, damaged("%s is not a folder", dir)
	}
	img := imageIn(dir)
	if img.Manifest, err = ReadManifest(img.Disk + manifestSuffix); err != nil {
		return nil, err
	}
	if img.Manifest.ImageID != id {
		return nil, damaged("%s holds image %s", dir, img.Manifest.ImageID)
	}
	return img, nil
}

func imageIn(dir string) *Image {
	if abs, err := filepath.Abs(dir); err == nil {
		dir = abs
	}
	return &Image{
		Dir:          dir,
		Disk:         filepath.Join(dir, diskName),
		Kernel:       filepath.Join(dir, kernelName),
		Initramfs:    filepath.Join(dir, initramfsName),
		DataBase:     filepath.Join(dir, dataName),
		DataTemplate: filepath.Join(dir, overlayName),
	}
}

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %w; build it anew: kosa8 image build", ErrDamaged, fmt.Errorf(format, args...))
}

// Hold keeps a generation from being removed by a build until release is
// called or the process ends. Whoever starts a VM holds its image for the VM's
// life. ErrNotBuilt says that it was removed since it was opened: open again.
func (img *Image) Hold() (release func(), err error) {
	f, err := os.OpenFile(filepath.Join(img.Dir, lockName), os.O_RDONLY|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w %s: %s is gone; try again", ErrNotBuilt, img.Manifest.ImageID, img.Dir)
	}
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil {
		// Only a build that is removing it holds it alone.
		_ = f.Close()
		return nil, fmt.Errorf("%w %s: %s is being removed; try again", ErrNotBuilt, img.Manifest.ImageID, img.Dir)
	}
	if _, err := os.Lstat(img.Disk); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("%w %s: %s is gone; try again", ErrNotBuilt, img.Manifest.ImageID, img.Dir)
	}
	return func() { _ = f.Close() }, nil
}

// Verify computes all digests of the image in use anew, whatever was recorded.
// progress is told what is being read; it may be nil.
func Verify(ctx context.Context, home string, progress func(step string)) error {
	if progress == nil {
		progress = func(string) {}
	}
	id, err := current(home)
	if err != nil {
		return err
	}
	img, err := load(home, id)
	if err != nil {
		return err
	}
	return img.verify(ctx, progress)
}

// file is one file with a digest in the manifest.
type file struct {
	path, what, want string
	sum              func(context.Context, string) (string, error)
}

func (img *Image) files() []file {
	m := img.Manifest
	return []file{
		{img.Disk, "root disk", m.SHA256, digest.File},
		{img.Kernel, "kernel", m.KernelSHA256, digest.File},
		{img.Initramfs, "initramfs", m.InitramfsSHA256, digest.File},
		{img.DataBase, "data disk", m.DataSHA256, digest.Sparse},
		{img.DataTemplate, "data overlay", m.OverlaySHA256, digest.File},
	}
}

// verify computes all digests and, when they are right, records the files as
// they are. A file that changes meanwhile is not recorded.
func (img *Image) verify(ctx context.Context, progress func(string)) error {
	before, err := img.look()
	if err != nil {
		return err
	}
	for _, f := range img.files() {
		progress("reading the " + f.what)
		got, err := f.sum(ctx, f.path)
		if err != nil {
			return fmt.Errorf("verify the %s: %w", f.what, err)
		}
		if got != f.want {
			return damaged("the %s %s has the digest %s, its manifest says %s", f.what, f.path, got, f.want)
		}
	}
	after, err := img.look()
	if err != nil {
		return err
	}
	if before != after {
		return damaged("its files changed while they were read")
	}
	img.record(after)
	return nil
}
