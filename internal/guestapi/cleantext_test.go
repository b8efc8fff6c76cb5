package guestapi

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

func TestCleanTextLeavesNothingATerminalActsOn(t *testing.T) {
	for _, row := range []struct{ name, in, want string }{
		{"plain", "hello, world\nbye", "hello, world\nbye"},
		{"other scripts", "naïve 漢字 🙂", "naïve 漢字 🙂"},
		{"crlf", "a\r\nb\r\n", "a\nb\n"},
		{"lone cr", "progress 1\rprogress 2", "progress 1?progress 2"},
		{"tab", "a\tb", "a b"},
		{"colour", "\x1b[31mred\x1b[0m", "?[31mred?[0m"},
		{"title", "\x1b]0;pwned\x07", "?]0;pwned?"},
		{"c1 csi", "\u009b31m", "?31m"},
		{"delete and backspace", "rm\x08\x7f", "rm??"},
		{"bidi", "user\u202egnp.exe", "user?gnp.exe"},
		{"zero width", "pay\u200bpal", "pay?pal"},
		{"separators", "a\u2028b\u2029c", "a?b?c"},
		{"broken utf-8", "a\xff\xc3(b", "a??(b"},
		{"a real replacement character", "a\ufffdb", "a\ufffdb"},
		{"nul", "a\x00b", "a?b"},
	} {
		t.Run(row.name, func(t *testing.T) {
			if got := CleanText(row.in); got != row.want {
				t.Errorf("CleanText(%q) = %q, want %q", row.in, got, row.want)
			}
		})
	}
}

func FuzzCleanText(f *testing.F) {
	f.Add("a\r\r\n\x1b[0m\xff\u202e")
	f.Fuzz(func(t *testing.T, s string) {
		got := CleanText(s)
		if !utf8.ValidString(got) || len(got) > len(s) {
			t.Fatalf("%q became %q", s, got)
		}
		bad := func(r rune) bool { return r != '\n' && (unicode.IsControl(r) || unicode.Is(unicode.Cf, r)) }
		if strings.ContainsFunc(got, bad) {
			t.Fatalf("%q became %q", s, got)
		}
		if again := CleanText(got); again != got {
			t.Fatalf("cleaning twice changes %q to %q", got, again)
		}
	})
}

func TestTheNewestTextIsKept(t *testing.T) {
	for _, c := range []struct {
		in   string
		max  int
		want string
	}{
		{"abcdef", 3, "def"},
		{"aéb", 2, "b"}, // cut inside a character
		{"abc", 0, ""},
		{" \x1b[31mred\n", 100, "?[31mred"},
	} {
		if got := CleanTail([]byte(c.in), c.max); got != c.want {
			t.Errorf("CleanTail(%q, %d) = %q, want %q", c.in, c.max, got, c.want)
		}
	}
}

func TestALineStaysOne(t *testing.T) {
	if got := CleanLine(" a\r\n\tb  c \n"); got != "a b c" {
		t.Errorf("got %q", got)
	}
	if got := CleanLineTail([]byte("old a\r\n\tb  \x1bc \n"), 11); got != "a b ?c" {
		t.Errorf("newest bytes: got %q", got)
	}
}
