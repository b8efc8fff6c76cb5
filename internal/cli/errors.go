package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/warren-vm/warren/internal/guestapi"
)

// The exit codes of every command. A command that runs a program in a guest
// ends with the program's own code instead of ExitOK. Codes 1 and 2 can then
// mean either; a line on standard error that starts with "kosa8: " is there
// exactly when Warren itself is the one that speaks.
const (
	ExitOK      = 0
	ExitFailure = 1 // Warren could not do it
	ExitUsage   = 2 // the command line is wrong; nothing was started

	ExitTimeout       = 124 // stopped after --timeout
	ExitNotExecutable = 126 // the program exists but cannot be run
	ExitNotFound      = 127 // no such program
	ExitSignal        = 128 // + the number of the signal that ended it
	ExitPipe          = 141 // who read standard output went away: 128 + SIGPIPE
)

// ExitHelp is the table of exit codes as help texts show it.
const ExitHelp = `Exit codes:
  the program's own, or 128 + the signal that ended it
    1  Warren could not run it (a line that starts with "kosa8: " says why)
    2  the command line is wrong; nothing was started
  124  stopped by --timeout
  126  the program exists but cannot be run
  127  the program, its folder or its user is not in the guest
  141  whoever read the output went away`

// Exit is an error that chooses its own exit code. An Exit without Err ends
// the command with Code and says nothing.
type Exit struct {
	Code int
	Err  error
}

func (e *Exit) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit code %d", e.Code)
	}
	return e.Err.Error()
}

func (e *Exit) Unwrap() error { return e.Err }

// Also is err with a remark more. The code to end with stays that of err.
func Also(err, remark error) error {
	var exit *Exit
	switch {
	case err == nil:
		return remark
	case remark == nil:
		return err
	case errors.As(err, &exit):
		return &Exit{exit.Code, errors.Join(exit.Err, remark)}
	}
	return errors.Join(err, remark)
}

// Usagef is a fault of the command line: exit code 2.
func Usagef(format string, args ...any) error {
	return &Exit{ExitUsage, fmt.Errorf(format, args...)}
}

// Advised is an error with lines of advice, shown indented below it.
type Advised struct {
	Err    error
	Advice []string
}

func (e *Advised) Error() string { return e.Err.Error() }

func (e *Advised) Unwrap() error { return e.Err }

// Advise adds lines of advice to err.
func Advise(err error, advice ...string) error {
	return &Advised{err, advice}
}

// ExitCode is the exit code err stands for; nil is ExitOK.
func ExitCode(err error) int {
	var exit *Exit
	switch {
	case err == nil:
		return ExitOK
	case errors.As(err, &exit):
		return exit.Code
	default:
		return ExitFailure
	}
}

// PrintError writes err as "program: what failed" and its remedies, one to an
// indented line: what follows the first "; " of a message, its further lines,
// and the advice of an Advised. Several faults joined by errors.Join come one
// after the other. Control characters are replaced, as parts of a message may
// come from a guest. An Exit without an error prints nothing.
func PrintError(w io.Writer, program string, err error) {
	if err == nil {
		return
	}
	var exit *Exit
	if errors.As(err, &exit) && exit.Err == nil {
		return
	}
	var b strings.Builder
	for _, fault := range faults(err) {
		writeFault(&b, program, fault)
	}
	io.WriteString(w, b.String())
}

// faults takes joined errors apart. Only an outermost join is: one that was
// wrapped in a sentence belongs to that sentence.
func faults(err error) []error {
	if exit, ok := err.(*Exit); ok {
		return faults(exit.Err)
	}
	joined, ok := err.(interface{ Unwrap() []error })
	// fmt.Errorf with several %w has the same method, but one message.
	if !ok || !strings.Contains(err.Error(), "\n") {
		return []error{err}
	}
	var all []error
	for _, e := range joined.Unwrap() {
		all = append(all, faults(e)...)
	}
	return all
}

func writeFault(b *strings.Builder, program string, err error) {
	message := err.Error()
	switch {
	case errors.Is(err, context.Canceled) && message == context.Canceled.Error():
		message = "interrupted"
	case message == context.DeadlineExceeded.Error():
		message = "took too long"
	}
	head, rest, more := strings.Cut(message, "\n")
	lines := strings.Split(head, "; ")
	// One remedy per line, but a parenthesis is not torn apart.
	for i := 1; i < len(lines); {
		if strings.Count(lines[i-1], "(") > strings.Count(lines[i-1], ")") {
			lines[i-1] += "; " + lines[i]
			lines = append(lines[:i], lines[i+1:]...)
			continue
		}
		i++
	}
	if more {
		lines = append(lines, strings.Split(rest, "\n")...)
	}
	var advised *Advised
	if errors.As(err, &advised) {
		lines = append(lines, advised.Advice...)
	}
	fmt.Fprintf(b, "%s: %s\n", program, Clean(lines[0]))
	for _, line := range lines[1:] {
		if line = strings.TrimRight(Clean(line), " "); line != "" {
			fmt.Fprintf(b, "  %s\n", line)
		}
	}
}

// Clean makes a text that may come from a guest safe to show on one line.
func Clean(s string) string {
	return strings.ReplaceAll(guestapi.CleanText(s), "\n", " ")
}
