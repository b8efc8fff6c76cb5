package boot

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// processorFiles makes a /sys/devices/system/cpu with these states. "" is a
// processor that cannot be stopped, which has no such file.
func processorFiles(t *testing.T, states ...string) (dir string, now func() string) {
	t.Helper()
	dir = t.TempDir()
	name := func(i int) string { return filepath.Join(dir, "cpu"+string(rune('0'+i)), "online") }
	for i, state := range states {
		if err := os.Mkdir(filepath.Dir(name(i)), 0o700); err != nil {
			t.Fatal(err)
		}
		if state == "" {
			continue
		}
		if err := os.WriteFile(name(i), []byte(state+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir, func() string {
		var all []string
		for i := range states {
			data, _ := os.ReadFile(name(i))
			all = append(all, strings.TrimSpace(string(data)))
		}
		return strings.Join(all, " ")
	}
}

func open(t *testing.T, dir string) *processors {
	t.Helper()
	p, err := newProcessors(dir)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestProcessorsAreStartedWhileTheirFolderMoves(t *testing.T) {
	dir, _ := processorFiles(t, "", "0", "0")
	p := open(t, dir)
	moved := dir + "-moved"
	if err := os.Rename(dir, moved); err != nil {
		t.Fatal(err)
	}
	p.bring()
	if err := p.wait(); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(filepath.Join(moved, "cpu2", "online")); err != nil || strings.TrimSpace(string(data)) != "1" {
		t.Errorf("%q, %v", data, err)
	}
}

func TestProcessorsThatTheKernelLeftAreStarted(t *testing.T) {
	dir, now := processorFiles(t, "", "0", "1", "0")
	p := open(t, dir)
	go p.bring()
	if err := p.wait(); err != nil {
		t.Fatal(err)
	}
	if got := now(); got != " 1 1 1" {
		t.Errorf("states %q", got)
	}
}

func TestProcessorThatCannotBeStartedIsAnError(t *testing.T) {
	dir, _ := processorFiles(t, "", "0")
	online := filepath.Join(dir, "cpu1", "online")
	if err := os.Remove(online); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(online, 0o700); err != nil {
		t.Fatal(err)
	}
	p := open(t, dir)
	p.bring()
	if err := p.wait(); err == nil || !strings.Contains(err.Error(), "cpu1") {
		t.Errorf("error %v", err)
	}
}
