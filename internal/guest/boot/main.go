package boot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guest"
	"github.com/warren-vm/warren/internal/guest/proc"
	"github.com/warren-vm/warren/internal/link"
)

// moduleDir is where the initramfs has the kernel's modules.
const moduleDir = "/modules"

// portName is the name of the virtio-serial port that is the link.
const portName = "warren.link"

// Main is the whole life of PID 1. It does not return; when the machine
// cannot be brought up it says why on the console and powers off, which the
// host sees at once.
func Main() {
	announce()
	// The heap is small and mostly garbage of finished calls: collecting it
	// less often saves emulated cycles, but what it takes the programs lack.
	debug.SetGCPercent(200)
	debug.SetMemoryLimit(64 << 20)
	// One goroutine at a time: handing work to another processor of the guest
	// means an interrupt there and a search for work here, which emulated
	// processors pay for with more than they gain.
	runtime.GOMAXPROCS(1)
	begin := time.Now()
	watch := stopwatch{last: begin}
	con := &console{fd: 2}
	m, err := start(&watch, &con)
	if err != nil {
		con.line("cannot start: " + err.Error())
		powerOff()
	}
	go func() {
		if m.processors.bring(); m.processors.err != nil {
			con.line(m.processors.err.Error()) // and Prepare fails with it
			return
		}
		watch.lap("processors")
		con.line(fmt.Sprintf("idle after %s", watch.text(begin)))
	}()
	m.serve()
}

// stopwatch notes how long the phases of something took.
type stopwatch struct {
	last   time.Time
	names  []string
	phases map[string]int64 // microseconds
}

func (w *stopwatch) lap(name string) {
	now := time.Now()
	if w.phases == nil {
		w.phases = make(map[string]int64)
	}
	w.names = append(w.names, name)
	w.phases[name] = now.Sub(w.last).Microseconds()
	w.last = now
}

func (w *stopwatch) text(begin time.Time) string {
	var b strings.Builder
	b.WriteString(w.last.Sub(begin).Round(100 * time.Microsecond).String())
	sep := ": "
	for _, name := range w.names {
		fmt.Fprintf(&b, "%s%s %.1fms", sep, name, float64(w.phases[name])/1000)
		sep = ", "
	}
	return b.String()
}

// start brings the machine to where it is idle.
func start(watch *stopwatch, con **console) (*machine, error) {
	syscall.Umask(0o022)
	if err := mountSystem(); err != nil {
		return nil, err
	}
	*con = openConsole()
	guardSignals()
	watch.lap("mounts")
	// It waits for the kernel more than it computes.
	var groups cgroups
	var programsFreezer *freezer
	limited := make(chan error, 1)
	go func() {
		var err error
		groups, programsFreezer, err = setUp()
		limited <- err
	}()
	root, others, err := moduleOrder(moduleDir)
	if err != nil {
		return nil, err
	}
	if err := loadModules(moduleDir, root); err != nil {
		return nil, err
	}
	watch.lap("root modules")
	if err := mountRootDisk(); err != nil {
		return nil, err
	}
	watch.lap("root")
	go prefetch()
	if err := loadModules(moduleDir, others); err != nil {
		return nil, err
	}
	watch.lap("modules")
	if err := <-limited; err != nil {
		return nil, err
	}
	watch.lap("limits")
	port, err := findPort()
	if err != nil {
		return nil, err
	}
	m := &machine{console: *con, port: port, reaper: proc.NewReaper(), cgroups: groups, freezer: programsFreezer, data: -1}
	if m.processors, err = newProcessors(processorDir); err != nil {
		return nil, err
	}
	m.agent, err = guest.New(guest.Options{
		ImageID:  imageID(),
		System:   m,
		Reaper:   m.reaper,
		Accounts: proc.NewAccounts("/etc"),
		Cgroup:   groups.runs,
		Log:      (*con).line,
	})
	watch.lap("agent")
	return m, err
}

// setUp does what needs no device, and returns the groups of programs and
// what freezes them.
func setUp() (groups cgroups, f *freezer, err error) {
	if err := limits(); err != nil {
		return groups, nil, err
	}
	if err := loopbackUp(); err != nil {
		return groups, nil, err
	}
	if groups, err = makeCgroups(); err != nil {
		return groups, nil, err
	}
	f, err = openFreezer(programs)
	return groups, f, err
}

// serve answers the host for ever. The port fails for good only when the
// device is gone; trying again costs nothing and PID 1 must not end.
func (m *machine) serve() {
	for {
		err := m.serveOnce()
		m.console.line(fmt.Sprintf("link: %v; opening it again", err))
		time.Sleep(time.Second)
	}
}

func (m *machine) serveOnce() (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v\n%s", v, debug.Stack())
		}
	}()
	port, err := link.OpenGuestPort(m.port)
	if err != nil {
		return err
	}
	return link.Serve(context.Background(), port, func(s *link.Session) {
		_ = m.agent.Serve(s) // ends with the session
	})
}

// findPort returns the device of the link's port. The names in /dev/virtio-ports
// are udev's work, which is not here.
func findPort() (string, error) {
	for deadline := time.Now().Add(diskAppears); ; time.Sleep(10 * time.Millisecond) {
		paths, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return "", err
		}
		for _, path := range paths {
			name, err := os.ReadFile(path)
			if err == nil && strings.TrimSpace(string(name)) == portName {
				return "/dev/" + filepath.Base(filepath.Dir(path)), nil
			}
		}
		if time.Now().After(deadline) {
			return "", errors.New("no virtio-serial port named " + portName)
		}
	}
}

// imageID is what the host put on the kernel's command line.
func imageID() string {
	data, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return ""
	}
	return parseImageID(string(data))
}

func parseImageID(cmdline string) string {
	for word := range strings.FieldsSeq(cmdline) {
		if id, ok := strings.CutPrefix(word, "warren.image="); ok {
			return id
		}
	}
	return ""
}

// guardSignals keeps signals that the guest's root sends to PID 1 from ending
// the agent. Catching is not ignoring: programs start with the defaults.
func guardSignals() {
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGABRT,
		syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM, syscall.SIGVTALRM, syscall.SIGTRAP, syscall.SIGSYS,
		syscall.SIGSTKFLT, syscall.SIGXCPU, syscall.SIGXFSZ, syscall.SIGIO, syscall.SIGPWR,
		syscall.SIGBUS, syscall.SIGFPE, syscall.SIGSEGV, syscall.SIGILL)
	go func() {
		for range caught {
		}
	}()
}

// limits sets what programs inherit.
func limits() error {
	// The kernel's own hard limit of 4,096 is too low for servers; the soft one
	// stays what old programs can count to.
	files := syscall.Rlimit{Cur: 1024, Max: 524288}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		return os.NewSyscallError("setrlimit", err)
	}
	for name, value := range map[string]string{
		// The most there can be, so that no pid is used again while anybody
		// still remembers it.
		"kernel/pid_max": "4194304",
		// The guest's root should not end PID 1 by the keyboard's reset either.
		"kernel/ctrl-alt-del": "0",
	} {
		if err := os.WriteFile("/proc/sys/"+name, []byte(value), 0); err != nil {
			return err
		}
	}
	return endThrashing()
}

// loopbackUp gives programs 127.0.0.1.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return os.NewSyscallError("bring up lo", unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req))
}
