package bench

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// plain is a QEMU as anyone would start it by hand: the floor under what
// Warren does with one. No supervisor, no confinement, no QMP.
type plain struct {
	QEMU        string   // path
	Accel       []string // the accelerator and processor arguments
	CPUs, MemMB int
	Kernel      string
	Initramfs   string
	Cmdline     string

	// RootDisk and DataDisk are raw files; "" is no disk. Both are opened
	// for reading alone: what the guest writes to the second goes to an
	// unnamed file that ends with QEMU.
	RootDisk, DataDisk string
	// Ports are the names of the virtio-serial ports, at descriptors 3, 4, ….
	Ports []string
}

// args is the command line after the program's name.
func (p plain) args() []string {
	args := []string{"-machine", "pc"}
	args = append(args, p.Accel...)
	args = append(args,
		"-smp", strconv.Itoa(p.CPUs), "-m", strconv.Itoa(p.MemMB),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-serial", "stdio",
		"-kernel", p.Kernel, "-initrd", p.Initramfs, "-append", p.Cmdline)
	if p.RootDisk != "" {
		args = append(args,
			"-drive", "if=none,id=root,format=raw,readonly=on,file="+escaped(p.RootDisk),
			"-device", "virtio-blk-pci,drive=root,serial=root")
	}
	if p.DataDisk != "" {
		args = append(args,
			"-drive", "if=none,id=data,format=raw,snapshot=on,file="+escaped(p.DataDisk),
			"-device", "virtio-blk-pci,drive=data,serial=data")
	}
	if len(p.Ports) > 0 {
		args = append(args, "-device", "virtio-serial-pci")
	}
	for i, name := range p.Ports {
		args = append(args,
			"-chardev", fmt.Sprintf("socket,id=port%d,fd=%d", i, 3+i),
			"-device", fmt.Sprintf("virtserialport,name=%s,chardev=port%d", name, i))
	}
	return args
}

// escaped doubles the commas of a path, which QEMU's options end at.
func escaped(path string) string {
	var out []byte
	for _, c := range []byte(path) {
		if c == ',' {
			out = append(out, ',')
		}
		out = append(out, c)
	}
	return string(out)
}

// plainVM is a running plain QEMU.
type plainVM struct {
	*process
	console *os.File
	seen    *tail
	ports   []net.Conn
}

// start runs QEMU and returns at once. The VM ends with ctx at the latest.
func (p plain) start(ctx context.Context) (*plainVM, error) {
	v := &plainVM{seen: &tail{max: 8 << 10}}
	console, theirs, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("console of plain QEMU: %w", err)
	}
	v.console = console
	defer theirs.Close()
	var fds []*os.File
	defer func() {
		for _, f := range fds {
			f.Close()
		}
	}()
	for range p.Ports {
		conn, f, err := socketPair()
		if err != nil {
			v.closeFiles()
			return nil, fmt.Errorf("port of plain QEMU: %w", err)
		}
		v.ports, fds = append(v.ports, conn), append(fds, f)
	}
	v.process, err = command{argv: append([]string{p.QEMU}, p.args()...), stdout: theirs, files: fds}.start(ctx)
	if err != nil {
		v.closeFiles()
		return nil, err
	}
	return v, nil
}

// awaitInit waits for the agent's first line and returns the time since
// before the fork.
func (v *plainVM) awaitInit() (time.Duration, error) {
	err := awaitLine(v.console, initLine, v.seen)
	took := time.Since(v.started)
	if err != nil {
		// The console is QEMU's standard output: it ends with QEMU.
		return 0, fmt.Errorf("plain QEMU ended (%w) before the console said %q: %s", v.died(), initLine, v.seen)
	}
	return took, nil
}

// drain reads the console to its end, so that the guest never waits for it.
func (v *plainVM) drain() { _, _ = io.Copy(v.seen, v.console) }

// stop kills the VM, waits until it is gone and closes what led to it.
func (v *plainVM) stop() {
	v.process.stop()
	v.closeFiles()
}

func (v *plainVM) closeFiles() {
	v.console.Close()
	for _, c := range v.ports {
		c.Close()
	}
}

// socketPair returns our end as a connection and theirs as a file.
func socketPair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "port"), os.NewFile(uintptr(fds[1]), "port")
	conn, err := net.FileConn(ours)
	ours.Close()
	if err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return conn, theirs, nil
}
