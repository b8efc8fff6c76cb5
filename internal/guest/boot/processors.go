package boot

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const processorDir = "/sys/devices/system/cpu"

// processors are those that the kernel did not start itself. The host may tell
// it to boot with one alone (maxcpus=1): then nothing else runs while the
// kernel patches its own code, which an emulated processor can miss for ever
// (docs/decisions/0007), and the others, 130 ms each, start beside the link.
type processors struct {
	dir  string
	done chan struct{}
	err  error // valid once done is closed
}

func newProcessors(dir string) *processors {
	return &processors{dir: dir, done: make(chan struct{})}
}

// bring starts them, one after the other. It is called once.
func (p *processors) bring() {
	defer close(p.done)
	paths, err := filepath.Glob(filepath.Join(p.dir, "cpu[0-9]*", "online"))
	if err != nil {
		p.err = err
		return
	}
	for _, path := range paths {
		state, err := os.ReadFile(path)
		if err == nil && strings.TrimSpace(string(state)) == "0" {
			err = os.WriteFile(path, []byte("1"), 0)
		}
		if err != nil {
			p.err = fmt.Errorf("start processor: %w", err)
			return
		}
	}
}

// wait returns when all are running.
func (p *processors) wait() error {
	<-p.done
	return p.err
}
