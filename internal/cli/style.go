package cli

import (
	"io"
	"os"

	"golang.org/x/term"
)

// Style colours words, or leaves them as they are.
type Style struct{ on bool }

// StyleFor gives the style for w: colours only on a terminal, and not when
// NO_COLOR is set or TERM is dumb.
func StyleFor(w io.Writer) Style {
	return Style{IsTerminal(w) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"}
}

// Good, Bad, Warn, Faint and Bold mark a word.
func (s Style) Good(word string) string  { return s.paint("32", word) }
func (s Style) Bad(word string) string   { return s.paint("31", word) }
func (s Style) Warn(word string) string  { return s.paint("33", word) }
func (s Style) Faint(word string) string { return s.paint("2", word) }
func (s Style) Bold(word string) string  { return s.paint("1", word) }

func (s Style) paint(code, word string) string {
	if !s.on {
		return word
	}
	return "\x1b[" + code + "m" + word + "\x1b[0m"
}

// IsTerminal reports whether stream (an io.Reader or io.Writer) is a terminal.
func IsTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
