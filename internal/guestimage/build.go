package guestimage

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/guestimage/debian"
	"github.com/warren-vm/warren/internal/guestimage/tool"
	"github.com/warren-vm/warren/internal/store/digest"
)

// Options say what to build where.
type Options struct {
	// Home is $WARREN_HOME.
	Home string
	// GuestBinary is the agent, a static program for this architecture.
	GuestBinary string
	// Fresh builds from today's packages even when the recipe did not change.
	Fresh bool
	// Keep names the generations that something refers to although they are no
	// longer in use; they stay. It is asked again for each that would go. When
	// it returns an error none goes. Nil keeps the one before the one in use,
	// and those that are held.
	Keep func(ctx context.Context) ([]string, error)
	// Log takes what the tools print; nil throws it away.
	Log io.Writer
	// Progress is told what is being done, in a few words each; it is called
	// from several goroutines. Nil is fine.
	Progress func(step string)
}

// ErrNoSpace says that the disk cannot hold what is to be built. Nothing was
// written.
var ErrNoSpace = errors.New("not enough disk space")

// Space that a build needs, in bytes: for all of it (measured: 1.1 GB at its
// highest), and for one that takes the packages over.
const (
	spaceWhole  = 1600 << 20
	spaceReused = 64 << 20
)

// buildRecord is build.json: what a generation was built from.
type buildRecord struct {
	// Recipe is the digest of the recipe, AgentSHA256 of the agent.
	Recipe      string `json:"recipe"`
	AgentSHA256 string `json:"agent_sha256"`
	// Kernel is the kernel's version, PackagesSHA256 the digest of the list of
	// installed packages with their versions: with the same of both, and the
	// same recipe and agent, a build gives the same image.
	Kernel         string `json:"kernel"`
	PackagesSHA256 string `json:"packages_sha256"`
	// ModulesBytes is the size of the first archive of the initramfs, which
	// the agent follows.
	ModulesBytes int64 `json:"modules_bytes"`
	BuiltUnix    int64 `json:"built_unix"`
}

func readBuild(dir string) (buildRecord, error) {
	var b buildRecord
	data, err := os.ReadFile(filepath.Join(dir, buildName))
	if err == nil {
		err = json.Unmarshal(data, &b)
	}
	return b, err
}

// Build makes the guest image from this host's package sources and puts it in
// use, as any user. Nothing is installed on the host.
//
// When the generation in use was made by the same recipe, its packages are
// taken over and only the agent is new; when the agent is the same too nothing
// is done. When Build returns an error the generation that was in use is still
// in use. Two builds in one home wait for each other.
func Build(ctx context.Context, o Options) (*Image, error) {
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	agent, err := readAgent(o.GuestBinary)
	if err != nil {
		return nil, err
	}
	if o.Home, err = filepath.Abs(o.Home); err != nil {
		return nil, err
	}
	release, err := lockBuild(ctx, o.Home, func() { o.Progress("waiting for another build to end") })
	if err != nil {
		return nil, err
	}
	defer release()
	right := rightStamps(o.Home)
	defer func() { right.renew() }()
	sweep(o.Home)
	staging, err := os.MkdirTemp(guestDir(o.Home), buildPrefix)
	if err != nil {
		return nil, fmt.Errorf("guest image: %w", err)
	}
	b := &build{Options: o, agent: agent, staging: staging, right: right}
	img, err := b.run(ctx)
	sweep(o.Home)
	if err != nil {
		return nil, noSpace(err)
	}
	return img, nil
}

// readAgent reads the agent and makes sure that the guest's kernel will run it.
func readAgent(path string) ([]byte, error) {
	agent, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("guest image: read the agent: %w; build it: make build", err)
	}
	if err := checkStatic(agent); err != nil {
		return nil, fmt.Errorf("guest image: the agent %s %w; build it: make build", path, err)
	}
	return agent, nil
}

// noSpace names the one error of a tool that a user can do something about.
func noSpace(err error) error {
	if errors.Is(err, unix.ENOSPC) || err != nil && bytes.Contains([]byte(err.Error()), []byte("No space left on device")) {
		return fmt.Errorf("%w: %w", ErrNoSpace, err)
	}
	return err
}

