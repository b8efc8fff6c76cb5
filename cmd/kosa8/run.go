package main

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store/snapshots"
)

// baseImage is the only image there is until containers exist: the guest
// image's own root.
const baseImage = "base"

// runOptions is the command line of run, checked.
type runOptions struct {
	machine machine.Options
	exec    guestapi.ExecRequest
	timeout time.Duration

	// from is the snapshot that the VM goes on from; "" is none.
	from string
	// boot has the VM boot afresh instead of being a copy of its template.
	boot bool
	// save keeps the VM as a snapshot of that label when the program has ended.
	save  bool
	label string

	interactive bool
	quiet       bool
	timings     bool
}

func newRun(s streams) *cobra.Command {
	var o runOptions
	var env []string
	c := runCommand(s, &o, &env)
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := o.complete(c, s, args, env); err != nil {
			return err
		}
		return run(c.Context(), s, o)
	}
	return c
}

// runCommand is the command line of run, with its flags bound to o and env.
func runCommand(s streams, o *runOptions, env *[]string) *cobra.Command {
	c := &cobra.Command{
		Use:   "run [flags] IMAGE [--] PROGRAM [ARG...]",
		Short: "Run a program in a throw-away VM",
		Long: `Run a program in a VM of its own that is gone when the program ends.

Standard output, standard error and the exit code are the program's, byte for
byte. Standard input is passed on with -i only. A first Ctrl-C, SIGTERM or
SIGHUP goes to the program, a second ends the VM.

The only image so far is "base", Debian with the usual tools. The VM has no
network. No shell is involved: use "sh -c" for one.

The VM is a copy of a template, which is made first when there is none. With
--from it goes on from a snapshot, with the snapshot's size. With --save it is
kept as a snapshot when the program has ended, whatever its code; the id is
written to standard error. The program's code stays the command's unless it is
0 and the snapshot could not be saved.

` + cli.ExitHelp,
		Example: `  kosa8 run base -- uname -a
  kosa8 run -i base -- tar -tz < backup.tar.gz
  kosa8 run -it base                               a shell
  kosa8 run -e GREETING=hello -w /tmp base -- sh -c 'echo $GREETING from $PWD'
  kosa8 run --cpus 1 --memory 256m --timeout 30s base -- ./long-job
  kosa8 run --save=ready base -- sh -c 'echo 42 > /root/answer'
  kosa8 run --from s0123456789abcdef base -- cat /root/answer`,
		Args: cobra.ArbitraryArgs,
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 0 {
				return []string{baseImage}, cobra.ShellCompDirectiveNoFileComp
			}
			return nil, cobra.ShellCompDirectiveDefault
		},
	}
	f := c.Flags()
	// What follows IMAGE belongs to the program.
	f.SetInterspersed(false)
	f.BoolVarP(&o.interactive, "interactive", "i", false, "pass standard input to the program")
	f.BoolVarP(&o.exec.TTY, "tty", "t", false, "give the program a terminal (with -i when run from one)")
	f.VarP(&value{kind: "NAME=VALUE", set: func(s string) error {
		*env = append(*env, s)
		return nil
	}}, "env", "e", "set a variable; NAME alone passes ours on; repeatable")
	f.VarP(text(&o.exec.Dir, "folder", ""), "workdir", "w", "start in this folder of the guest (default: the user's home)")
	f.VarP(text(&o.exec.User, "user", ""), "user", "u", "run as this user: a name, uid or uid:gid (default: root)")
	sizeFlags(c, &o.machine)
	f.Var(&value{kind: "duration", set: func(s string) (err error) {
		o.timeout, err = parseTimeout(s)
		return err
	}}, "timeout", "stop the program after this long: 90s, 5m (default: never)")
	f.Var(&value{kind: "id", set: func(s string) error {
		if o.from != "" {
			return fmt.Errorf("a VM goes on from one snapshot, and %s is another", o.from)
		}
		o.from = s
		return nil
	}}, "from", "go on from this snapshot")
	if err := c.RegisterFlagCompletionFunc("from", completeSnapshots(true, isSnapshot)); err != nil {
		panic(err)
	}
	f.Var(&value{kind: "bool", set: func(s string) error {
		// What pflag gives for a flag without a value.
		if o.save = true; s != "true" {
			o.label = s
		}
		return checkLabel(o.label)
	}}, "save", "keep the VM as a snapshot when the program has ended; `=LABEL` names it")
	f.Lookup("save").NoOptDefVal = "true"
	f.BoolVar(&o.boot, "boot", false, "boot afresh instead of copying the template")
	f.BoolVarP(&o.quiet, "quiet", "q", false, "no progress, no remarks; errors only")
	f.BoolVar(&o.timings, "timings", false, "draw on standard error what the time was spent on")
	return c
}

