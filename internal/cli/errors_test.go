package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestErrorsSayWhatFailedThenWhatToDo(t *testing.T) {
	tests := []struct {
		name string
		err  error
		want string
	}{
		{"nothing", nil, ""},
		{"an exit that says nothing", &Exit{Code: 3}, ""},
		{"plain", errors.New("no such file"), "kosa8: no such file\n"},
		{"remedy after a semicolon", errors.New("guest image not built; run `kosa8 image build`; it takes two minutes"),
			"kosa8: guest image not built\n  run `kosa8 image build`\n  it takes two minutes\n"},
		{"a semicolon inside a parenthesis", errors.New("odd (a; b); do c"), "kosa8: odd (a; b)\n  do c\n"},
		{"further lines", errors.New("the guest's kernel panicked; its last words:\n  one\n  two\n"),
			"kosa8: the guest's kernel panicked\n  its last words:\n    one\n    two\n"},
		{"advice", Advise(errors.New("no image \"x\""), "there is base"), "kosa8: no image \"x\"\n  there is base\n"},
		{"advice inside an exit", &Exit{2, Advise(errors.New("a"), "b")}, "kosa8: a\n  b\n"},
		{"several faults", errors.Join(errors.New("a; b"), errors.New("c")), "kosa8: a\n  b\nkosa8: c\n"},
		{"several faults inside an exit", &Exit{2, errors.Join(errors.New("a"), errors.New("c"))}, "kosa8: a\nkosa8: c\n"},
		{"two causes in one sentence", fmt.Errorf("%w because %w", errors.New("a"), errors.New("b")), "kosa8: a because b\n"},
		{"escape sequences of a guest", errors.New("console said \x1b[2Jhello\u202e"), "kosa8: console said ?[2Jhello?\n"},
		{"cancelled", context.Canceled, "kosa8: interrupted\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var b strings.Builder
			PrintError(&b, "kosa8", tt.err)
			if diff := cmp.Diff(tt.want, b.String()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestExitCodes(t *testing.T) {
	tests := []struct {
		err  error
		want int
	}{
		{nil, 0},
		{errors.New("x"), 1},
		{Usagef("x"), 2},
		{Advise(Usagef("x"), "y"), 2},
		{fmt.Errorf("context: %w", &Exit{Code: 127}), 127},
		{ErrOutputGone, 141},
	}
	for _, tt := range tests {
		if got := ExitCode(tt.err); got != tt.want {
			t.Errorf("ExitCode(%v) = %d, want %d", tt.err, got, tt.want)
		}
	}
}

func TestARemarkKeepsTheCode(t *testing.T) {
	remark := errors.New("remark")
	for _, tt := range []struct {
		err  error
		code int
		text string
	}{
		{nil, ExitFailure, "remark"},
		{errors.New("a"), ExitFailure, "a\nremark"},
		{&Exit{Code: 130}, 130, "remark"},
		{&Exit{Code: 7, Err: errors.New("b")}, 7, "b\nremark"},
	} {
		got := Also(tt.err, remark)
		if ExitCode(got) != tt.code || got.Error() != tt.text {
			t.Errorf("%v: %d, %q", tt.err, ExitCode(got), got)
		}
	}
	if err := Also(remark, nil); err != remark {
		t.Error(err)
	}
}
