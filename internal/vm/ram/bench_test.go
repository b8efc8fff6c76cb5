package ram

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"
)

// BenchmarkCapture is what a guest waits for: own pages of which some changed.
func BenchmarkCapture(b *testing.B) {
	for _, mib := range []struct{ own, changed int }{{32, 4}, {64, 4}, {64, 64}, {256, 4}} {
		b.Run(fmt.Sprintf("%dMiB/%dMiB", mib.own, mib.changed), func(b *testing.B) {
			c := startChild(b, 512<<20/PageSize)
			tr := NewTracker(c.attach())
			c.do("fill", 0, mib.own<<20/PageSize, 1)
			if err := tr.Settle(); err != nil {
				b.Fatal(err)
			}
			for i := range mib.changed << 20 / PageSize / 4 { // in runs of 4 pages
				c.do("fill", i*4*mib.own/mib.changed, 4, 2)
			}
			f := newFile(b)
			for _, prepared := range []bool{false, true} {
				b.Run(fmt.Sprintf("prepared=%t", prepared), func(b *testing.B) {
					benchmarkCapture(b, tr, f, prepared, mib.changed<<20/PageSize)
				})
			}
		})
	}
}

func benchmarkCapture(b *testing.B, tr *Tracker, f *os.File, prepared bool, want int) {
	var took []time.Duration
	for b.Loop() {
		b.StopTimer()
		if prepared {
			if err := tr.Prepare(); err != nil {
				b.Fatal(err)
			}
		}
		b.StartTimer()
		start := time.Now()
		capture, err := tr.Capture(f)
		if err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(start))
		if n, _ := capture.Pages(); n != uint64(want) {
			b.Fatalf("%d pages changed, want %d", n, want)
		}
		b.StopTimer()
		capture.Close()
		b.StartTimer()
	}
	// Other work on the host makes the mean jump.
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "ms-median")
	b.ReportMetric(float64(took[0].Microseconds())/1000, "ms-best")
}

func BenchmarkOwn(b *testing.B) {
	c := startChild(b, 256<<20/PageSize)
	c.do("fill", 0, 32<<20/PageSize, 1)
	p := c.attach()
	for name, find := range map[string]func() ([]Run, error){"scan": p.scan, "walk": p.walk} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := find(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkRead compares the two ways to read from another process.
func BenchmarkRead(b *testing.B) {
	const pages = 32 << 20 / PageSize
	c := startChild(b, pages)
	c.do("fill", 0, pages, 1)
	p := c.attach()
	ways := map[string]func(at int, buf []byte) error{
		"process_vm_readv": func(at int, buf []byte) error {
			return p.read([]Run{{uint64(at), blockPages}}, buf)
		},
		"pread": func(at int, buf []byte) error {
			_, err := p.mem.ReadAt(buf, int64(p.start)+int64(at)*PageSize)
			return err
		},
	}
	for name, read := range ways {
		b.Run(name, func(b *testing.B) {
			buf := make([]byte, blockPages*PageSize)
			for b.Loop() {
				for at := 0; at < pages; at += blockPages {
					if err := read(at, buf); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}

func BenchmarkSettle(b *testing.B) {
	c := startChild(b, 512<<20/PageSize)
	c.do("fill", 0, 32<<20/PageSize, 1)
	tr := NewTracker(c.attach())
	for b.Loop() {
		if err := tr.Settle(); err != nil {
			b.Fatal(err)
		}
	}
}
