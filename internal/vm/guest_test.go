package vm

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

func TestAGuestThatSwitchesItselfOffIsToldFromOneThatRestarts(t *testing.T) {
	for _, c := range []struct {
		name string
		then []byte
		want Reason
	}{{"power off", powerOff, GuestPoweroff}, {"restart", reset, GuestReset}} {
		t.Run(c.name, func(t *testing.T) {
			var console buffer
			v := start(t, guest(t, "hello from the guest\r\n", c.then), Options{Console: &console})
			boot(t, v)
			info := waitExit(t, v)
			if info.Reason != c.want || info.Code != 0 {
				t.Errorf("%+v", info)
			}
			if console.String() != "hello from the guest\r\n" {
				t.Errorf("console: %q", console.String())
			}
		})
	}
}

func TestAConsoleFloodFillsNeitherDiskNorTheWayOut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "console.log")
	const max = 64 << 10
	log, err := BoundedLog(path, max)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	var seen buffer
	v := start(t, guest(t, strings.Repeat("flood ", 60), again), Options{Console: io.MultiWriter(log, &seen)})
	boot(t, v)
	for end := time.Now().Add(patience); seen.len() < 4*max; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the console stands still after %d bytes", seen.len())
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Size() > max {
		t.Errorf("log: %v, %v", info, err)
	}
	// The monitor answers, and the VM can be stopped, in the middle of it.
	if err := v.QMP().Do(t.Context(), "query-status", nil, nil); err != nil {
		t.Error(err)
	}
	stop(t, v)
}

func TestTheMemoryFileIsPrivateSparseAndNeverWritten(t *testing.T) {
	s := guest(t, "up\r\n", halt)
	s.Memory = filepath.Join(t.TempDir(), "memory")
	var console buffer
	v := start(t, s, Options{Console: &console})
	boot(t, v)
	for end := time.Now().Add(patience); console.String() != "up\r\n"; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the guest does not come up")
		}
	}
	stop(t, v)
	info, err := os.Stat(s.Memory)
	if err != nil || info.Mode().Perm() != 0o600 || info.Size() != 64<<20 {
		t.Fatalf("%v, %v", info, err)
	}
	if blocks := info.Sys().(*syscall.Stat_t).Blocks; blocks*512 > 1<<20 {
		t.Errorf("%d bytes on disk", blocks*512)
	}
	f, err := os.Open(s.Memory)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	page := make([]byte, 512)
	if _, err := f.ReadAt(page, 0x7c00); err != nil || !bytes.Equal(page, make([]byte, 512)) {
		t.Error("what the guest has in its memory is in the file")
	}
	// The same file serves the next VM.
	stop(t, start(t, s, Options{}))
}

// A guest of one boot sector, written here so that no test needs an image.
var (
	// say writes the zero-terminated text at 0x7c40 to the serial port.
	say = []byte{
		0x31, 0xc0, 0x8e, 0xd8, // xor ax,ax; mov ds,ax
		0xba, 0xf8, 0x03, //       mov dx,0x3f8
		0xbe, 0x40, 0x7c, //       mov si,0x7c40
		0xac, 0x84, 0xc0, //       next: lodsb; test al,al
		0x74, 0x03, //             jz done
		0xee, 0xeb, 0xf8, //       out dx,al; jmp next
	} // done:
	powerOff = []byte{0xba, 0x04, 0x06, 0xb8, 0x00, 0x20, 0xef, 0xf4} // mov dx,0x604; mov ax,0x2000; out dx,ax; hlt
	reset    = []byte{0xb0, 0xfe, 0xe6, 0x64, 0xf4}                   // mov al,0xfe; out 0x64,al; hlt
	again    = []byte{0xeb, 0xec}                                     // jmp to the beginning
	halt     = []byte{0xf4, 0xeb, 0xfd}                               // hlt; jmp to it
)

// guest is a VM that says text on its console and then does what then does.
// It is paused: boot lets it run.
func guest(t *testing.T, text string, then []byte) Spec {
	t.Helper()
	sector := make([]byte, 1<<20) // the firmware does not start a disk without a whole cylinder
	copy(sector, append(append([]byte{}, say...), then...))
	copy(sector[0x40:0x1fe], text)
	sector[510], sector[511] = 0x55, 0xaa
	s := paused
	s.RootDisk = writeFile(t, "boot.img", sector)
	return s
}

func boot(t *testing.T, v *VM) {
	t.Helper()
	if err := v.QMP().Do(t.Context(), "cont", nil, nil); err != nil {
		t.Fatal(err)
	}
}

// buffer is a console that can be looked at while it is written to.
type buffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
	n   int
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.n += len(p)
	if b.buf.Len() < 1<<20 {
		b.buf.Write(p)
	}
	return len(p), nil
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func (b *buffer) len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.n
}
