package tool

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestErrorsCarryTheLastLinesFitForATerminal(t *testing.T) {
	var log bytes.Buffer
	r := &Runner{Log: &log}
	err := r.Run(t.Context(), Command{Name: "sh", Args: []string{"-c", `for i in $(seq 9); do echo line $i; done; printf '\033[31mred\n' >&2; exit 3`}})
	if err == nil || !strings.HasPrefix(err.Error(), "sh: exit status 3:\n  line 5\n") || !strings.HasSuffix(err.Error(), "\n  [31mred") {
		t.Fatalf("got %q", err)
	}
	if !strings.Contains(log.String(), "line 1\n") {
		t.Errorf("log: %q", log.String())
	}
}

func TestAMissingProgramNamesItsPackage(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	r := &Runner{}
	packages["no-such-squash"] = "squashfs-tools"
	defer delete(packages, "no-such-squash")
	err := r.Run(t.Context(), Command{Name: "no-such-squash"})
	if !Missing(err) || !strings.HasSuffix(err.Error(), "install it: sudo apt-get install --no-install-recommends squashfs-tools") {
		t.Fatalf("got %v", err)
	}
	if r.Has("no-such-squash") {
		t.Error("Has")
	}
}

func TestNothingOfTheEnvironmentComesThroughButWhatIsMeantTo(t *testing.T) {
	t.Setenv("SECRET", "x")
	t.Setenv("TZ", "Asia/Tokyo")
	t.Setenv("https_proxy", "http://proxy.test")
	r := &Runner{Temp: "/scratch", Env: []string{"MORE=1"}}
	out, err := r.Output(t.Context(), "env")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"LC_ALL=C.UTF-8\n", "https_proxy=http://proxy.test\n", "TMPDIR=/scratch\n", "MORE=1\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is missing", want)
		}
	}
	if strings.Contains(out, "SECRET") || strings.Contains(out, "TZ=") {
		t.Errorf("too much: %s", out)
	}
}

func TestAnEndedContextEndsAllThatAProgramStarted(t *testing.T) {
	dir := t.TempDir()
	ready := filepath.Join(dir, "ready")
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("enough")
	go func() {
		for ctx.Err() == nil {
			if _, err := os.Stat(ready); err == nil {
				cancel(gone)
			}
			time.Sleep(5 * time.Millisecond)
		}
	}()
	r := &Runner{}
	// The child holds the output open: Run returns only when it has ended.
	err := r.Run(ctx, Command{Name: "sh", Args: []string{"-c", "sleep 600 & : > " + ready + "; wait"}})
	if !errors.Is(err, gone) {
		t.Fatalf("got %v", err)
	}
}
