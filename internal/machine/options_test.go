package machine

import (
	"runtime"
	"strings"
	"testing"
)

func TestOptionsReportEveryFaultAtOnce(t *testing.T) {
	err := Options{CPUs: -1, MemMB: 1, Hostname: "two words", Accel: "warp", BootTimeout: -1}.Check()
	if err == nil {
		t.Fatal("no fault found")
	}
	for _, want := range []string{"-1 CPUs", "1 MiB of memory is too little", `host name "two words"`, `accelerator "warp"`, "boot timeout"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %q", want, err)
		}
	}
}

func TestSmallHostsHaveNoGiantVMs(t *testing.T) {
	for host, want := range map[int]int{1: 8, 2: 8, 4: 16, 16: MaxCPUs, 200: MaxCPUs} {
		if got := mostCPUs(host); got != want {
			t.Errorf("%d processors: %d, want %d", host, got, want)
		}
	}
}

func TestOptionsBounds(t *testing.T) {
	host := HostMemMB()
	if host < 64 {
		t.Fatalf("the host is said to have %d MiB", host)
	}
	tests := []struct {
		name string
		o    Options
		good bool
	}{
		{"nothing said", Options{}, true},
		{"least memory", Options{MemMB: MinMemMB}, true},
		{"less than that", Options{MemMB: MinMemMB - 1}, false},
		{"all of the host's memory", Options{MemMB: host}, host >= MinMemMB},
		{"more than that", Options{MemMB: host + 1}, false},
		{"one CPU", Options{CPUs: 1}, true},
		{"most CPUs", Options{CPUs: mostCPUs(runtime.NumCPU())}, true},
		{"one more", Options{CPUs: mostCPUs(runtime.NumCPU()) + 1}, false},
		{"choose the accelerator", Options{Accel: "auto"}, true},
		{"a name of 63 letters", Options{Hostname: strings.Repeat("a", 63)}, true},
		{"a name of 64 letters", Options{Hostname: strings.Repeat("a", 64)}, false},
		{"a name with an end of line", Options{Hostname: "a\n"}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if err := tt.o.Check(); (err == nil) != tt.good {
				t.Errorf("Check() = %v", err)
			}
		})
	}
}
