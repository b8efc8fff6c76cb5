package vm

import (
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/warren-vm/warren/internal/vm/qmp"
)

func event(name, data string) qmp.Event { return qmp.Event{Name: name, Data: json.RawMessage(data)} }

// ended is the state of a process that ended as the shell line says.
func ended(t *testing.T, script string) *os.ProcessState {
	t.Helper()
	cmd := exec.Command("sh", "-c", script)
	cmd.Run()
	return cmd.ProcessState
}

func TestEveryEndHasItsReason(t *testing.T) {
	ok, one, killed, crashed := ended(t, "exit 0"), ended(t, "exit 1"), ended(t, "kill -9 $$"), ended(t, "kill -SEGV $$")
	shutdown := func(reason string) []qmp.Event {
		return []qmp.Event{event("SHUTDOWN", `{"guest": true, "reason": "`+reason+`"}`)}
	}
	for _, c := range []struct {
		name   string
		ending ending
		want   Reason
		says   string
	}{
		{"power off", ending{state: ok, events: shutdown("guest-shutdown")}, GuestPoweroff, "the guest switched itself off"},
		{"kernel panic with panic=-1", ending{state: ok, events: shutdown("guest-reset")}, GuestReset, "the guest restarted itself, which mostly means that its kernel panicked"},
		{"panic told", ending{state: ok, events: append([]qmp.Event{event("GUEST_PANICKED", `{}`)}, shutdown("guest-reset")...)}, GuestPanic, "the guest's kernel panicked"},
		{"stopped", ending{state: ok, events: shutdown("host-qmp-quit"), stopping: true}, HostQuit, "the VM was stopped"},
		{"stopped by SIGTERM", ending{state: ok, events: shutdown("host-signal"), stopping: true}, HostQuit, "the VM was stopped"},
		{"stopped by SIGKILL", ending{state: killed, stopping: true}, HostQuit, "the VM was stopped"},
		{"SIGTERM from elsewhere", ending{state: ok, events: shutdown("host-signal")}, HostSignal, "QEMU was terminated by a signal"},
		{"SIGKILL from elsewhere", ending{state: killed}, Killed, "QEMU was killed by signal 9 (killed)"},
		{"crash", ending{state: crashed, stderr: []byte("x\nassertion failed\n")}, Killed, "QEMU was killed by signal 11 (segmentation fault): assertion failed"},
		{"memory file", ending{state: ended(t, "kill -BUS $$")}, MemoryLost, "the host could not read or write the file of the guest's memory: the disk of Warren's home ($WARREN_HOME, else ~/.local/share/warren) is full or fails; free some space there, or use another disk"},
		{"gave up", ending{state: one, stderr: []byte("warning\nqemu: \x1b[1mno such disk\x1b[0m\n")}, QEMUError, "QEMU ended with code 1: qemu: ?[1mno such disk?[0m"},
		{"no word", ending{state: one}, QEMUError, "QEMU ended with code 1"},
		{"monitor lost", ending{state: killed, killedFor: MonitorLost}, MonitorLost, "QEMU broke off its monitor connection and was killed"},
		{"no room on the host", ending{state: killed, killedFor: DiskFull}, DiskFull, "the host's disk is full and had no room for what the guest wrote; free some on the disk of Warren's home ($WARREN_HOME, else ~/.local/share/warren)"},
		{"powered off before it was stopped", ending{state: ok, events: shutdown("guest-shutdown"), stopping: true}, GuestPoweroff, "the guest switched itself off"},
		{"nonsense in the event", ending{state: ok, events: []qmp.Event{event("SHUTDOWN", `[1]`)}}, QEMUError, "QEMU ended with code 0"},
		{"unknown reason", ending{state: ok, events: shutdown("solar-flare")}, QEMUError, "QEMU ended with code 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			info := c.ending.info()
			if info.Reason != c.want || info.String() != c.says {
				t.Errorf("%s: %q, want %s: %q", info.Reason, info, c.want, c.says)
			}
		})
	}
	if info := (ending{state: killed}).info(); info.Signal != syscall.SIGKILL || info.Code != -1 {
		t.Errorf("%+v", info)
	}
	if info := (ending{state: one}).info(); info.Signal != 0 || info.Code != 1 {
		t.Errorf("%+v", info)
	}
}

func TestOnlyAFullDiskIsAFullDisk(t *testing.T) {
	for data, want := range map[string]bool{
		`{"device": "", "operation": "write", "action": "stop", "nospace": true, "reason": "No space left on device"}`: true,
		`{"operation": "write", "action": "report", "nospace": true}`:                                                  false,
		`{"operation": "read", "action": "stop", "nospace": false}`:                                                    false,
		`{"action": "stop"}`: false,
		`[1]`:                false,
	} {
		if got := isDiskFull(event("BLOCK_IO_ERROR", data)); got != want {
			t.Errorf("%s: %v", data, got)
		}
	}
}

func TestWhatQEMUSaidIsBoundedAndClean(t *testing.T) {
	info := ending{stderr: []byte(strings.Repeat("\x1b[31mboom\x07 ", 10_000))}.info()
	if len(info.Stderr) > maxStderr || strings.ContainsAny(info.Stderr, "\x1b\x07") {
		t.Errorf("%d bytes, begins %q", len(info.Stderr), info.Stderr[:40])
	}
	if len(info.String()) > 500 {
		t.Errorf("a sentence of %d bytes", len(info.String()))
	}
}
