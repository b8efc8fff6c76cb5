//go:build ignore

// Testrun runs every test and then every fuzz target of the module, shows what
// it is doing, and ends with one line: "N passed, N failed".
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	tests := flag.Bool("tests", true, "run the tests")
	fuzz := flag.Bool("fuzz", true, "run the fuzz targets")
	fuzztime := flag.Duration("fuzztime", 30*time.Second, "how long each fuzz target runs")
	timeout := flag.Duration("timeout", 20*time.Minute, "how long one package's tests may take")
	flag.Parse()
	pkgs := flag.Args()
	if len(pkgs) == 0 {
		pkgs = []string{"./..."}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	var t tally
	if *tests {
		t.add(runTests(ctx, pkgs, *timeout))
	}
	if *fuzz && ctx.Err() == nil {
		t.add(runFuzz(ctx, pkgs, *fuzztime))
	}
	if ctx.Err() != nil {
		fmt.Println("interrupted")
		t.failed++
	}
	if t.skipped > 0 {
		fmt.Printf("\n%d skipped, each for the reason shown above\n", t.skipped)
	}
	fmt.Printf("\n%d passed, %d failed\n", t.passed, t.failed)
	if t.failed > 0 || t.passed == 0 {
		os.Exit(1)
	}
}

// tally counts tests. A package that does not compile or dies outside a test
// is a failed one.
type tally struct{ passed, failed, skipped int }

func (t *tally) add(o tally) {
	t.passed += o.passed
	t.failed += o.failed
	t.skipped += o.skipped
}

// event is what go test -json prints; see go doc test2json.
type event struct {
	Action, Package, Test, Output, ImportPath string
	Elapsed                                   float64
	FailedBuild                               string
}

// run is what is known of one package while it runs.
type run struct {
	tally
	// output of tests that have not ended, and of the package itself ("").
	output map[string]*bytes.Buffer
}

func (r *run) buffer(test string) *bytes.Buffer {
	if r.output[test] == nil {
		r.output[test] = new(bytes.Buffer)
	}
	return r.output[test]
}

func runTests(ctx context.Context, pkgs []string, timeout time.Duration) tally {
	cmd := command(ctx, append([]string{"test", "-json", "-timeout", timeout.String()}, pkgs...)...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		fatal(err)
	}
	var total tally
	runs := map[string]*run{}
	builds := map[string]*bytes.Buffer{}
	lines := bufio.NewReader(out)
	for {
		line, err := lines.ReadBytes('\n')
		var e event
		if json.Unmarshal(line, &e) == nil && e.Action != "" {
			total.add(handle(e, runs, builds))
		} else if len(bytes.TrimSpace(line)) > 0 {
			os.Stdout.Write(line)
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			fatal(err)
		}
	}
	// go test fails without a failed test when a package cannot be loaded.
	if err := cmd.Wait(); err != nil && total.failed == 0 {
		fmt.Printf("go test: %v\n", err)
		total.failed++
	}
	return total
}

// handle takes one event in, and returns what it adds to the tally.
func handle(e event, runs map[string]*run, builds map[string]*bytes.Buffer) tally {
	if e.Action == "build-output" || e.Action == "build-fail" {
		if builds[e.ImportPath] == nil {
			builds[e.ImportPath] = new(bytes.Buffer)
		}
		builds[e.ImportPath].WriteString(e.Output)
		return tally{}
	}
	r := runs[e.Package]
	if r == nil {
		r = &run{output: map[string]*bytes.Buffer{}}
		runs[e.Package] = r
	}
	ended := e.Action == "pass" || e.Action == "fail" || e.Action == "skip"
	switch {
	case e.Action == "output":
		r.buffer(e.Test).WriteString(e.Output)
	case ended && e.Test != "":
		return r.end(e)
	case ended:
		return r.endPackage(e, builds)
	}
	return tally{}
}

// end is the end of one test. Only those without a parent count: how many
// cases a test has is its own affair.
func (r *run) end(e event) tally {
	var t tally
	switch e.Action {
	case "fail":
		fmt.Printf("\n--- failed: %s %s\n%s", short(e.Package), e.Test, r.buffer(e.Test))
		t.failed = 1
	case "skip":
		fmt.Printf("skipped: %s %s\n%s", short(e.Package), e.Test, r.buffer(e.Test))
		t.skipped = 1
	default:
		t.passed = 1
	}
	delete(r.output, e.Test)
	if strings.Contains(e.Test, "/") {
		return tally{}
	}
	r.add(t)
	return t
}