// complete takes in the arguments and checks everything that can be checked
// without a VM.
func (o *runOptions) complete(c *cobra.Command, s streams, args, env []string) error {
	argv, err := o.splitArgs(args)
	if err != nil {
		return err
	}
	o.exec.ID = "run"
	o.exec.Argv = argv
	if o.exec.TTY && cli.IsTerminal(s.in) {
		o.interactive = true
	}
	o.exec.Stdin = o.interactive
	o.exec.TimeoutMS = o.timeout.Milliseconds()
	if o.timeout > 0 {
		o.exec.TimeoutMS = max(1, o.exec.TimeoutMS)
	}
	var faults []error
	fault := func(err error) {
		if err != nil {
			faults = append(faults, err)
		}
	}
	if o.exec.Dir != "" && !path.IsAbs(o.exec.Dir) {
		fault(fmt.Errorf("working folder %q is not absolute; write it with a leading /, like /tmp", o.exec.Dir))
	}
	o.exec.Env, err = environment(env, o.exec.TTY)
	fault(err)
	for _, f := range []struct{ flag, given string }{{"-w", o.exec.Dir}, {"-u", o.exec.User}} {
		if err := passable(f.given); err != nil {
			fault(fmt.Errorf("%s %s: %w", f.flag, strconv.QuoteToASCII(f.given), err))
		}
	}
	fault(o.completeStart(c))
	o.machine.Label = "kosa8 run " + argv[0]
	fault(o.machine.Check())
	if len(faults) > 0 {
		return &cli.Exit{Code: cli.ExitUsage, Err: errors.Join(faults...)}
	}
	return nil
}

// completeStart checks what the VM starts from.
func (o *runOptions) completeStart(c *cobra.Command) error {
	var faults []error
	if o.boot && o.save {
		faults = append(faults, errors.New("a VM that was booted afresh cannot be saved; leave out --boot or --save"))
	}
	if !c.Flags().Changed("from") {
		if o.machine.MemMB == 0 {
			o.machine.MemMB = machine.DefaultMemMB // which a remark may name
		}
		return errors.Join(faults...)
	}
	if o.boot {
		faults = append(faults, errors.New("a VM either goes on from a snapshot or boots afresh; leave out --from or --boot"))
	}
	if err := snapshots.CheckID(o.from); err != nil {
		faults = append(faults, orLabel(c.Context(), o.from, err))
	}
	// The size is the snapshot's unless it was asked for.
	if !c.Flags().Changed("cpus") {
		o.machine.CPUs = 0
	}
	return errors.Join(faults...)
}

// checkLabel is what the store takes, and what fits on a line.
func checkLabel(label string) error {
	switch {
	case len(label) > 200:
		return errors.New("too long; a label has up to 200 bytes")
	case !utf8.ValidString(label) || cli.Clean(label) != label:
		return errors.New("a label is one line of text")
	}
	return nil
}

// sizeFlags are those that say what size of VM is wanted, and run by what.
func sizeFlags(c *cobra.Command, o *machine.Options) {
	f := c.Flags()
	f.Var(count(&o.CPUs, machine.DefaultCPUs), "cpus", "virtual processors")
	f.Var(&value{kind: "size", text: cli.FormatMB(machine.DefaultMemMB), set: func(s string) (err error) {
		o.MemMB, err = parseMemory(s)
		return err
	}}, "memory", "memory of the VM: 512m, 2g")
	accelFlag(c, &o.Accel)
}

// accelFlag says how processors are to be had.
func accelFlag(c *cobra.Command, accel *string) {
	c.Flags().Var(text(accel, "accelerator", "auto"), "accel", "auto, kvm or tcg")
	choices := cobra.FixedCompletions([]string{"auto", "kvm", "tcg"}, cobra.ShellCompDirectiveNoFileComp)
	if err := c.RegisterFlagCompletionFunc("accel", choices); err != nil {
		panic(err)
	}
}

