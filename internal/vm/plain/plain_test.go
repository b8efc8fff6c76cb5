package plain

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

func TestOnlyReadableTextIsLeft(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"plain", "hello\n", "hello"},
		{"carriage returns", "a\r\nb\r\n", "a\nb"},
		{"colours", "\x1b[1;31mred\x1b[0m", "red"},
		{"window title", "x\x1b]0;owned\x07y", "xy"},
		{"title ended by string terminator", "x\x1b]0;owned\x1b\\y", "xy"},
		{"clear screen and home", "\x1b[2J\x1b[Hhi", "hi"},
		{"two-byte escape", "\x1bcreset", "reset"},
		{"escape at the end", "end\x1b", "end"},
		{"escape before a newline keeps the newline", "a\x1b\nb", "a\nb"},
		{"bells and nulls", "a\x07\x00b", "ab"},
		{"eight-bit control sequence", "a\u009b31mb", "a31mb"},
		{"direction override", "a\u202eb", "ab"},
		{"line separator", "a\u2028b", "ab"},
		{"not UTF-8", "a\xffb", "a?b"},
		{"umlauts stay", "Größe ✓", "Größe ✓"},
	} {
		if got := Text([]byte(c.in), 1000); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestTheNewestTextIsKept(t *testing.T) {
	if got := Text([]byte("abcdef"), 3); got != "def" {
		t.Errorf("got %q", got)
	}
	if got := Text([]byte("aéb"), 2); got != "b" {
		t.Errorf("cut inside a character: %q", got)
	}
	if got := Text([]byte("abc"), 0); got != "" {
		t.Errorf("nothing asked for: %q", got)
	}
}

func TestAnEscapeThatNeverEndsHidesLittle(t *testing.T) {
	in := "\x1b]" + strings.Repeat("a", 500)
	if got := Text([]byte(in), 1000); len(got) < 400 {
		t.Errorf("%d bytes left of 500", len(got))
	}
}

func TestLineIsOneLine(t *testing.T) {
	if got := Line([]byte(" a\n\tb  c \n"), 100); got != "a b c" {
		t.Errorf("got %q", got)
	}
}

func FuzzText(f *testing.F) {
	f.Add([]byte("a\x1b[31mb\x1b]0;x\x07"), 10)
	f.Add([]byte("\xf0\x9f\x98"), 2)
	f.Fuzz(func(t *testing.T, in []byte, max int) {
		got := Text(in, max)
		if len(got) > 0 && len(got) > max {
			t.Fatalf("%d bytes, more than %d", len(got), max)
		}
		if !utf8.ValidString(got) {
			t.Fatalf("not UTF-8: %q", got)
		}
		for _, r := range got {
			if r != '\n' && r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Cf, r)) {
				t.Fatalf("%q holds %U", got, r)
			}
		}
	})
}
