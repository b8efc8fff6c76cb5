package ram

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestOwnPagesAreFoundInBothWays(t *testing.T) {
	c := startChild(t, 4096)
	c.do("fill", 0, 3, 1)
	c.do("fill", 10, 1, 0) // written to, though with zeros
	c.do("fill", 4095, 1, 2)
	for i := range 1500 { // more runs than one scan returns
		c.do("fill", 1000+2*i, 1, 3)
	}
	c.dump() // what is read alone is not own
	p := c.attach()

	own, err := p.Own()
	if err != nil {
		t.Fatal(err)
	}
	want := []Run{{0, 3}, {10, 1}}
	for i := range uint64(1500) {
		want = append(want, Run{1000 + 2*i, 1})
	}
	want = append(want, Run{4095, 1})
	if !slices.Equal(own, want) {
		t.Errorf("%d runs %v..., want %d", len(own), own[:min(5, len(own))], len(want))
	}
	walked, err := p.walk()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(walked, own) {
		t.Errorf("pagemap read gives %d runs, Own %d", len(walked), len(own))
	}
	if scanned, err := p.scan(); err == nil && !slices.Equal(scanned, walked) {
		t.Errorf("PAGEMAP_SCAN gives %d runs, pagemap read %d", len(scanned), len(walked))
	} else if err != nil && !errors.Is(err, unix.ENOTTY) {
		t.Error(err)
	}
}

// The kernel gives regions in groups of 512; see scan.
func TestOwnPagesInManyPiecesAreFoundOnce(t *testing.T) {
	for _, pieces := range []int{511, 512, 513, 700, 1023, 1024, 1025, 1500, 2048, 3000} {
		c := startChild(t, 8192)
		for i := range pieces {
			c.do("fill", 2*i, 1, 1)
		}
		own, err := c.attach().Own()
		if err != nil {
			t.Fatal(err)
		}
		if len(own) != pieces {
			t.Errorf("%d runs of %d", len(own), pieces)
		}
		for i, r := range own {
			if r.First != uint64(2*i) || r.Count != 1 {
				t.Errorf("of %d pieces, run %d is %v", pieces, i, r)
				break
			}
		}
	}
}

func TestAMappingThatTheKernelSplitIsWhole(t *testing.T) {
	c := startChild(t, 256)
	c.do("fill", 0, 256, 1)
	c.do("protect", 100, 20, 0)
	p := c.attach()
	tr := NewTracker(p)
	d := snapshot(t, tr, c.size, keepBytes)
	same(t, "flat file", readAll(t, flat(t, c.file, d)), c.dump())
}

func TestAttachSaysWhatIsWrong(t *testing.T) {
	c := startChild(t, 64)
	shared := startChild(t, 64, childShare+"=1")
	other := newFile(t)
	tests := []struct {
		name string
		pid  int
		file string
		size int64
		want string
	}{
		{"not mapped", c.pid, other.Name(), c.size, "is not mapped there"},
		{"another size", c.pid, c.file, c.size * 2, "not 524288 from its start"},
		{"shared", shared.pid, shared.file, shared.size, "mapped shared"},
		{"no size", c.pid, c.file, 0, "must be a multiple of 4096"},
		{"a crooked size", c.pid, c.file, c.size + 1, "must be a multiple of 4096"},
		{"a huge size", c.pid, c.file, 1 << 62, "at most 16 TiB"},
		{"no file", c.pid, c.file + "x", c.size, "no such file"},
		{"no process", 1 << 30, c.file, c.size, "no such file"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p, err := Attach(tt.pid, tt.file, tt.size)
			if err == nil {
				p.Close()
				t.Fatal("attached")
			}
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v; want %q", err, tt.want)
			}
		})
	}
}

func TestACaptureHoldsTheRAMAndNoMore(t *testing.T) {
	for _, keep := range []int{keepBytes, 0, 100 * PageSize} { // in memory, on the disk, both
		t.Run(fmt.Sprintf("keep %d", keep), func(t *testing.T) {
			c := startChild(t, 4096)
			tr := NewTracker(c.attach())
			c.do("fill", 5, 1000, 1)
			c.do("fill", 300, 200, 0)
			c.do("fill", 4095, 1, 2)
			first := snapshot(t, tr, c.size, keep)
			wantPages(t, first, 801, 200)
			same(t, "first", readAll(t, flat(t, c.file, first)), c.dump())

			c.do("fill", 5, 1000, 1) // 200 of them were zero
			c.do("fill", 5, 1, 1)    // and what was written again is the same
			c.do("fill", 4095, 1, 0)
			c.do("fill", 2000, 7, 9)
			second := snapshot(t, tr, c.size, keep)
			wantPages(t, second, 207, 1)
			same(t, "second", readAll(t, flat(t, c.file, first, second)), c.dump())

			if err := tr.Prepare(); err != nil { // changes nothing
				t.Fatal(err)
			}
			third := snapshot(t, tr, c.size, keep)
			wantPages(t, third, 0, 0)
			same(t, "third", readAll(t, flat(t, c.file, first, second, third)), c.dump())
		})
	}
}

