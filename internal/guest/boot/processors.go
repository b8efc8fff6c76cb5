package boot

import (
	"fmt"
	"io/fs"
	"os"
	"strings"
)

const processorDir = "/sys/devices/system/cpu"

// processors are those that the kernel did not start itself. The host may tell
// it to boot with one alone (maxcpus=1): then nothing else runs while the
// kernel patches its own code, which an emulated processor can miss for ever
// (docs/decisions/0007), and the others, 130 ms each, start beside the link.
type processors struct {
	dir  *os.Root // a path would lead nowhere while Prepare moves /sys
	done chan struct{}
	err  error // valid once done is closed
}

// newProcessors opens dir, which must be where it is in the mount tree now.
func newProcessors(dir string) (*processors, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	return &processors{dir: root, done: make(chan struct{})}, nil
}

// bring starts them, one after the other. It is called once.
func (p *processors) bring() {
	defer close(p.done)
	defer p.dir.Close()
	paths, err := fs.Glob(p.dir.FS(), "cpu[0-9]*/online")
	if err != nil {
		p.err = err
		return
	}
	for _, path := range paths {
		state, err := p.dir.ReadFile(path)
		if err == nil && strings.TrimSpace(string(state)) == "0" {
			err = p.dir.WriteFile(path, []byte("1"), 0)
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
