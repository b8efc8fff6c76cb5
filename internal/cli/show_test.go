package cli

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestMemoryIsReadAsPeopleWriteIt(t *testing.T) {
	good := map[string]int{
		"512": 512, "512m": 512, "512M": 512, "512mb": 512, "512MiB": 512, "2g": 2048, "2GiB": 2048,
		"2 GiB": 2048, "1.5g": 1536, "0": 0, "1t": 1 << 20, "131072k": 128, "+512": 512,
	}
	for in, want := range good {
		if got, err := ParseMemMB(in); err != nil || got != want {
			t.Errorf("ParseMemMB(%q) = %d, %v, want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "m", "-1", "-512m", "lots", "512x", "512 bananas", "0x200", "1e30", "inf", "nan", "1.0001m", "1_000", "99999999999g", "512m512"} {
		if got, err := ParseMemMB(in); err == nil {
			t.Errorf("ParseMemMB(%q) = %d, want an error", in, got)
		} else if strings.Contains(err.Error(), "strconv") {
			t.Errorf("ParseMemMB(%q): %v, which speaks of the library", in, err)
		}
	}
}

func TestFiguresAreShortAndTrue(t *testing.T) {
	for in, want := range map[int64]string{0: "0 MiB", 512: "512 MiB", 1024: "1 GiB", 1536: "1.5 GiB", 24111: "23.5 GiB"} {
		if got := FormatMB(in); got != want {
			t.Errorf("FormatMB(%d) = %q, want %q", in, got, want)
		}
	}
	for in, want := range map[int64]string{0: "0 B", 1023: "1023 B", 2048: "2 KiB", 3 << 30: "3 GiB", 1 << 50: "1024 TiB"} {
		if got := FormatBytes(in); got != want {
			t.Errorf("FormatBytes(%d) = %q, want %q", in, got, want)
		}
	}
	for in, want := range map[time.Duration]string{
		850 * time.Microsecond: "850µs", 12300 * time.Microsecond: "12ms", 1020 * time.Millisecond: "1.02s",
		31400 * time.Millisecond: "31.4s", 200 * time.Second: "3m20s", 0: "0s",
	} {
		if got := Short(in); got != want {
			t.Errorf("Short(%v) = %q, want %q", in, got, want)
		}
	}
}

func TestTablesLineUp(t *testing.T) {
	green := Style{on: true}
	var table Table
	table.Right = []int{1}
	table.Row("NAME", "SIZE", "STATE")
	table.Row("a", "12", green.Good("ok"))
	table.Row("größer", "1234", "")
	var b strings.Builder
	if err := table.Write(&b); err != nil {
		t.Fatal(err)
	}
	want := "NAME    SIZE  STATE\n" +
		"a         12  \x1b[32mok\x1b[0m\n" +
		"größer  1234\n"
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Error(diff)
	}
}

func TestChartIsATimeLine(t *testing.T) {
	var b strings.Builder
	err := WriteChart(&b, []Phase{
		{"spawn", 12 * time.Millisecond},
		{"kernel", 1200 * time.Millisecond},
		{"exec", 400 * time.Millisecond},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := "spawn      12ms  ▏\n" +
		"kernel    1.20s  " + strings.Repeat("█", 36) + "\n" +
		"exec      400ms  " + strings.Repeat(" ", 36) + strings.Repeat("█", 12) + "\n" +
		"total     1.61s\n"
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Error(diff)
	}
	if err := WriteChart(&b, nil); err != nil {
		t.Error(err)
	}
}

func TestProgressOffATerminalIsPlainLinesOrNothing(t *testing.T) {
	var b bytes.Buffer
	p := NewProgress(&b, false, PlainLines)
	p.Step("unpack %s", "kernel")
	p.Step("unpack %s", "kernel")
	p.Step("make the disk\x1b[2J")
	p.Done()
	if diff := cmp.Diff("unpack kernel\nmake the disk?[2J\n", b.String()); diff != "" {
		t.Error(diff)
	}
	b.Reset()
	for _, p := range []*Progress{NewProgress(&b, true, PlainLines), NewProgress(&b, false, Silent)} {
		p.Step("x")
		p.Done()
		if b.Len() > 0 {
			t.Errorf("wrote %q, want nothing", b.String())
		}
	}
}

func TestColoursOnlyOnATerminal(t *testing.T) {
	if got := StyleFor(&bytes.Buffer{}).Bad("x"); got != "x" {
		t.Errorf("got %q, want it plain", got)
	}
}
