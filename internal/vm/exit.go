package vm

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/vm/qmp"
)

// Reason is why a VM ended.
type Reason string

// The reasons. QEMU tells the first five by its last event; the others are
// seen from outside.
const (
	GuestPoweroff Reason = "guest-poweroff" // the guest switched itself off
	GuestReset    Reason = "guest-reset"    // the guest restarted itself, as its kernel does after a panic
	GuestPanic    Reason = "guest-panic"    // the guest said that it has panicked
	HostQuit      Reason = "host-quit"      // Stop, or QMP quit
	HostSignal    Reason = "host-signal"    // QEMU was asked to end by a signal
	Killed        Reason = "killed"         // QEMU was killed by a signal, or crashed
	MonitorLost   Reason = "monitor-lost"   // QEMU broke off its monitor and was killed for it
	DiskFull      Reason = "disk-full"      // the host had no room for what the guest wrote; it was killed for it
	MemoryLost    Reason = "memory-lost"    // the file of the guest's memory could not be read or written
	QEMUError     Reason = "qemu-error"     // QEMU gave up; Stderr says why
)

// ExitInfo is how a VM ended.
type ExitInfo struct {
	Reason Reason
	// Code is QEMU's exit code; -1 when a signal ended it.
	Code int
	// Signal is the signal that ended it; 0 when it exited.
	Signal syscall.Signal
	// Stderr is the end of what QEMU wrote, cleaned, at most maxStderr bytes.
	Stderr string
}

// maxStderr bounds what is kept of QEMU's stderr, in bytes.
const maxStderr = 4 << 10

// String is a sentence for a person, without a full stop.
func (e ExitInfo) String() string {
	switch e.Reason {
	case GuestPoweroff:
		return "the guest switched itself off"
	case GuestReset:
		return "the guest restarted itself, which mostly means that its kernel panicked"
	case GuestPanic:
		return "the guest's kernel panicked"
	case HostQuit:
		return "the VM was stopped"
	case HostSignal:
		return "QEMU was terminated by a signal"
	case MonitorLost:
		return "QEMU broke off its monitor connection and was killed"
	case DiskFull:
		return "the host's disk is full and had no room for what the guest wrote; free some on the disk of Warren's home ($WARREN_HOME, else ~/.local/share/warren)"
	case MemoryLost:
		return "the host could not read or write the file of the guest's memory: the disk of Warren's home ($WARREN_HOME, else ~/.local/share/warren) " +
			"is full or fails; free some space there, or use another disk"
	case Killed:
		return fmt.Sprintf("QEMU was killed by signal %d (%v)", int(e.Signal), e.Signal) + e.lastWords()
	default:
		return fmt.Sprintf("QEMU ended with code %d", e.Code) + e.lastWords()
	}
}

// lastWords is the last line of stderr, where QEMU says what was wrong.
func (e ExitInfo) lastWords() string {
	lines := strings.Split(e.Stderr, "\n")
	if last := guestapi.CleanLineTail([]byte(lines[len(lines)-1]), 300); last != "" {
		return ": " + last
	}
	return ""
}

// ending is what was seen of a VM's end.
type ending struct {
	state     *os.ProcessState
	stderr    []byte
	events    []qmp.Event
	stopping  bool   // Stop was called
	killedFor Reason // why we killed it, without Stop
}

func (e ending) info() ExitInfo {
	info := ExitInfo{Code: -1, Stderr: guestapi.CleanTail(e.stderr, maxStderr)}
	if e.state != nil {
		if ws, ok := e.state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			info.Signal = ws.Signal()
		}
		info.Code = e.state.ExitCode()
	}
	info.Reason = e.reason(info)
	return info
}

func (e ending) reason(info ExitInfo) Reason {
	switch {
	case e.killedFor != "":
		return e.killedFor
	case info.Signal != 0 && e.stopping:
		return HostQuit
	case info.Signal == syscall.SIGBUS:
		return MemoryLost // of the mappings of QEMU only the guest's memory is a file that can grow
	case info.Signal != 0:
		return Killed
	}
	var said Reason
	for _, event := range e.events {
		switch event.Name {
		case "GUEST_PANICKED":
			return GuestPanic // the shutdown that follows is its consequence
		case "SHUTDOWN":
			if said == "" {
				said = shutdownReason(event.Data)
			}
		}
	}
	switch {
	case e.stopping && (said == "" || said == HostSignal):
		return HostQuit
	case said == "":
		return QEMUError
	}
	return said
}

// shutdownReason reads the data of a SHUTDOWN event.
func shutdownReason(data json.RawMessage) Reason {
	var d struct{ Reason string }
	if json.Unmarshal(data, &d) != nil {
		return ""
	}
	switch d.Reason {
	case "guest-shutdown":
		return GuestPoweroff
	case "guest-reset", "subsystem-reset":
		return GuestReset
	case "guest-panic":
		return GuestPanic
	case "host-qmp-quit", "host-qmp-system-reset", "host-ui":
		return HostQuit
	case "host-signal":
		return HostSignal
	case "host-error":
		return QEMUError
	}
	return ""
}

// isDiskFull says whether a BLOCK_IO_ERROR event is one for which QEMU paused
// the VM: the host had no room for a write.
func isDiskFull(event qmp.Event) bool {
	var d struct {
		Action  string
		NoSpace bool
	}
	return json.Unmarshal(event.Data, &d) == nil && d.Action == "stop" && d.NoSpace
}
