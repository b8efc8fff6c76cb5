package vm

import (
	"bufio"
	"os"
	"strings"
	"sync"
)

// HostCPU is the name of the host's processor model, or "unknown". With KVM a
// guest sees the model itself, with TCG its clock: neither may change under a
// guest that goes on.
var HostCPU = sync.OnceValue(func() string {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return "unknown"
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if name, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
})
