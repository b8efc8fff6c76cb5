package initramfs

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// unpack reads archives as the kernel does: one after the other, with zeros
// between them, later entries over earlier ones. It returns "mode content" by
// name, and all names in order.
func unpack(t *testing.T, data []byte) (map[string]string, []string) {
	t.Helper()
	entries := map[string]string{}
	var names []string
	for at := 0; at < len(data); {
		if data[at] == 0 {
			at++
			continue
		}
		if at%4 != 0 {
			t.Fatalf("an entry begins at %d", at)
		}
		head := string(data[at : at+110])
		field := func(i int) int {
			n, err := strconv.ParseUint(head[6+8*i:14+8*i], 16, 32)
			if err != nil || head[:6] != "070701" {
				t.Fatalf("header %q at %d", head, at)
			}
			return int(n)
		}
		mode, size, nameSize := field(1), field(6), field(11)
		if field(2) != 0 || field(3) != 0 || field(5) != 0 {
			t.Errorf("owner or time of the entry at %d", at)
		}
		name := string(data[at+110 : at+110+nameSize-1])
		at = (at + 110 + nameSize + 3) &^ 3
		content := string(data[at : at+size])
		at = (at + size + 3) &^ 3
		if name == "TRAILER!!!" {
			continue
		}
		if mode&0o170000 == typeChar {
			content = fmt.Sprintf("%d:%d", field(9), field(10))
		}
		entries[name] = fmt.Sprintf("%o %s", mode, content)
		names = append(names, name)
	}
	return entries, names
}

func TestTheKernelCanReadTheInitramfs(t *testing.T) {
	var b bytes.Buffer
	size, err := Write(&b, nil, []byte("agent"))
	if err != nil {
		t.Fatal(err)
	}
	entries, names := unpack(t, b.Bytes())
	for name, want := range map[string]string{
		"init": "100755 agent", "dev/console": "20600 5:1", "modules/order": "100644 ", "tmp": "41777 ", "proc": "40555 ",
	} {
		if entries[name] != want {
			t.Errorf("%s is %q, want %q", name, entries[name], want)
		}
	}
	if names[len(names)-1] != "init" || size%512 != 0 || int64(b.Len()) <= size {
		t.Errorf("the agent is not in an archive of its own: %v, %d", names, size)
	}
	// A second opinion where there is one.
	if path, err := exec.LookPath("cpio"); err == nil {
		cmd := exec.Command(path, "-t")
		cmd.Stdin = bytes.NewReader(b.Bytes()[:size])
		if out, err := cmd.Output(); err != nil || !strings.Contains(string(out), "modules/order\n") {
			t.Errorf("cpio: %v %s", err, out)
		}
	}
}

func TestReplacePutsAnotherAgentBehindTheSameModules(t *testing.T) {
	var old, fresh, direct bytes.Buffer
	size, err := Write(&old, nil, []byte("one"))
	if err != nil {
		t.Fatal(err)
	}
	if err := Replace(&fresh, bytes.NewReader(old.Bytes()), size, []byte("another")); err != nil {
		t.Fatal(err)
	}
	if _, err := Write(&direct, nil, []byte("another")); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(fresh.Bytes(), direct.Bytes()) {
		t.Error("a replaced agent gives other bytes than a new build")
	}
	if err := Replace(&fresh, strings.NewReader("short"), size, nil); err == nil || !strings.Contains(err.Error(), "copy the modules of the initramfs") {
		t.Errorf("a short initramfs: %v", err)
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errors.New("disk on fire") }

func TestArchiveKeepsItsFirstError(t *testing.T) {
	a := NewArchive(failing{})
	if err := a.Dir("dev", 0o755); err == nil || err.Error() != "disk on fire" {
		t.Errorf("got %v", err)
	}
	if err := a.Close(); err == nil || err.Error() != "disk on fire" {
		t.Errorf("got %v", err)
	}
	if err := NewArchive(&bytes.Buffer{}).File("/init", 0o755, nil); err == nil {
		t.Error("an absolute name was taken")
	}
}
