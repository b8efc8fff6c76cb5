// Command kosa8 runs programs in microVMs.
//
//	kosa8 run base -- uname -a
//
// `kosa8 --help` lists the commands. Exit codes are those of package cli.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
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

// asUsage turns an error of the command line into one of ours.
func asUsage(root *cobra.Command, args []string, err error) error {
	var usage *cli.Exit
	if errors.As(err, &usage) {
		return err
	}
	command, _, findErr := root.Find(args)
	if findErr != nil {
		command = root
	}
	return cli.Advise(cli.Usagef("%s", err), fmt.Sprintf("see `%s --help`", command.CommandPath()))
}

// noArgs is for a command that takes none, and for a group of commands, where
// an argument is a command that does not exist.
func noArgs(c *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case !c.HasSubCommands():
		return fmt.Errorf("%s takes no arguments, got %q", c.CommandPath(), args[0])
	}
	err := fmt.Errorf("%s has no command %q", c.CommandPath(), args[0])
	if near := c.SuggestionsFor(args[0]); len(near) > 0 {
		return cli.Advise(err, fmt.Sprintf("did you mean %s?", strings.Join(near, " or ")))
	}
	return err
}

func newRoot(s streams) *cobra.Command {
	root := &cobra.Command{
		Use:   "kosa8",
		Short: "Run programs in microVMs",
		Long: `kosa8 runs programs in microVMs: each has a Linux of its own, with its own
kernel, and sees nothing of this machine.`,
		Example: `  kosa8 run base -- uname -a               one command, one throw-away VM
  kosa8 run -i base -- sort < names.txt    with standard input
  kosa8 run -it base                       a shell
  kosa8 run --save base -- make deps       keep the VM as it is then
  kosa8 snapshot ls                        what was kept
  kosa8 doctor                             what this machine has and lacks`,
		DisableFlagsInUseLine:      true,
		SilenceErrors:              true,
		SilenceUsage:               true,
		SuggestionsMinimumDistance: 2,
		Args:                       noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return c.Help()
		},
	}
	root.SetIn(s.in)
	root.SetOut(s.out)
	root.SetErr(s.err)
	root.AddCommand(newRun(s), newSnapshot(s), newTemplate(s), newDoctor(s), newImage(s), newBench(s), newVersion(s))
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		return flagError(err)
	})
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() == "completion" { // else it takes any word for a shell
			c.Args, c.RunE = noArgs, func(c *cobra.Command, _ []string) error { return c.Help() }
		}
	}
	return root
}

// flagError says what is wrong with a flag in our words where pflag's are
// those of a library.
func flagError(err error) error {
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) {
		return err
	}
	reason := invalid.Unwrap()
	if number := (*strconv.NumError)(nil); errors.As(reason, &number) {
		reason = errors.New("not a number")
		if number.Err == strconv.ErrRange {
			reason = errors.New("too large a number")
		}
	}
	return fmt.Errorf("--%s %q: %w", invalid.GetFlag().Name, invalid.GetValue(), reason)
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

// count is a flag of a number above zero, which stands for the default further
// down; standard 0 leaves it to that.
func count(to *int, standard int) *value {
	*to = standard
	v := &value{kind: "int"}
	if standard != 0 {
		v.text = strconv.Itoa(standard)
	}
	v.set = func(s string) error {
		n, err := strconv.Atoi(s)
		switch {
		case err != nil:
			return err
		case n < 1:
			return errors.New("too few; take 1 or more")
		}
		*to = n
		return nil
	}
	return v
}

// text is a flag of any string; kind names it in the help.
func text(to *string, kind, standard string) *value {
	*to = standard
	return &value{kind: kind, text: standard, set: func(s string) error {
		*to = s
		return nil
	}}
}
