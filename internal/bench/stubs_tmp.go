package bench

import "context"

type bed struct{ host Machine }

func newBed(ctx context.Context, o Options) (*bed, error) { return nil, nil }

func boot() Benchmark {
	return Benchmark{Name: "boot", Title: "cold start to first output", Floor: "plain QEMU", Unit: Milliseconds, N: 20, Bars: []Bar{{Of: "ratio", AtMost: 1.3}}}
}
func execute() Benchmark {
	return Benchmark{Name: "exec", Title: "one run of `true`", Floor: "in the guest", Unit: Milliseconds, N: 200, Batch: 20, Bars: []Bar{{Of: "ratio", AtMost: 1.5}}}
}
func stdio() Benchmark {
	return Benchmark{Name: "stdio", Title: "bytes through stdin and stdout of `cat`", Floor: "bare port", Unit: MiBPerSecond, N: 3, Bars: []Bar{{Of: "ratio", AtLeast: 0.5}, {Of: "supervisor_peak_mib", AtMost: 64}}}
}
