// Package plain makes text that a guest may have had a hand in fit to be
// shown to a person: on a terminal, in an error, in a log.
package plain

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Text returns what a person may see of the last max bytes of b: escape
// sequences, control characters (but for newline and tab) and invisible
// formatting characters such as text direction overrides are taken out, bytes
// that are not UTF-8 become '?', carriage returns before a newline go, and
// white space at both ends is trimmed. The result is never longer than max
// bytes.
func Text(b []byte, max int) string {
	if max <= 0 {
		return ""
	}
	if len(b) > max {
		b = b[len(b)-max:]
		// A cut in the middle of a character must not show as garbage.
		for i := 0; i < utf8.UTFMax && len(b) > 0 && !utf8.RuneStart(b[0]); i++ {
			b = b[1:]
		}
	}
	var out strings.Builder
	out.Grow(len(b))
	for len(b) > 0 {
		if n := escapeLen(b); n > 0 {
			b = b[n:]
			continue
		}
		r, n := utf8.DecodeRune(b)
		b = b[n:]
		switch {
		case r == utf8.RuneError && n <= 1:
			out.WriteByte('?')
		case r == '\n' || r == '\t':
			out.WriteRune(r)
		case unicode.IsControl(r), unicode.Is(unicode.Cf, r), r == '\u2028', r == '\u2029':
		default:
			out.WriteRune(r)
		}
	}
	return strings.TrimSpace(out.String())
}

// Line is Text on one line: runs of white space become one space.
func Line(b []byte, max int) string {
	return strings.Join(strings.Fields(Text(b, max)), " ")
}

// escapeLen is the length of the escape sequence that b begins with, or 0.
// One that never ends is cut after maxEscape bytes, so that a lone ESC cannot
// swallow the rest of a log.
func escapeLen(b []byte) int {
	const maxEscape = 64
	if len(b) < 2 || b[0] != 0x1b {
		return 0
	}
	switch b[1] {
	case '[': // CSI: parameters, then one final byte
		for i := 2; i < len(b) && i < maxEscape; i++ {
			if b[i] >= 0x40 && b[i] <= 0x7e {
				return i + 1
			}
			if b[i] < 0x20 || b[i] > 0x7e {
				return i
			}
		}
		return min(len(b), maxEscape)
	case ']', 'P', '^', '_', 'X': // strings that BEL or ESC \ ends
		for i := 2; i < len(b) && i < maxEscape; i++ {
			if b[i] == 0x07 {
				return i + 1
			}
			if b[i] == 0x1b {
				if i+1 < len(b) && b[i+1] == '\\' {
					return i + 2
				}
				return i
			}
			if b[i] == '\n' {
				return i
			}
		}
		return min(len(b), maxEscape)
	case '\n':
		return 1
	default:
		if b[1] >= 0x20 && b[1] <= 0x7e {
			return 2
		}
		return 1
	}
}
