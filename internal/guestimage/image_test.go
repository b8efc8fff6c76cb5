package guestimage

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/guestimage/debian"
	"github.com/warren-vm/warren/internal/guestimage/initramfs"
	"github.com/warren-vm/warren/internal/guestimage/tool"
)

// generation publishes a small generation whose root disk has that content, and
// that the recipe of this machine would not build anew.
func generation(t *testing.T, home, content string, agent []byte) *Image {
	t.Helper()
	if err := os.MkdirAll(guestDir(home), 0o700); err != nil {
		t.Fatal(err)
	}
	staging, err := os.MkdirTemp(guestDir(home), buildPrefix)
	if err != nil {
		t.Fatal(err)
	}
	tools := &tool.Runner{}
	rel, err := debian.Host(t.Context(), tools)
	if err != nil {
		t.Fatal(err)
	}
	b := &build{Options: Options{Home: home, Progress: func(string) {}}, agent: agent, staging: staging, tools: tools, rel: rel, right: stamps{}}
	b.record = buildRecord{Recipe: recipe(rel), AgentSHA256: sha256Hex(agent), BuiltUnix: time.Now().UnixNano()}
	if err := os.Mkdir(b.out(), 0o700); err != nil {
		t.Fatal(err)
	}
	img := imageIn(b.out())
	for path, text := range map[string]string{img.Disk: content, img.Kernel: "kernel", img.DataBase: "data", img.DataTemplate: "overlay"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	err = b.writeInitramfs(func(w *bytes.Buffer) (err error) {
		b.record.ModulesBytes, err = initramfs.Write(w, nil, agent)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	m := Manifest{Schema: schema, Arch: runtime.GOARCH, Protocol: guestapi.Protocol}
	if err := b.sums(t.Context(), &m); err != nil {
		t.Fatal(err)
	}
	published, err := b.finish(t.Context(), m)
	b.right.renew()
	sweep(home)
	if err != nil {
		t.Fatal(err)
	}
	return published
}

// agentProgram builds a static program; different texts are different programs.
func agentProgram(t *testing.T, text string) string {
	t.Helper()
	dir := t.TempDir()
	src, out := filepath.Join(dir, "main.go"), filepath.Join(dir, "agent")
	if err := os.WriteFile(src, []byte("package main\nfunc main() { println(\""+text+"\") }\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "build", "-o", out, src)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if msg, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, msg)
	}
	return out
}

func TestOpenSaysThatThereIsNoImage(t *testing.T) {
	home := t.TempDir()
	_, err := Open(home)
	if !errors.Is(err, ErrNotBuilt) || err.Error() != "no guest image in "+home+"/guest; build it: kosa8 image build" {
		t.Fatalf("got %v", err)
	}
	if err := Verify(t.Context(), home, nil); !errors.Is(err, ErrNotBuilt) {
		t.Fatalf("verify: %v", err)
	}
}

func TestOpenTrustsWhatDidNotChangeAndNothingElse(t *testing.T) {
	home := t.TempDir()
	img := generation(t, home, "root disk", []byte("agent"))
	got, err := Open(home)
	if err != nil || got.Dir != img.Dir || !got.stamped() {
		t.Fatalf("got %+v, %v", got, err)
	}

	t.Run("a touched file is read again", func(t *testing.T) {
		now := time.Now()
		if err := os.Chtimes(img.Kernel, now, now); err != nil {
			t.Fatal(err)
		}
		if got.stamped() {
			t.Fatal("its change time is new, but the stamp still fits")
		}
		if _, err := Open(home); err != nil || !got.stamped() {
			t.Fatalf("not verified and recorded anew: %v", err)
		}
	})
	t.Run("a changed file is refused even with its old size and times", func(t *testing.T) {
		info, err := os.Stat(img.Kernel)
		if err != nil {
			t.Fatal(err)
		}
		rewrite(t, img.Kernel, "KERNEL")
		if err := os.Chtimes(img.Kernel, info.ModTime(), info.ModTime()); err != nil {
			t.Fatal(err)
		}
		for _, err := range []error{second(Open(home)), Verify(t.Context(), home, nil)} {
			if !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "the kernel "+img.Kernel+" has the digest ") {
				t.Fatalf("got %v", err)
			}
		}
		rewrite(t, img.Kernel, "kernel")
		if err := Verify(t.Context(), home, nil); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("a link in the place of a file is refused", func(t *testing.T) {
		if err := errors.Join(os.Rename(img.Disk, img.Disk+"x"), os.Symlink(img.Disk+"x", img.Disk)); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(home); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "is not a regular file") {
			t.Fatalf("got %v", err)
		}
		if err := os.Remove(img.Disk); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(home); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "is missing") {
			t.Fatalf("got %v", err)
		}
	})
}

func second(_ *Image, err error) error { return err }

func rewrite(t *testing.T, path, text string) {
	t.Helper()
	if err := errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
}

func TestCurrentMustNameAGeneration(t *testing.T) {
	home := t.TempDir()
	img := generation(t, home, "root disk", []byte("agent"))
	link := filepath.Join(guestDir(home), currentName)
	for _, target := range []string{"../guest/" + filepath.Base(img.Dir), "/etc", "", strings.Repeat("0", 24)} {
		_ = os.Remove(link)
		if target == "" {
			if err := os.WriteFile(link, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		} else if err := os.Symlink(target, link); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(home); !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrNotBuilt) {
			t.Errorf("current -> %q: %v", target, err)
		}
	}
}

func TestANewAgentTakesThePackagesOver(t *testing.T) {
	home := t.TempDir()
	one, two := agentProgram(t, "one"), agentProgram(t, "two")
	first, err := os.ReadFile(one)
	if err != nil {
		t.Fatal(err)
	}
	old := generation(t, home, "root disk", first)

	same, err := Build(t.Context(), Options{Home: home, GuestBinary: one})
	if err != nil || same.Dir != old.Dir {
		t.Fatalf("the same agent: %+v, %v", same, err)
	}
	img, err := Build(t.Context(), Options{Home: home, GuestBinary: two})
	if err != nil {
		t.Fatal(err)
	}
	if img.Dir == old.Dir || img.Manifest.SHA256 != old.Manifest.SHA256 || img.Manifest.InitramfsSHA256 == old.Manifest.InitramfsSHA256 {
		t.Fatalf("got %+v", img.Manifest)
	}
	for _, pair := range [][2]string{{img.Disk, old.Disk}, {img.Kernel, old.Kernel}, {img.DataBase, old.DataBase}, {img.DataTemplate, old.DataTemplate}} {
		a, errA := os.Stat(pair[0])
		b, errB := os.Stat(pair[1])
		if errors.Join(errA, errB) != nil || !os.SameFile(a, b) {
			t.Errorf("%s was copied", pair[0])
		}
	}
	// The links must not cost either generation its stamp.
	if !img.stamped() || !old.stamped() {
		t.Error("the next start would compute digests")
	}
	if err := Verify(t.Context(), home, nil); err != nil {
		t.Fatal(err)
	}
	// The agent is the end of the initramfs; the modules before it are the same.
	was, _ := os.ReadFile(old.Initramfs)
	is, _ := os.ReadFile(img.Initramfs)
	agent, _ := os.ReadFile(two)
	if !bytes.Contains(is, agent) || bytes.Contains(is, first) || !bytes.Equal(was[:512], is[:512]) {
		t.Error("the initramfs is not the old modules with the new agent")
	}
	// Going back gives the old name again, and it is built over, not trusted.
	back, err := Build(t.Context(), Options{Home: home, GuestBinary: one})
	if err != nil || back.Dir != old.Dir || !back.stamped() {
		t.Fatalf("back to the first agent: %+v, %v", back, err)
	}
}

func TestOldGenerationsGoWhenNobodyNeedsThem(t *testing.T) {
	home := t.TempDir()
	a := generation(t, home, "a", []byte("agent"))
	release, err := a.Hold()
	if err != nil {
		t.Fatal(err)
	}
	b := generation(t, home, "b", []byte("agent"))
	c := generation(t, home, "c", []byte("agent"))
	d := generation(t, home, "d", []byte("agent"))
	if got, want := generations(t, home), []*Image{a, c, d}; !sameDirs(got, want) {
		t.Fatalf("with a held: %v", got)
	}
	if _, err := b.Hold(); !errors.Is(err, ErrNotBuilt) {
		t.Errorf("hold what is gone: %v", err)
	}
	release()
	e := generation(t, home, "e", []byte("agent"))
	if got, want := generations(t, home), []*Image{d, e}; !sameDirs(got, want) {
		t.Fatalf("with nothing held: %v", got)
	}
}

func TestNoGenerationGoesThatSomethingNeedsOrThatMay(t *testing.T) {
	home := t.TempDir()
	a := generation(t, home, "a", []byte("agent"))
	release, err := a.Hold()
	if err != nil {
		t.Fatal(err)
	}
	generation(t, home, "b", []byte("agent"))
	c := generation(t, home, "c", []byte("agent"))
	release()
	for _, tt := range []struct {
		name string
		keep []string
		err  error
		left int
	}{
		{"it cannot be told", nil, errors.New("the disk is gone"), 3},
		{"it is needed", []string{a.Manifest.ImageID}, nil, 3},
		{"another is needed", []string{c.Manifest.ImageID}, nil, 2},
	} {
		keep := func(context.Context) ([]string, error) { return tt.keep, tt.err }
		if err := prune(t.Context(), home, c, keep); err != nil {
			t.Fatal(err)
		}
		if got := generations(t, home); len(got) != tt.left {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
}

func generations(t *testing.T, home string) []string {
	t.Helper()
	entries, err := os.ReadDir(guestDir(home))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		if e.Name() != lockName && e.Name() != currentName {
			got = append(got, e.Name())
		}
	}
	return got
}

func sameDirs(got []string, want []*Image) bool {
	var names []string
	for _, w := range want {
		names = append(names, filepath.Base(w.Dir))
	}
	slices.Sort(names)
	return slices.Equal(got, names)
}

func TestAnInterruptedBuildChangesNothingAndIsCleanedUp(t *testing.T) {
	home := t.TempDir()
	one := agentProgram(t, "one")
	agent, err := os.ReadFile(one)
	if err != nil {
		t.Fatal(err)
	}
	old := generation(t, home, "root disk", agent)
	// What builds leave that were killed while building, while removing an old
	// generation, and between making the new link and swapping it.
	for _, left := range []string{buildPrefix + "1/root/usr", oldPrefix + "2/generation"} {
		if err := os.MkdirAll(filepath.Join(guestDir(home), left), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("nowhere", filepath.Join(guestDir(home), buildPrefix+currentName)); err != nil {
		t.Fatal(err)
	}
	if img, err := Open(home); err != nil || img.Dir != old.Dir {
		t.Fatalf("before the clean-up: %v", err)
	}
	if _, err := Build(t.Context(), Options{Home: home, GuestBinary: one}); err != nil {
		t.Fatal(err)
	}
	if got := generations(t, home); !sameDirs(got, []*Image{old}) {
		t.Fatalf("left: %v", got)
	}
}

func TestLeftoversAreNamedAndSweptUnlessOneIsBeingMade(t *testing.T) {
	home := t.TempDir()
	if got := Leftovers(home); len(got) > 0 {
		t.Errorf("of no folder: %q", got)
	}
	in, err := Install(t.Context(), home, func() {})
	if err != nil {
		t.Fatal(err)
	}
	if got := Leftovers(home); len(got) > 0 {
		t.Errorf("what is being made counts as left: %q", got)
	}
	Sweep(home)
	if _, err := os.Stat(in.staging); err != nil {
		t.Fatalf("what is being made was swept: %v", err)
	}
	in.release() // as if it had been killed
	if got := Leftovers(home); !slices.Equal(got, []string{filepath.Base(in.staging)}) {
		t.Errorf("left: %q", got)
	}
	Sweep(home)
	if got := Leftovers(home); len(got) > 0 {
		t.Errorf("after the sweep: %q", got)
	}
}

func TestABuildThatFailsLeavesTheOldOneInUse(t *testing.T) {
	home := t.TempDir()
	one := agentProgram(t, "one")
	old := generation(t, home, "root disk", []byte("another agent"))
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("the user had enough")
	_, err := Build(ctx, Options{Home: home, GuestBinary: one, Fresh: true, Progress: func(string) { cancel(gone) }})
	if !errors.Is(err, gone) {
		t.Fatalf("got %v", err)
	}
	if img, err := Open(home); err != nil || img.Dir != old.Dir || !img.stamped() {
		t.Fatalf("the old one: %+v, %v", img, err)
	}
	if got := generations(t, home); !sameDirs(got, []*Image{old}) {
		t.Fatalf("left: %v", got)
	}
}

func TestBuildsWaitForEachOther(t *testing.T) {
	home := t.TempDir()
	release, err := lockBuild(t.Context(), home, func() { t.Error("waited for nobody") })
	if err != nil {
		t.Fatal(err)
	}
	waiting, got := make(chan struct{}), make(chan error, 1)
	go func() {
		release, err := lockBuild(t.Context(), home, func() { close(waiting) })
		if err == nil {
			release()
		}
		got <- err
	}()
	<-waiting
	select {
	case err := <-got:
		t.Fatalf("two builds at once (%v)", err)
	default:
	}
	release()
	if err := <-got; err != nil {
		t.Fatal(err)
	}
	release, err = lockBuild(t.Context(), home, func() {})
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := lockBuild(ctx, home, cancel); !errors.Is(err, context.Canceled) {
		t.Errorf("a build that stops waiting: %v", err)
	}
}

func TestTheAgentMustRunWithoutLibraries(t *testing.T) {
	dir := t.TempDir()
	script := filepath.Join(dir, "script")
	if err := os.WriteFile(script, []byte("#!/bin/sh\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	for path, says := range map[string]string{
		filepath.Join(dir, "none"): "no such file or directory; build it: make build",
		script:                     "is not an ELF program",
		"/bin/true":                "is linked dynamically, and the initramfs has no libraries",
	} {
		_, err := Build(t.Context(), Options{Home: filepath.Join(dir, "home"), GuestBinary: path})
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "home")); !errors.Is(err, os.ErrNotExist) {
		t.Error("a home was made for nothing")
	}
}

func TestAFullDiskIsSeenBeforeAnythingIsWritten(t *testing.T) {
	dir := t.TempDir()
	err := space(dir, 1<<60)
	if !errors.Is(err, ErrNoSpace) || !strings.Contains(err.Error(), "set WARREN_HOME to a larger disk") {
		t.Fatalf("got %v", err)
	}
	if err := space(dir, 1); err != nil {
		t.Fatal(err)
	}
}
