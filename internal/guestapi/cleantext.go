package guestapi

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// CleanText makes text from a guest safe to show on a terminal and to put
// into a log: a CRLF becomes a newline and a tab a space; every other control
// character (so every escape sequence loses its ESC), format character (among
// them those that turn the direction of text), line or paragraph separator
// and every byte that is no UTF-8 becomes "?". Newlines stay; a caller that
// needs one line replaces them itself. The result is never longer than s.
func CleanText(s string) string {
	if isClean(s) {
		return s
	}
	var b strings.Builder
	b.Grow(len(s))
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			b.WriteByte('?')
		case r == '\r' && strings.HasPrefix(s[i:], "\r\n"):
			// The newline that follows is written in its own turn.
		case r == '\t':
			b.WriteByte(' ')
		case r != '\n' && hidden(r):
			b.WriteByte('?')
		default:
			b.WriteString(s[i : i+n])
		}
		i += n
	}
	return b.String()
}

// isClean spares the common case, plain ASCII lines, the copy.
func isClean(s string) bool {
	for i := 0; i < len(s); i++ {
		if c := s[i]; c != '\n' && (c < ' ' || c > '~') {
			return false
		}
	}
	return true
}

// hidden is true for what a terminal acts on or does not show.
func hidden(r rune) bool {
	return unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp)
}

// CleanTail is CleanText of the newest max bytes of b, without white space at
// both ends, for what a program printed before it failed.
func CleanTail(b []byte, max int) string {
	if len(b) > max {
		b = b[len(b)-max:]
		// A cut in the middle of a character must not show as garbage.
		for i := 0; i < utf8.UTFMax && len(b) > 0 && !utf8.RuneStart(b[0]); i++ {
			b = b[1:]
		}
	}
	return strings.TrimSpace(CleanText(string(b)))
}

// CleanLineTail is CleanTail on one line, see CleanLine.
func CleanLineTail(b []byte, max int) string { return oneLine(CleanTail(b, max)) }

// CleanLine is CleanText on one line, for the inside of a sentence: runs of
// white space become one space.
func CleanLine(s string) string { return oneLine(CleanText(s)) }

func oneLine(clean string) string { return strings.Join(strings.Fields(clean), " ") }