func TestASnapshotThatFailsLosesNothing(t *testing.T) {
	c := startChild(t, 512)
	tr := NewTracker(c.attach())
	c.do("fill", 0, 100, 1)
	base := snapshot(t, tr, c.size, keepBytes)
	c.do("fill", 10, 10, 2)
	wantPages(t, captured(t, tr, c.size, keepBytes, false), 10, 0)
	wantPages(t, captured(t, tr, c.size, keepBytes, false), 10, 0)
	c.do("fill", 50, 5, 0)
	d := snapshot(t, tr, c.size, keepBytes)
	wantPages(t, d, 10, 5)
	same(t, "flat file", readAll(t, flat(t, c.file, base, d)), c.dump())

	// A page that changes and changes back is not in the difference.
	c.do("fill", 10, 10, 7)
	c.do("fill", 10, 10, 2)
	wantPages(t, snapshot(t, tr, c.size, keepBytes), 0, 0)
}

func TestALateCommitLeavesNothingForKnown(t *testing.T) {
	c := startChild(t, 512)
	tr := NewTracker(c.attach())
	c.do("fill", 0, 4, 1)
	base := snapshot(t, tr, c.size, keepBytes)
	c.do("fill", 0, 1, 2)
	f := newFile(t)
	late, err := tr.Capture(f)
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	if err := late.Finish(); err != nil {
		t.Fatal(err)
	}
	c.do("fill", 0, 1, 1) // as in base: the next capture does not have it
	wantPages(t, captured(t, tr, c.size, keepBytes, false), 0, 0)
	tr.Commit(late)
	last := snapshot(t, tr, c.size, keepBytes)
	lateDiff, err := OpenDifference(f.Name(), c.size)
	if err != nil {
		t.Fatal(err)
	}
	defer lateDiff.Close()
	same(t, "flat file", readAll(t, flat(t, c.file, base, lateDiff, last)), c.dump())
}

func TestAPageThatIsGivenBackIsCaptured(t *testing.T) {
	// A balloon gives pages back: they are the flat file's again.
	file := noiseFile(t, 256)
	c := startChildOn(t, file)
	tr := NewTracker(c.attach())
	c.do("fill", 0, 100, 9)
	first := snapshot(t, tr, c.size, keepBytes)
	c.do("drop", 20, 30, 0)
	second := snapshot(t, tr, c.size, keepBytes)
	wantPages(t, second, 18, 12)
	same(t, "flat file", readAll(t, flat(t, file, first, second)), c.dump())
	wantPages(t, snapshot(t, tr, c.size, keepBytes), 0, 0)
	c.do("fill", 25, 1, 9)
	wantPages(t, snapshot(t, tr, c.size, keepBytes), 1, 0)
}

func TestARestoredVMStartsFromItsSnapshot(t *testing.T) {
	file := noiseFile(t, 1024)
	c := startChildOn(t, file)
	tr := NewTracker(c.attach())
	c.do("fill", 0, 300, 1)
	c.do("fill", 400, 200, 0)
	first := snapshot(t, tr, c.size, keepBytes)
	c.do("fill", 100, 50, 0)
	c.do("fill", 450, 50, 3)
	second := snapshot(t, tr, c.size, keepBytes)
	want := c.dump()

	restored := startChildOn(t, file)
	p := restored.attach()
	for _, d := range []*Difference{first, second} {
		if err := p.Inject(d); err != nil {
			t.Fatal(err)
		}
	}
	same(t, "restored RAM", restored.dump(), want)
	again := NewTracker(p)
	if err := again.Settle(); err != nil {
		t.Fatal(err)
	}
	wantPages(t, captured(t, again, c.size, keepBytes, false), 0, 0)
	restored.do("fill", 0, 1, 77)
	third := snapshot(t, again, c.size, keepBytes)
	wantPages(t, third, 1, 0)
	same(t, "flat file", readAll(t, flat(t, file, first, second, third)), restored.dump())
}

