package boot

import (
	"strings"
	"sync"
	"syscall"
)

// console is where the agent's few lines go: the VM's serial port, which the
// host keeps in a bounded log. A guest can flood or stop it, so a line that
// cannot be written at once is lost; nothing ever waits for it.
type console struct {
	mu sync.Mutex
	fd int
}

// announce is the very first act of the agent: benchmarks take this line as
// the end of the kernel's boot. Descriptor 2 is /dev/console, opened by the
// kernel.
func announce() { syscall.Write(2, []byte("warren: init\n")) }

func openConsole() *console {
	fd, err := syscall.Open("/dev/console", syscall.O_WRONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY|syscall.O_CLOEXEC, 0)
	if err != nil {
		fd = 2
	}
	return &console{fd: fd}
}

// line writes one line, or several. Safe for concurrent use.
func (c *console) line(s string) {
	s = "warren: " + strings.ReplaceAll(strings.TrimRight(s, "\n"), "\n", "\nwarren: ") + "\n"
	c.mu.Lock()
	defer c.mu.Unlock()
	syscall.Write(c.fd, []byte(s))
}
