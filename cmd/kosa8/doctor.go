package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/doctor"
	"github.com/warren-vm/warren/internal/store"
)

func newDoctor(s streams) *cobra.Command {
	var asJSON bool
	var o doctor.Options
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Say what this machine has and lacks",
		Long: `Look at everything that running VMs needs, and say of each thing what was
found, what follows from it and what to do. The exit code is 1 when no VM can
run. With --repair what dead VMs left and what no snapshot needs is removed.`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			home, err := store.DefaultHome()
			if err != nil {
				return err
			}
			o.Home, o.Build = home, cli.Build()
			progress := cli.NewProgress(s.err, asJSON, cli.Silent)
			progress.Step("looking at this machine")
			report := doctor.Examine(c.Context(), o)
			progress.Done()
			if asJSON {
				err = cli.PrintJSON(s.out, report)
			} else {
				err = writeReport(s.out, report)
			}
			if err == nil && !report.OK {
				err = &cli.Exit{Code: cli.ExitFailure}
			}
			return err
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print as JSON")
	c.Flags().BoolVar(&o.Repair, "repair", false, "remove what dead VMs left and what no snapshot needs")
	return c
}

func writeReport(w io.Writer, r doctor.Report) error {
	style := cli.StyleFor(w)
	word := map[doctor.State]string{
		doctor.OK:   style.Good("ok"),
		doctor.Warn: style.Warn("warn"),
		doctor.Fail: style.Bad("FAIL"),
	}
	var t cli.Table
	for _, c := range r.Checks {
		t.Row(word[c.State], c.Name, cli.Clean(c.Found))
		if c.State != doctor.OK {
			t.Row("", "", "→ "+cli.Clean(c.Consequence))
			t.Row("", "", "  "+style.Bold(cli.Clean(c.Remedy)))
		}
	}
	if err := t.Write(w); err != nil {
		return err
	}
	verdict := "VMs can run here."
	if !r.OK {
		verdict = "No VM can run here yet."
	}
	_, err := fmt.Fprintf(w, "\n%s\n", verdict)
	return err
}
