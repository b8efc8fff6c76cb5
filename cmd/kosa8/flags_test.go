package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/guestapi"
)

// complete runs the command line of run without running anything.
func complete(t *testing.T, args ...string) (runOptions, error) {
	t.Helper()
	var o runOptions
	var env []string
	c := runCommand(streams{}, &o, &env)
	if err := c.ParseFlags(args); err != nil {
		return o, err
	}
	return o, o.complete(c, streams{}, c.Flags().Args(), env)
}

func TestWhatFollowsTheImageBelongsToTheProgram(t *testing.T) {
	for _, args := range [][]string{
		{"base", "ls", "-t", "--json"},
		{"base", "--", "ls", "-t", "--json"},
		{"-q", "--", "base", "ls", "-t", "--json"},
	} {
		o, err := complete(t, args...)
		if err != nil {
			t.Errorf("%q: %v", args, err)
		}
		if want := []string{"ls", "-t", "--json"}; !slices.Equal(o.exec.Argv, want) || o.exec.TTY {
			t.Errorf("%q: runs %q, tty %v", args, o.exec.Argv, o.exec.TTY)
		}
	}
	o, err := complete(t, "base", "--", "--", "x")
	if want := []string{"--", "x"}; err != nil || !slices.Equal(o.exec.Argv, want) {
		t.Errorf("runs %q, %v, want %q", o.exec.Argv, err, want)
	}
}

func TestRunTakesEveryFlag(t *testing.T) {
	t.Setenv("PASSED", "from outside")
	t.Setenv("TERM", "xterm-test")
	o, err := complete(t, "-i", "-t", "-e", "A=1", "-e", "B=", "-e", "PASSED", "-e", "NOT_SET_ANYWHERE", "-w", "/tmp",
		"-u", "agent", "--cpus", "1", "--memory", "256m", "--timeout", "1m30s", "--accel", "tcg", "base", "sh")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"A=1", "B=", "PASSED=from outside", "TERM=xterm-test"}, o.exec.Env); diff != "" {
		t.Error(diff)
	}
	if o.machine.CPUs != 1 || o.machine.MemMB != 256 || o.machine.Accel != "tcg" || o.timeout != 90*time.Second {
		t.Errorf("machine %+v, timeout %v", o.machine, o.timeout)
	}
	if !o.exec.Stdin || !o.exec.TTY || o.exec.Dir != "/tmp" || o.exec.User != "agent" || o.exec.TimeoutMS != 90_000 {
		t.Errorf("exec %+v", o.exec)
	}
}

func TestAShortTimeoutIsNotNone(t *testing.T) {
	o, err := complete(t, "--timeout", "10us", "base", "true")
	if err != nil || o.exec.TimeoutMS != 1 {
		t.Errorf("timeout of %d ms, %v, want 1", o.exec.TimeoutMS, err)
	}
}

func TestAnImageWithoutAProgramIsAShellOnlyWithInput(t *testing.T) {
	o, err := complete(t, "-i", "base")
	if err != nil || !slices.Equal(o.exec.Argv, []string{"bash"}) {
		t.Errorf("runs %q, %v", o.exec.Argv, err)
	}
	if _, err := complete(t, "base"); cli.ExitCode(err) != 2 {
		t.Errorf("err %v, want one about usage", err)
	}
}

func TestNearestNamesAreWhatWasMeant(t *testing.T) {
	names := []string{"tr", "true", "tree", "truncate", "python3", "ls", "lsblk", strings.Repeat("x", 1000)}
	for word, want := range map[string][]string{
		"tru":     {"tr", "true", "truncate"},
		"pyhton3": {"python3"},
		"python":  {"python3"},
		"lss":     {"ls"},
		"qqqq":    nil,
		"":        nil,
	} {
		if diff := cmp.Diff(want, nearest(word, names, 3)); diff != "" {
			t.Errorf("%q: %s", word, diff)
		}
	}
}

func TestBytesThatWouldArriveChangedAreRefused(t *testing.T) {
	t.Setenv("OURS", "a\xff")
	_, err := complete(t, "-e", "GIVEN=\xfe", "-e", "OURS", "-w", "/\xfd", "-u", "\xfc", "base", "ls")
	if err == nil || cli.ExitCode(err) != cli.ExitUsage {
		t.Fatalf("error %v", err)
	}
	for _, want := range []string{`-e "GIVEN=\xfe": it is not UTF-8`, "-e OURS: its value here: it is not UTF-8"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("it does not say %q: %v", want, err)
		}
	}
	if n := strings.Count(err.Error(), "not UTF-8"); n != 4 {
		t.Errorf("%d faults of 4: %v", n, err)
	}
	if _, err := complete(t, "base", "ls", "\xff"); cli.ExitCode(err) != cli.ExitUsage || !strings.Contains(err.Error(), `argument "\xff"`) {
		t.Errorf("argument: %v", err)
	}
	if _, err := complete(t, "-e", "GIVEN=é", "base", "ls", "☃"); err != nil {
		t.Errorf("UTF-8: %v", err)
	}
}

func TestARemarkNamesTheMemoryThatTheVMHad(t *testing.T) {
	o, err := complete(t, "base", "true")
	if err != nil {
		t.Fatal(err)
	}
	err = ended(o, guestapi.ExitStatus{Code: 137, OOMKilled: true})
	if err == nil || !strings.Contains(err.Error(), "more than 1 GiB") {
		t.Errorf("remark %v", err)
	}
}
