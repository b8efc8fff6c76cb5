package boot

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestImageIDIsReadFromTheCommandLine(t *testing.T) {
	for line, want := range map[string]string{
		"console=ttyS0 warren.image=abc-1 quiet\n": "abc-1",
		"warren.image=":     "",
		"xwarren.image=abc": "",
		"":                  "",
	} {
		if got := parseImageID(line); got != want {
			t.Errorf("%q: got %q", line, got)
		}
	}
}

func TestOOMRecordsAreReadAndForgedOnesAreNot(t *testing.T) {
	for record, want := range map[string]int{
		"3,712,8231,-;Out of memory: Killed process 71 (cat) total-vm:1kB, anon-rss:2kB\n SUBSYSTEM=x\n":        71,
		"3,712,8231,-;Memory cgroup out of memory: Killed process 9 (a) b) Killed process 3 (x) total-vm:1kB\n": 9,
		"11,712,8231,-;Out of memory: Killed process 71 (cat)":                                                  0, // facility 1: a user wrote it
		"3,712,8231,-;oom_reaper: reaped process 71":                                                            0,
		"3,712,8231,-;Out of memory: Killed process x (cat)":                                                    0,
		"x;Out of memory: Killed process 71 (cat)":                                                              0,
		"": 0,
	} {
		pid, ok := parseOOM([]byte(record))
		if pid != want || ok != (want != 0) {
			t.Errorf("%q: got %d, %v", record, pid, ok)
		}
	}
	if n := parseOOMKills("pgfault 7\noom_kill 12\noom_kill_x 3\n"); n != 12 {
		t.Errorf("counted %d", n)
	}
}

// watchLog makes a watch whose log is a file that the test writes to.
func watchLog(t *testing.T, count *int64) (*oomWatch, func(string)) {
	t.Helper()
	path := t.TempDir() + "/kmsg"
	w, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	fd, err := unix.Open(path, unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	watch := &oomWatch{log: fd, killed: map[int]bool{}, count: func() int64 { return *count }}
	return watch, func(s string) {
		if _, err := w.WriteString(s); err != nil {
			t.Error(err)
		}
	}
}

func TestOOMIsToldOfTheKilledProcessAlone(t *testing.T) {
	var count int64
	watch, log := watchLog(t, &count)
	if watch.killedPID(5) {
		t.Error("told of a kill that never was")
	}
	count = 1
	log("3,1,1,-;Out of memory: Killed process 77 (x)\n")
	if watch.killedPID(5) {
		t.Error("told of another process")
	}
	if !watch.killedPID(77) {
		t.Error("not told of the killed process")
	}
	if watch.killedPID(77) {
		t.Error("told twice: the pid may be somebody else's by now")
	}
}

func TestOOMWaitsForALogThatLags(t *testing.T) {
	count := int64(1)
	watch, log := watchLog(t, &count)
	late := time.AfterFunc(100*time.Millisecond, func() { log("3,1,1,-;Out of memory: Killed process 77 (x)\n") })
	defer late.Stop()
	if !watch.killedPID(77) {
		t.Error("the record came late and was missed")
	}
}

func TestOOMDoesNotWaitAgainForALostRecord(t *testing.T) {
	count := int64(3) // none of them ever logged
	watch, _ := watchLog(t, &count)
	if watch.killedPID(1) || watch.kills != 3 {
		t.Errorf("known kills: %d", watch.kills)
	}
}

func TestModuleThatCannotBeLoadedIsNamed(t *testing.T) {
	if root, others, err := moduleOrder(t.TempDir()); root != nil || others != nil || err != nil {
		t.Errorf("without a list: %v, %v, %v", root, others, err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/order", []byte("a.ko\nsquashfs.ko\nabsent.ko\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	root, others, err := moduleOrder(dir)
	if err != nil || !slices.Equal(root, []string{"a.ko", "squashfs.ko"}) || !slices.Equal(others, []string{"absent.ko"}) {
		t.Errorf("%v, %v, %v", root, others, err)
	}
	if err := loadModules(dir, others); err == nil || !strings.Contains(err.Error(), "absent.ko") {
		t.Errorf("error %v", err)
	}
}

func TestConsoleLinesAreMarkedAndNeverBlock(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	con := &console{fd: int(w.Fd())}
	if err := unix.SetNonblock(con.fd, true); err != nil {
		t.Fatal(err)
	}
	con.line("one\ntwo\n")
	buf := make([]byte, 100)
	n, err := r.Read(buf)
	if err != nil || string(buf[:n]) != "warren: one\nwarren: two\n" {
		t.Errorf("%q, %v", buf[:n], err)
	}
	for range 1000 { // far more than the pipe holds, and nobody reads
		con.line(strings.Repeat("x", 1000))
	}
}

func TestFileThatIsWatchedIsReplacedWhole(t *testing.T) {
	path := t.TempDir() + "/generation"
	for _, text := range []string{"1\n", "22\n"} {
		if err := writeWhole(path, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if data, err := os.ReadFile(path); err != nil || string(data) != text {
			t.Errorf("%q, %v", data, err)
		}
	}
}

func FuzzParseOOM(f *testing.F) {
	f.Add([]byte("3,712,8231,-;Out of memory: Killed process 71 (cat)"))
	f.Fuzz(func(t *testing.T, record []byte) { parseOOM(record) })
}

func TestProgramsNeverGetTheWholeMemory(t *testing.T) {
	for total, want := range map[int64]int64{128 << 20: 112 << 20, 512 << 20: 448 << 20, 8 << 30: 8<<30 - 64<<20} {
		if got := programMemory(total); got != want {
			t.Errorf("of %d: %d, want %d", total, got, want)
		}
	}
}