func TestZerosTakeNoMemoryWhereTheFileHasNone(t *testing.T) {
	c := startChild(t, 256)
	tr := NewTracker(c.attach())
	c.do("fill", 0, 256, 0)
	d := snapshot(t, tr, c.size, keepBytes)
	wantPages(t, d, 0, 256)
	p := startChild(t, 256).attach()
	if err := p.Inject(d); err != nil {
		t.Fatal(err)
	}
	if own, err := p.Own(); err != nil || len(own) != 0 {
		t.Errorf("own pages %v, %v; want none", own, err)
	}
}

func TestADifferenceForAnotherRAMIsNotInjected(t *testing.T) {
	c := startChild(t, 64)
	d := snapshot(t, NewTracker(c.attach()), c.size, keepBytes)
	err := startChild(t, 128).attach().Inject(d)
	if err == nil || !strings.Contains(err.Error(), "is for a RAM of 64 pages, the process has 128") {
		t.Error(err)
	}
}

func TestAProcessThatHasGoneIsNoticed(t *testing.T) {
	c := startChild(t, 64)
	c.do("fill", 0, 64, 1)
	p := c.attach()
	tr := NewTracker(p)
	d := snapshot(t, tr, c.size, keepBytes)
	c.stop()
	if _, err := tr.Capture(newFile(t)); err == nil {
		t.Error("captured the RAM of a process that has gone")
	}
	if err := tr.Settle(); err == nil {
		t.Error("settled with a process that has gone")
	}
	if err := p.Inject(d); err == nil {
		t.Error("injected into a process that has gone")
	}
}

func TestAChainOfRandomChangesComesToTheRAM(t *testing.T) {
	file := noiseFile(t, 2048)
	c := startChildOn(t, file)
	tr := NewTracker(c.attach())
	r := rand.New(rand.NewPCG(1, 2))
	var chain []*Difference
	for i := range 30 {
		for range 12 {
			n := 1 + r.IntN(90)
			word := "fill"
			if r.IntN(8) == 0 {
				word = "drop"
			}
			c.do(word, r.IntN(2048-n), n, r.Uint64N(4))
		}
		d := captured(t, tr, c.size, r.IntN(300)*PageSize, i%4 != 3)
		if i%4 != 3 {
			chain = append(chain, d)
			same(t, fmt.Sprint("link ", i), readAll(t, flat(t, file, chain...)), c.dump())
		}
	}
}

func TestNothingIsLeftOpenOrMapped(t *testing.T) {
	c := startChild(t, 1024)
	c.do("fill", 0, 1024, 1)
	dir := t.TempDir()
	once := func() {
		p, err := Attach(c.pid, c.file, c.size)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		f, err := os.CreateTemp(dir, "")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		tr := NewTracker(p)
		for range 2 {
			if err := tr.Prepare(); err != nil {
				t.Fatal(err)
			}
		}
		capture, err := tr.Capture(f)
		if err != nil {
			t.Fatal(err)
		}
		defer capture.Close()
		if err := tr.Prepare(); err != nil {
			t.Fatal(err)
		}
		tr.Release()
		if err := capture.Finish(); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenDifference(f.Name(), c.size*2); !errors.Is(err, ErrFormat) {
			t.Fatal(err)
		}
		if _, err := Attach(c.pid, f.Name(), c.size); err == nil {
			t.Fatal("attached to a file that is not mapped")
		}
	}
	once()
	fds, mapped := openFiles(t), mappedBytes(t)
	const times = 40
	for range times {
		once()
	}
	if n := openFiles(t); n > fds {
		t.Errorf("%d open files, were %d", n, fds)
	}
	if n := mappedBytes(t); n > mapped+times*(4<<20)/2 { // 4 MiB each, if they leaked
		t.Errorf("%d bytes mapped, were %d", n, mapped)
	}
}

func openFiles(t *testing.T) int {
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(files)
}

func mappedBytes(t *testing.T) (n int) {
	var pages int
	if _, err := fmt.Sscan(string(readAll(t, "/proc/self/statm")), &pages); err != nil {
		t.Fatal(err)
	}
	return pages * PageSize
}

// noiseFile is a flat file with noise in it, and some holes.
func noiseFile(t testing.TB, pages int) string {
	f := newFile(t)
	if err := f.Truncate(int64(pages) * PageSize); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 5*PageSize)
	for at := 0; at+5 <= pages; at += 8 {
		fill(buf, uint64(at)+100)
		if _, err := f.WriteAt(buf, int64(at)*PageSize); err != nil {
			t.Fatal(err)
		}
	}
	return f.Name()
}

func wantPages(t testing.TB, d *Difference, data, zero uint64) {
	t.Helper()
	if gotData, gotZero := d.Pages(); gotData != data || gotZero != zero {
		t.Errorf("%d data and %d zero pages, want %d and %d", gotData, gotZero, data, zero)
	}
}
