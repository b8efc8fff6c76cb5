package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
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
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"code": checkCode},
	})
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
