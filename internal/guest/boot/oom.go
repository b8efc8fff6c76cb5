package boot

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// oomWatch tells which processes the kernel killed for want of memory. It
// looks only when asked about a process that ended by SIGKILL: the counter in
// /proc/vmstat says whether any was killed since, and the kernel's log which.
type oomWatch struct {
	mu     sync.Mutex
	log    int // /dev/kmsg, 0 before the first look
	kills  int64
	killed map[int]bool // not asked about yet

	count func() int64 // the kernel's count; replaced by tests
}

// oomLogWait is how long the log may lag behind the counter. The kernel
// counts a kill before it signals and logs it after.
const oomLogWait = 2 * time.Second

// maxRemembered bounds killed: background programs are never asked about.
const maxRemembered = 4096

// workingSet is how long memory that was used must be kept, in milliseconds;
// when it cannot be the kernel ends a program instead. Without it a guest that
// runs out of memory (it has no swap) evicts and reads anew the very pages its
// programs run from, and for minutes neither goes on nor kills anything.
// Measured: tail /dev/zero in 256 MiB was killed after 20 s with this, and not
// within 3 minutes without, on a busy host with TCG.
const workingSet = "1000"

// endThrashing turns on the multi-generational LRU, which alone knows a
// working set. A kernel built without it goes without.
func endThrashing() error {
	const lru = "/sys/kernel/mm/lru_gen"
	if _, err := os.Stat(lru); err != nil {
		return nil
	}
	if err := os.WriteFile(lru+"/enabled", []byte("y"), 0); err != nil {
		return err
	}
	return os.WriteFile(lru+"/min_ttl_ms", []byte(workingSet), 0)
}

// OOMKilled tells whether pid, which has ended, was killed for want of memory.
func (m *machine) OOMKilled(pid int) bool { return m.oom.killedPID(pid) }

func (w *oomWatch) killedPID(pid int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.log == 0 {
		fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return false
		}
		w.log, w.killed, w.count = fd, make(map[int]bool), oomKills
	}
	kills := w.count()
	for deadline := time.Now().Add(oomLogWait); ; time.Sleep(5 * time.Millisecond) {
		w.read()
		if w.killed[pid] {
			delete(w.killed, pid)
			return true
		}
		// Every kill that was counted has been read about, or the log
		// overflowed: then waiting would not help either.
		if w.kills >= kills || time.Now().After(deadline) {
			w.kills = max(w.kills, kills)
			return false
		}
	}
}

// read reads what is new in the log.
func (w *oomWatch) read() {
	var buf [8192]byte // no record is longer
	for {
		n, err := unix.Read(w.log, buf[:])
		if err == unix.EPIPE || err == unix.EINTR {
			continue // records were overwritten before they were read
		}
		if err != nil || n <= 0 {
			return
		}
		if pid, ok := parseOOM(buf[:n]); ok {
			if len(w.killed) >= maxRemembered {
				clear(w.killed)
			}
			w.killed[pid] = true
			w.kills++
		}
	}
}

// parseOOM reads a record of /dev/kmsg such as
// "3,712,8231,-;Out of memory: Killed process 71 (cat) total-vm:…". The number in
// front is level and facility; facility 0 is the kernel, which nothing else
// can write.
func parseOOM(record []byte) (pid int, ok bool) {
	head, text, ok := bytes.Cut(record, []byte(";"))
	if !ok {
		return 0, false
	}
	first, _, _ := bytes.Cut(head, []byte(","))
	priority, err := strconv.Atoi(string(first))
	if err != nil || priority>>3 != 0 {
		return 0, false
	}
	for _, start := range []string{"Out of memory: Killed process ", "Memory cgroup out of memory: Killed process "} {
		if rest, ok := strings.CutPrefix(string(text), start); ok {
			number, _, _ := strings.Cut(rest, " ")
			pid, err := strconv.Atoi(number)
			return pid, err == nil
		}
	}
	return 0, false
}

// oomKills is the kernel's count of kills since it started.
func oomKills() int64 {
	data, err := os.ReadFile("/proc/vmstat")
	if err != nil {
		return 0
	}
	return parseOOMKills(string(data))
}

func parseOOMKills(vmstat string) int64 {
	for line := range strings.Lines(vmstat) {
		if rest, ok := strings.CutPrefix(line, "oom_kill "); ok {
			n, _ := strconv.ParseInt(strings.TrimSpace(rest), 10, 64)
			return n
		}
	}
	return 0
}
