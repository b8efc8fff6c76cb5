package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
)

var update = flag.Bool("update", false, "write what the commands print into the golden files of testdata/script")

// bin is the folder with the programs under test, built once: kosa8 starts
// abox-vmm, is killed, and is measured, so it must be the real one.
var bin string

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "kosa8-test-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		bin = dir
		build := exec.Command("go", "build", "-o", dir, ".", "../abox-vmm")
		if out, err := build.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build the programs under test: %v\n%s", err, out)
			return 1
		}
		return m.Run()
	}())
}

// TestCommandsSayWhatTheScriptsSay needs no VM.
func TestCommandsSayWhatTheScriptsSay(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		UpdateScripts:       *update,
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(e *testscript.Env) error {
			e.Setenv("HOME", filepath.Join(e.WorkDir, "user"))
			e.Setenv("WARREN_HOME", filepath.Join(e.WorkDir, "warren"))
			e.Setenv("PATH", bin+string(filepath.ListSeparator)+os.Getenv("PATH"))
			e.Setenv("BIN", bin)
			e.Setenv("TZ", "UTC")
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"code": checkCode, "fabricate": fabricate},
	})
}

// fabricate is "fabricate ID KIND LABEL [PARENT]": it puts a snapshot that no VM
// goes on from into the home.
func fabricate(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 3 || len(args) > 4 {
		ts.Fatalf("usage: fabricate ID KIND LABEL [PARENT]")
	}
	m := snapshots.Manifest{
		Kind: snapshots.Kind(args[1]), Label: args[2], Created: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		ImageID: "0123456789abcdef01234567", Prepared: true,
		Machine: snapshots.Machine{CPUs: 1, MemMB: 128, Accel: "tcg", QEMU: "7.2.0", CPUModel: "a processor"},
		Memory:  snapshots.Memory{Kind: snapshots.MemoryFlat},
	}
	if len(args) == 4 {
		m.Parent, m.Memory = args[3], snapshots.Memory{Kind: snapshots.MemoryDifference, Bytes: 4096}
	}
	ctx := context.Background()
	d, err := snapshots.In(store.Home(ts.Getenv("WARREN_HOME"))).Draft(ctx, args[0])
	ts.Check(err)
	defer d.Discard()
	for _, name := range []string{snapshots.StateName, snapshots.MemoryName} {
		ts.Check(os.WriteFile(d.Path(name), []byte(name), 0o600))
	}
	if m.Parent == "" {
		ts.Check(os.Truncate(d.Path(snapshots.MemoryName), 128<<20))
	}
	sn, err := d.Publish(ctx, m)
	ts.Check(err)
	ts.Check(sn.Close())
}

// checkCode is "code N command…": the command must end with exit code N.
// testscript itself only knows whether it was 0.
func checkCode(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: code N command…")
	}
	err := ts.Exec(args[1], args[2:]...)
	got := 0
	if exit, is := err.(*exec.ExitError); is {
		got = exit.ExitCode()
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if fmt.Sprint(got) != args[0] {
		ts.Fatalf("%q ended with %d, want %s", args[1:], got, args[0])
	}
}