// splitArgs takes IMAGE and the program from the arguments.
func (o *runOptions) splitArgs(args []string) (argv []string, err error) {
	usage := func(message string, advice ...string) error {
		return cli.Advise(cli.Usagef("%s", message), advice...)
	}
	if len(args) == 0 {
		return nil, usage("an image and a program are needed", "kosa8 run base -- uname -a", "see `kosa8 run --help`")
	}
	image, argv := args[0], args[1:]
	if len(argv) > 0 && argv[0] == "--" {
		argv = argv[1:]
	}
	if image != baseImage {
		return nil, cli.Advise(fmt.Errorf("no image %q", image), o.imageAdvice(image, argv)...)
	}
	switch {
	case len(argv) == 0 && (o.interactive || o.exec.TTY):
		return []string{"bash"}, nil
	case len(argv) == 0:
		return nil, usage("no program to run", "kosa8 run base -- uname -a", "kosa8 run -it base starts a shell")
	case argv[0] == "":
		return nil, usage("the program's name is empty")
	}
	for _, arg := range argv {
		if err := passable(arg); err != nil {
			return nil, usage("argument " + strconv.QuoteToASCII(arg) + ": " + err.Error())
		}
	}
	return argv, nil
}

// imageAdvice says what was meant by an image that there is not.
func (o *runOptions) imageAdvice(image string, argv []string) []string {
	if o.save && o.label == "" && len(argv) > 0 && argv[0] == baseImage {
		return []string{"a label follows an equals sign: --save=" + image}
	}
	if len(argv) == 0 {
		argv = []string{image}
	}
	advice := []string{`the only image so far is "base": kosa8 run base -- ` + strings.Join(argv, " ")}
	if o.save && o.label == "" {
		advice = append(advice, "a label follows an equals sign: --save="+image)
	}
	return advice
}

// environment is what -e gave: NAME=VALUE as it stands, NAME from our own
// environment or, when it is not set there, not at all. With a terminal TERM
// is passed on.
func environment(env []string, tty bool) ([]string, error) {
	var out []string
	var faults []error
	for _, e := range env {
		name, _, given := strings.Cut(e, "=")
		if err := passable(e); err != nil {
			faults = append(faults, fmt.Errorf("-e %s: %w", strconv.QuoteToASCII(e), err))
			continue
		}
		if name == "" {
			faults = append(faults, fmt.Errorf("-e %q names no variable; write -e NAME=VALUE, or -e NAME to pass ours on", e))
			continue
		}
		if given {
			out = append(out, e)
		} else if v, ok := os.LookupEnv(name); ok {
			if err := passable(v); err != nil {
				faults = append(faults, fmt.Errorf("-e %s: its value here: %w", name, err))
				continue
			}
			out = append(out, name+"="+v)
		}
	}
	named := slices.ContainsFunc(out, func(e string) bool { return strings.HasPrefix(e, "TERM=") })
	if v := os.Getenv("TERM"); tty && v != "" && !named && passable(v) == nil {
		out = append(out, "TERM="+v)
	}
	return out, errors.Join(faults...)
}

// passable says whether s can be an argument or a variable in the guest. It
// travels as JSON, which would change what is not UTF-8.
func passable(s string) error {
	switch {
	case strings.ContainsRune(s, 0):
		return errors.New("a zero byte cannot be passed on")
	case !utf8.ValidString(s):
		return errors.New("it is not UTF-8 and would arrive changed; pass such bytes through a file or standard input")
	}
	return nil
}

func parseTimeout(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	switch {
	case err != nil:
		return 0, errors.New("not a length of time, or too long a one; write 90s, 5m or 1h30m")
	case d <= 0:
		return 0, errors.New("a timeout is longer than nothing; leave it out for none")
	}
	return d, nil
}

// parseMemory reads --memory. The lower bound is checked here because 0 means
// the default further down.
func parseMemory(s string) (int, error) {
	mb, err := cli.ParseMemMB(s)
	if err == nil && mb < machine.MinMemMB {
		err = fmt.Errorf("too little; a VM needs at least %d MiB", machine.MinMemMB)
	}
	return mb, err
}