// build is one build. Files of the new generation go to out, all else to
// other folders in staging.
type build struct {
	Options
	agent   []byte
	staging string
	tools   *tool.Runner
	rel     debian.Release
	record  buildRecord
	right   stamps
}

func (b *build) out() string { return filepath.Join(b.staging, "generation") }

func (b *build) run(ctx context.Context) (*Image, error) {
	b.tools = &tool.Runner{Log: b.Log, Temp: filepath.Join(b.staging, "tmp")}
	for _, d := range []string{b.out(), b.tools.Temp} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return nil, err
		}
	}
	var err error
	if b.rel, err = debian.Host(ctx, b.tools); err != nil {
		return nil, err
	}
	b.record = buildRecord{Recipe: recipe(b.rel), AgentSHA256: sha256Hex(b.agent), BuiltUnix: time.Now().Unix()}

	old, was := b.reusable(ctx)
	if old != nil && was.AgentSHA256 == b.record.AgentSHA256 {
		return old, prune(ctx, b.Home, old, b.Keep)
	}
	m := Manifest{Schema: schema, Arch: runtime.GOARCH, Protocol: guestapi.Protocol}
	if old != nil {
		err = b.reuse(ctx, old, was, &m)
	} else {
		err = b.whole(ctx, &m)
	}
	if err != nil {
		return nil, err
	}
	return b.finish(ctx, m)
}

// reusable is the generation in use when its packages can be taken over.
func (b *build) reusable(ctx context.Context) (*Image, buildRecord) {
	if b.Fresh {
		return nil, buildRecord{}
	}
	img, err := OpenContext(ctx, b.Home)
	if err != nil {
		// None, or a damaged one, or one of another version: build all of it.
		return nil, buildRecord{}
	}
	was, err := readBuild(img.Dir)
	if err != nil || was.Recipe != b.record.Recipe {
		return nil, buildRecord{}
	}
	b.right.add(img)
	return img, was
}

// finish writes what describes the generation and publishes it.
func (b *build) finish(ctx context.Context, m Manifest) (*Image, error) {
	m.ImageID = m.id()
	record, err := json.MarshalIndent(b.record, "", "  ")
	if err != nil {
		return nil, err
	}
	for name, data := range map[string][]byte{
		diskName + manifestSuffix: m.encode(),
		buildName:                 append(record, '\n'),
		lockName:                  nil,
	} {
		if err := os.WriteFile(filepath.Join(b.out(), name), data, 0o444); err != nil {
			return nil, err
		}
	}
	for _, f := range imageIn(b.out()).files() {
		if err := os.Chmod(f.path, 0o444); err != nil {
			return nil, err
		}
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	b.Progress("publishing")
	img, err := publish(b.Home, b.out(), m)
	if err != nil {
		return nil, err
	}
	// The digests were computed from these very files.
	b.right.add(img)
	return img, prune(ctx, b.Home, img, b.Keep)
}

// sums fills in the digests of files that were just made.
func (b *build) sums(ctx context.Context, m *Manifest) (err error) {
	img := imageIn(b.out())
	for _, f := range []struct {
		field *string
		path  string
		sum   func(context.Context, string) (string, error)
	}{
		{&m.SHA256, img.Disk, digest.File},
		{&m.KernelSHA256, img.Kernel, digest.File},
		{&m.InitramfsSHA256, img.Initramfs, digest.File},
		{&m.DataSHA256, img.DataBase, digest.Sparse},
		{&m.OverlaySHA256, img.DataTemplate, digest.File},
	} {
		if *f.field != "" {
			continue
		}
		if *f.field, err = f.sum(ctx, f.path); err != nil {
			return err
		}
	}
	return nil
}

// space makes sure that dir's file system can take that many bytes.
func space(dir string, need int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return err
	}
	free := int64(st.Bavail) * st.Bsize
	if free < need {
		return fmt.Errorf("%w: %s has %d MiB free, building the guest image takes %d MiB; "+
			"free some, or set WARREN_HOME to a larger disk", ErrNoSpace, dir, free>>20, need>>20)
	}
	return nil
}
