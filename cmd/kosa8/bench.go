package main

import (
	"context"
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"github.com/warren-vm/warren/internal/bench"
	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/machine"
)

func newBench(s streams) *cobra.Command {
	var o bench.Options
	var asJSON, quiet bool
	c := &cobra.Command{
		Use:   "bench [flags] [NAME...]",
		Short: "Measure Warren beside plain QEMU",
		Long:  "Measure each figure Warren states beside plain QEMU doing the same in the same run.\n\n" + benchNames(),
		Example: `  kosa8 bench
  kosa8 bench boot --json -n 20 > boot.json`,
		ValidArgs: bench.Names(),
		RunE: func(c *cobra.Command, names []string) error {
			o.Names = names
			if err := o.Check(); err != nil {
				return &cli.Exit{Code: cli.ExitUsage, Err: err}
			}
			return runBench(c.Context(), s, o, asJSON, quiet)
		},
	}
	f := c.Flags()
	f.VarP(count(&o.N, 0), "samples", "n", "samples per benchmark (default: as many as it needs)")
	f.Var(count(&o.StdioMiB, 0), "stdio-mib", "MiB that each sample of stdio sends (default 1024)")
	f.Var(count(&o.CPUs, machine.DefaultCPUs), "cpus", "virtual processors of the VMs")
	f.Var(&value{kind: "size", text: cli.FormatMB(machine.DefaultMemMB), set: func(s string) (err error) {
		o.MemMB, err = parseMemory(s)
		return err
	}}, "memory", "memory of the VMs: 512m, 2g")
	accelFlag(c, &o.Accel)
	f.BoolVar(&asJSON, "json", false, "print as JSON")
	f.BoolVarP(&quiet, "quiet", "q", false, "no progress")
	return c
}

func benchNames() string {
	var b strings.Builder
	var t cli.Table
	t.Row("NAME", "WHAT", "BESIDE")
	for _, one := range bench.All() {
		t.Row(one.Name, one.Title, one.Floor)
	}
	if err := t.Write(&b); err != nil {
		return ""
	}
	return strings.TrimRight(b.String(), "\n")
}

func runBench(ctx context.Context, s streams, o bench.Options, asJSON, quiet bool) error {
	home, err := homeOf(o.Home)
	if err != nil {
		return err
	}
	defer sweepAside(home)()
	ctx, signals := cli.CatchInterrupts(ctx)
	defer signals.Stop()
	progress := cli.NewProgress(s.err, quiet, cli.Silent)
	defer progress.Done()
	o.Progress = func(name string, done, n int) {
		progress.Step("%s: %d of %s", name, done, cli.Count(n, "sample"))
	}
	report, err := bench.Run(ctx, o)
	progress.Done()
	if err != nil {
		if why := context.Cause(ctx); why != nil {
			return why
		}
		if unknown := (*bench.UnknownError)(nil); errors.As(err, &unknown) {
			return &cli.Exit{Code: cli.ExitUsage, Err: err}
		}
		return err
	}
	if asJSON {
		return report.WriteJSON(s.out)
	}
	return report.WriteTable(s.out)
}
