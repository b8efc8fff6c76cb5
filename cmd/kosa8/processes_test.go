package main

import (
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/store"
)

// vmProcesses gives the pids of every supervisor and QEMU recorded in home.
func vmProcesses(t *testing.T, home store.Home) []int {
	t.Helper()
	var pids []int
	for _, name := range vmFolders(t, home) {
		r, err := store.ReadRecord(home.VMDir(name))
		if err != nil {
			t.Fatal(err)
		}
		for _, pid := range []int{r.Supervisor.PID, r.QEMU.PID} {
			if pid > 0 {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

func supervisorOf(t *testing.T, home store.Home) int {
	t.Helper()
	names := vmFolders(t, home)
	if len(names) != 1 {
		t.Fatalf("the VMs are %q, want one", names)
	}
	r, err := store.ReadRecord(home.VMDir(names[0]))
	if err != nil || r.Supervisor.PID <= 0 {
		t.Fatalf("the record is %+v, %v", r, err)
	}
	return r.Supervisor.PID
}

// wantGone waits until none of the processes runs any more.
func wantGone(t *testing.T, pids []int) {
	t.Helper()
	for _, pid := range pids {
		for end := time.Now().Add(patience); alive(pid); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Errorf("process %d still runs", pid)
				break
			}
		}
	}
}

// alive is false for a zombie too: whoever ought to reap it was killed by the
// test.
func alive(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	_, state, _ := strings.Cut(string(data), ") ")
	return !strings.HasPrefix(state, "Z")
}
