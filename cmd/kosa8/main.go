// Command kosa8 runs programs in microVMs.
//
//	kosa8 run base -- uname -a
//
// `kosa8 --help` lists the commands. Exit codes are those of package cli.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/warren-vm/warren/internal/cli"
)

func main() {
	os.Exit(Main())
}

// Main is the whole command, for tests that run it in their own process.
func Main() int {
	return execute(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
}

// streams are what a command reads and writes. Out and Err are buffered by
// nobody.
type streams struct {
	in       *os.File
	out, err io.Writer
}

func execute(ctx context.Context, args []string, in *os.File, out, errs io.Writer) int {
	// Nothing of a command's own has run yet: until it has, an error is one
	// of the command line.
	started := false
	root := newRoot(streams{in, out, errs})
	root.PersistentPreRun = func(*cobra.Command, []string) { started = true }
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err != nil && !started {
		err = asUsage(root, args, err)
	}
	cli.PrintError(errs, "kosa8", err)
	return cli.ExitCode(err)
}

// asUsage turns an error of cobra's into one of ours.
func asUsage(root *cobra.Command, args []string, err error) error {
	// Cobra's own message has several lines when it has suggestions.
	message, _, _ := strings.Cut(err.Error(), "\n")
	command, _, findErr := root.Find(args)
	if findErr != nil {
		command = root
	}
	var advice []string
	if findErr != nil && len(args) > 0 {
		if near := root.SuggestionsFor(args[0]); len(near) > 0 {
			advice = append(advice, "did you mean "+strings.Join(near, " or ")+"?")
		}
		message = fmt.Sprintf("unknown command %q", args[0])
	}
	advice = append(advice, fmt.Sprintf("see `%s --help`", command.CommandPath()))
	return cli.Advise(&cli.Exit{Code: cli.ExitUsage, Err: fmt.Errorf("%s", message)}, advice...)
}

func newRoot(s streams) *cobra.Command {
	root := &cobra.Command{
		Use:   "kosa8",
		Short: "Run programs in microVMs",
		Long: `kosa8 runs programs in microVMs: each has a Linux of its own, with its own
kernel, and sees nothing of this machine.`,
		Example: `  kosa8 run base -- uname -a               one command, one throw-away VM
  echo 6*7 | kosa8 run -i base -- bc       with standard input
  kosa8 run -it base                       a shell
  kosa8 doctor                             what this machine has and lacks`,
		SilenceErrors:              true,
		SilenceUsage:               true,
		SuggestionsMinimumDistance: 2,
		Args:                       cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return c.Help()
		},
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: false},
	}
	root.SetIn(s.in)
	root.SetOut(s.out)
	root.SetErr(s.err)
	root.AddCommand(newRun(s), newDoctor(s), newImage(s), newBench(s), newVersion(s))
	root.SetHelpCommand(&cobra.Command{Use: "no-help", Hidden: true})
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		return flagError(err)
	})
	root.InitDefaultCompletionCmd()
	return root
}

// flagError says what is wrong with a flag in our words where pflag's are
// those of the Go library.
func flagError(err error) error {
	message := err.Error()
	if _, reason, ok := strings.Cut(message, "strconv."); ok {
		if i := strings.Index(reason, "parsing "); i >= 0 {
			head, _, _ := strings.Cut(message, ": strconv.")
			return fmt.Errorf("%s: not a number", head)
		}
	}
	return err
}

// value is a flag that is parsed by a function: a pflag.Value without the
// ceremony.
type value struct {
	kind, text string
	set        func(string) error
}

func (v *value) String() string { return v.text }
func (v *value) Type() string   { return v.kind }
func (v *value) Set(s string) error {
	if err := v.set(s); err != nil {
		return err
	}
	v.text = s
	return nil
}

var _ pflag.Value = (*value)(nil)
