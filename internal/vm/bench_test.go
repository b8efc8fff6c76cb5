package vm

import (
	"net"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/vm/qmp"
)

// BenchmarkStart takes turns with plain QEMU on the same command line, so that
// both see the same machine, and reports the medians and the best of both.
func BenchmarkStart(b *testing.B) {
	var ours, plain []time.Duration
	for b.Loop() {
		begin := time.Now()
		v, err := Start(b.Context(), paused, Options{})
		if err != nil {
			b.Fatal(err)
		}
		ours = append(ours, time.Since(begin))
		v.Stop(b.Context())
		plain = append(plain, plainQEMU(b))
	}
	slices.Sort(ours)
	slices.Sort(plain)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	b.ReportMetric(ms(ours[len(ours)/2]), "p50-ms")
	b.ReportMetric(ms(plain[len(plain)/2]), "plain-p50-ms")
	b.ReportMetric(ms(ours[0]), "best-ms")
	b.ReportMetric(ms(plain[0]), "plain-best-ms")
}

// plainQEMU is the time from exec to a monitor that answers, without a jail.
func plainQEMU(b *testing.B) time.Duration {
	begin := time.Now()
	var files []*os.File
	var ours []*net.UnixConn
	for range 3 {
		conn, theirs, err := socketpair()
		if err != nil {
			b.Fatal(err)
		}
		ours, files = append(ours, conn), append(files, theirs)
	}
	cmd := exec.Command(DefaultQEMU, Args(paused, inJail, FDs{QMP: 3, Link: 4, Console: 5})...)
	cmd.ExtraFiles = files
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	monitor, err := qmp.New(b.Context(), ours[0])
	if err != nil {
		b.Fatal(err)
	}
	took := time.Since(begin)
	monitor.Close()
	cmd.Process.Kill()
	cmd.Wait()
	for i := range files {
		files[i].Close()
		ours[i].Close()
	}
	return took
}
