package guestimage

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/warren-vm/warren/internal/guestimage/rootdisk"
)

// errCarried says that what was to be installed is no generation that Carry
// gave.
var errCarried = errors.New("not a whole guest image")

// carriedOrder is the order of the files, each with the most bytes it may have:
// several times what any image had so far.
var carriedOrder = []struct {
	name string
	most int64
}{
	{carriedManifest, maxManifest},
	{carriedKernel, 512 << 20},
	{carriedInitrd, 512 << 20},
	{carriedOverlay, 64 << 20},
	{carriedData, 512 << 20},
	{carriedDisk, 16 << 30},
}

// Installation takes a generation that comes from another machine. It keeps
// builds out until Close. It is for one goroutine.
//
// Take all files in the order of Carry, Publish, and Close in any case. Until
// Publish nobody sees anything of it, and what comes may come from anyone: the
// digests of the files have to be those of the manifest, and the image id that
// of the digests. A generation that is here whole is left as it is.
type Installation struct {
	ctx     context.Context
	home    string
	staging string
	release func()

	manifest Manifest
	taken    int
	here     bool // nothing needs to be written
}

// Install begins an installation. When it fails nothing is left.
func Install(ctx context.Context, home string, waiting func()) (*Installation, error) {
	home, err := filepath.Abs(home)
	if err != nil {
		return nil, err
	}
	release, err := lockBuild(ctx, home, waiting)
	if err != nil {
		return nil, err
	}
	sweep(home)
	staging, err := os.MkdirTemp(guestDir(home), buildPrefix)
	if err != nil {
		release()
		return nil, fmt.Errorf("guest image: %w", err)
	}
	return &Installation{ctx: ctx, home: home, staging: staging, release: release}, nil
}

// Close removes what was not published.
func (in *Installation) Close() error {
	err := rootdisk.RemoveAll(in.staging)
	sweep(in.home) // a damaged generation that this one replaced
	in.release()
	return err
}

// Begun says whether there is anything to publish.
func (in *Installation) Begun() bool { return in.taken > 0 }

// Take takes the next file and compares its digest. It need not read all of it.
func (in *Installation) Take(name string, size int64, r io.Reader) error {
	if in.taken == len(carriedOrder) || name != carriedOrder[in.taken].name {
		return fmt.Errorf("%w: %.60q is out of its place", errCarried, name)
	}
	if most := carriedOrder[in.taken].most; size > most {
		return fmt.Errorf("%w: %s has %d bytes; the most is %d", errCarried, name, size, most)
	}
	in.taken++
	if in.here {
		return nil
	}
	if name == carriedManifest {
		return in.takeManifest(r)
	}
	return noSpace(in.takeFile(name, size, r))
}

func (in *Installation) takeManifest(r io.Reader) error {
	data, err := io.ReadAll(io.LimitReader(r, maxManifest))
	if err != nil {
		return err
	}
	m, err := parseManifest("in the archive", data)
	if err != nil {
		return err
	}
	in.manifest = m
	if _, err := OpenGeneration(in.ctx, in.home, m.ImageID); err == nil {
		in.here = true
		return nil
	}
	return os.WriteFile(in.path(carriedManifest), m.encode(), 0o444)
}

// path is where a file goes.
func (in *Installation) path(name string) string {
	img := imageIn(in.staging)
	return map[string]string{
		carriedManifest: img.Disk + manifestSuffix,
		carriedKernel:   img.Kernel,
		carriedInitrd:   img.Initramfs,
		carriedOverlay:  img.DataTemplate,
		carriedData:     img.DataBase,
		carriedDisk:     img.Disk,
	}[name]
}

func (in *Installation) takeFile(name string, size int64, r io.Reader) error {
	want := map[string]string{
		carriedKernel:  in.manifest.KernelSHA256,
		carriedInitrd:  in.manifest.InitramfsSHA256,
		carriedOverlay: in.manifest.OverlaySHA256,
		carriedData:    in.manifest.DataSHA256,
		carriedDisk:    in.manifest.SHA256,
	}[name]
	f, err := os.OpenFile(in.path(name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return err
	}
	defer f.Close()
	sum := sha256.New()
	r = io.TeeReader(io.LimitReader(r, size), sum)
	if name == carriedData {
		err = readSparse(f, r)
	} else {
		_, err = io.Copy(f, r)
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = fmt.Errorf("%w: %s is cut short", errCarried, name)
	}
	if err != nil {
		return err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != want {
		return fmt.Errorf("%w: %s has the digest %s, its manifest says %s", errCarried, name, got, want)
	}
	return f.Close()
}

// Publish makes the generation, which has to be that one, one that VMs can be
// started from; the one in use only if there is none. It says whether it was
// not here before. The generation that was in use stays that.
func (in *Installation) Publish(id string) (fresh bool, err error) {
	switch {
	case in.taken != len(carriedOrder):
		return false, fmt.Errorf("%w: %s is missing", errCarried, carriedOrder[in.taken].name)
	case in.manifest.ImageID != id:
		return false, fmt.Errorf("%w: it is guest image %s, not %s", errCarried, in.manifest.ImageID, id)
	case in.here:
		return false, nil
	}
	// No recipe: a build takes nothing over from it.
	record, err := json.Marshal(buildRecord{BuiltUnix: time.Now().Unix()})
	if err != nil {
		return false, err
	}
	for name, data := range map[string][]byte{buildName: append(record, '\n'), lockName: nil} {
		if err := os.WriteFile(filepath.Join(in.staging, name), data, 0o444); err != nil {
			return false, noSpace(err)
		}
	}
	// Whatever our umask is: QEMU runs as another user.
	for _, c := range carriedOrder {
		if err := os.Chmod(in.path(c.name), 0o444); err != nil {
			return false, err
		}
	}
	right := rightStamps(in.home)
	defer right.renew()
	img, err := place(in.home, in.staging, in.manifest)
	if err != nil {
		return false, noSpace(err)
	}
	right.add(img) // its digests were computed just now
	if _, err := current(in.home); errors.Is(err, ErrNotBuilt) {
		return true, use(in.home, id)
	}
	return true, nil
}
