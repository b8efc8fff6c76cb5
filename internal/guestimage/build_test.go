package guestimage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// buildAs, set to a home, turns this test binary into a build: that is how a
// test that runs as root builds as an ordinary user.
const buildAs = "WARREN_TEST_BUILD_HOME"

func TestMain(m *testing.M) {
	if home := os.Getenv(buildAs); home != "" {
		_, err := Build(context.Background(), Options{
			Home: home, GuestBinary: os.Getenv("WARREN_TEST_AGENT"), Fresh: os.Getenv("WARREN_TEST_FRESH") != "",
			Log: os.Stdout, Progress: func(step string) { fmt.Println("step:", step) },
		})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// nobody is a user with no rights and no entry in /etc/subuid.
const nobody = 65534

// buildAsUser builds a whole image, as an ordinary user whoever runs the test.
func buildAsUser(t *testing.T) *Image {
	t.Helper()
	dir := t.TempDir()
	self, agent := filepath.Join(dir, "build"), filepath.Join(dir, "agent")
	copyProgram(t, os.Args[0], self)
	copyProgram(t, agentProgram(t, "agent"), agent)
	home := filepath.Join(dir, "home")
	if err := os.Mkdir(home, 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, buildAs + "=" + home, "WARREN_TEST_AGENT=" + agent, "WARREN_TEST_FRESH=1"}
	for _, e := range os.Environ() {
		if k, _, _ := strings.Cut(e, "="); strings.HasSuffix(strings.ToLower(k), "_proxy") {
			cmd.Env = append(cmd.Env, e)
		}
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(home, nobody, nobody); err != nil {
			t.Fatal(err)
		}
		// What an ordinary user may walk through, and only that.
		for d := dir; d != filepath.Dir(os.TempDir()) && d != "/"; d = filepath.Dir(d) {
			if err := os.Chmod(d, 0o755); err != nil || d == filepath.Dir(dir) {
				break
			}
		}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	cmd.Dir = home
	out, err := cmd.CombinedOutput()
	if err != nil {
		tail := string(out[max(0, len(out)-4000):])
		if strings.Contains(tail, "fetch package lists") {
			t.Skipf("the package sources of this host cannot be reached now: %s", tail)
		}
		t.Fatalf("%v\n%s", err, tail)
	}
	img, err := Open(home)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func copyProgram(t *testing.T, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(out, in)
	if err := errors.Join(err, out.Close()); err != nil {
		t.Fatal(err)
	}
}

// reference is an image with the packages of img: the one that setup built,
// or, when packages have changed since, one built now.
func reference(t *testing.T, img *Image) *Image {
	t.Helper()
	is, err := readBuild(img.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if home := sharedHome(); home != "" {
		if ref, err := Open(home); err == nil {
			was, err := readBuild(ref.Dir)
			if err == nil && was.Recipe == is.Recipe && was.Kernel == is.Kernel && was.PackagesSHA256 == is.PackagesSHA256 {
				return ref
			}
		}
	}
	ref, err := Build(t.Context(), Options{Home: t.TempDir(), GuestBinary: agentProgram(t, "agent")})
	if err != nil {
		t.Fatal(err)
	}
	return ref
}

// sharedHome is where setup builds the image that the VM tests use.
func sharedHome() string {
	if home := os.Getenv("WARREN_HOME"); home != "" {
		return home
	}
	if data := os.Getenv("XDG_DATA_HOME"); data != "" {
		return filepath.Join(data, "warren")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return ""
	}
	return filepath.Join(home, ".local", "share", "warren")
}

func TestTheSamePackagesGiveTheSameImageToEveryUser(t *testing.T) {
	img := buildAsUser(t)
	if got := generations(t, filepath.Dir(filepath.Dir(img.Dir))); len(got) != 1 {
		t.Errorf("the build left %v", got)
	}
	ref := reference(t, img)
	got, want := img.Manifest, ref.Manifest
	if got.SHA256 != want.SHA256 || got.KernelSHA256 != want.KernelSHA256 || got.DataSHA256 != want.DataSHA256 || got.OverlaySHA256 != want.OverlaySHA256 {
		t.Errorf("digests of %s\n%+v\nand of %s\n%+v", img.Dir, got, ref.Dir, want)
	}
	// The agents may differ, the modules before them may not.
	a, b := modulesOf(t, img), modulesOf(t, ref)
	if a != b {
		t.Error("the modules in the initramfs differ")
	}
}

func modulesOf(t *testing.T, img *Image) string {
	t.Helper()
	record, err := readBuild(img.Dir)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(img.Initramfs)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	data := make([]byte, record.ModulesBytes)
	if _, err := io.ReadFull(f, data); err != nil {
		t.Fatal(err)
	}
	return sha256Hex(data)
}

func TestABuildKilledAtAnyMomentLeavesAWholeImageInUse(t *testing.T) {
	home := t.TempDir()
	agents := []string{agentProgram(t, "one"), agentProgram(t, "two")}
	first, err := os.ReadFile(agents[0])
	if err != nil {
		t.Fatal(err)
	}
	generation(t, home, "root disk", first)
	// The first runs to its end, to know how long that is on this machine.
	killed, whole := 0, time.Minute
	for i := range 40 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), buildAs+"="+home, "WARREN_TEST_AGENT="+agents[(i+1)%2])
		start, after := time.Now(), whole
		if i > 0 {
			after = rand.N(whole)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		timer := time.AfterFunc(after, func() { _ = cmd.Process.Kill() })
		if err := cmd.Wait(); err != nil {
			killed++
		} else {
			whole = time.Since(start)
		}
		timer.Stop()
		if err := Verify(t.Context(), home, nil); err != nil {
			t.Fatalf("after %d builds: %v", i+1, err)
		}
	}
	// One that is let be removes what the others left.
	img, err := Build(t.Context(), Options{Home: home, GuestBinary: agents[0]})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range generations(t, home) {
		if !generationName.MatchString(name) {
			t.Errorf("%s is left", name)
		}
	}
	if again, err := Open(home); err != nil || again.Dir != img.Dir {
		t.Errorf("in use: %+v, %v", again, err)
	}
	t.Logf("%d of 40 builds were killed", killed)
}