func (r *run) endPackage(e event, builds map[string]*bytes.Buffer) tally {
	var t tally
	if e.Action == "fail" && r.failed == 0 {
		// It did not compile, or died: what never ended tells why.
		t.failed = 1
		fmt.Printf("\n--- failed: %s\n", short(e.Package))
		if b := builds[e.FailedBuild]; b != nil {
			fmt.Print(b)
		}
		for _, b := range r.output {
			fmt.Print(b)
		}
	}
	if n := r.passed + r.failed + t.failed; n > 0 {
		fmt.Printf("%-4s %-40s %3d tests %8.1fs\n", map[bool]string{true: "ok", false: "FAIL"}[e.Action == "pass"], short(e.Package), n, e.Elapsed)
	}
	delete(builds, e.FailedBuild)
	return t
}

// target is one fuzz function.
type target struct{ pkg, name string }

// runFuzz runs all targets, two at a time with one worker each: that fills two
// cores, and more would only make slow machines slower.
func runFuzz(ctx context.Context, pkgs []string, each time.Duration) tally {
	targets, err := fuzzTargets(ctx, pkgs)
	if err != nil {
		fmt.Printf("list fuzz targets: %v\n", err)
		return tally{failed: 1}
	}
	if len(targets) == 0 {
		return tally{}
	}
	fmt.Printf("\nfuzzing %d targets for %s each\n", len(targets), each)
	var mu sync.Mutex
	var total tally
	queue := make(chan target)
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for t := range queue {
				start := time.Now()
				out, err := fuzzOne(ctx, t, each)
				mu.Lock()
				if err != nil {
					total.failed++
					fmt.Printf("\n--- failed: %s %s\n%s\n", short(t.pkg), t.name, out)
				} else {
					total.passed++
					fmt.Printf("ok   %-40s %s %s %.1fs\n", short(t.pkg), t.name, executions(out), time.Since(start).Seconds())
				}
				mu.Unlock()
			}
		})
	}
	for _, t := range targets {
		if ctx.Err() == nil {
			queue <- t
		}
	}
	close(queue)
	wg.Wait()
	return total
}

// fuzzOne runs a target, and once more if the fuzzer itself failed: one that is
// at work when its time is over, or whose worker dies while it shortens an
// input, reports that as the target's failure. What a target did wrong always
// comes with an input or a panic.
func fuzzOne(ctx context.Context, t target, each time.Duration) (out string, err error) {
	for range 2 {
		// Shortening an input that only reached new code takes a minute by
		// default, which leaves no time for others.
		data, failed := command(ctx, "test", "-run", "^$", "-fuzz", "^"+t.name+"$", "-fuzztime", each.String(),
			"-fuzzminimizetime", "10x", "-parallel", "1", t.pkg).CombinedOutput()
		out, err = string(data), failed
		if err == nil || ctx.Err() != nil || foundInput(out) {
			break
		}
		fmt.Printf("the fuzzer of %s %s failed without an input\n%s\n", short(t.pkg), t.name, out)
	}
	return out, err
}

// foundInput tells whether a fuzzer's failure is the target's: an input that it
// wrote, one of the seeds, a panic, or code that does not compile.
func foundInput(out string) bool {
	for _, mark := range []string{"Failing input", "failure while testing seed", "panic:", "[build failed]", "[setup failed]"} {
		if strings.Contains(out, mark) {
			return true
		}
	}
	return false
}

func fuzzTargets(ctx context.Context, pkgs []string) ([]target, error) {
	cmd := command(ctx, append([]string{"test", "-list", "^Fuzz", "-json"}, pkgs...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	var targets []target
	for line := range bytes.Lines(out) {
		var e event
		if json.Unmarshal(line, &e) != nil {
			continue
		}
		if name := strings.TrimSpace(e.Output); e.Action == "output" && strings.HasPrefix(name, "Fuzz") && !strings.Contains(name, " ") {
			targets = append(targets, target{e.Package, name})
		}
	}
	return targets, nil
}

// executions is how often a fuzzer's last progress line says it ran.
func executions(out string) string {
	n := ""
	for line := range strings.Lines(out) {
		if _, after, ok := strings.Cut(line, "execs: "); ok {
			n, _, _ = strings.Cut(after, " ")
		}
	}
	return n + " executions"
}

// command is a go command that ends, with all it started, when ctx does.
func command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	return cmd
}

// short is a package's path without the module.
func short(pkg string) string {
	return strings.TrimPrefix(pkg, "github.com/warren-vm/warren/")
}

func fatal(err error) {
	fmt.Fprintln(os.Stderr, "testrun:", err)
	os.Exit(1)
}
