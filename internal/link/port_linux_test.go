package link

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestOpenGuestPortRefusesWhatCannotBeAPort(t *testing.T) {
	file := t.TempDir() + "/file"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenGuestPort(file); err == nil || !strings.Contains(err.Error(), "cannot be polled") {
		t.Errorf("a file: %v", err)
	}
	if _, err := OpenGuestPort(file + "-not"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("nothing: %v", err)
	}
}

// TestAGuestPortWaitsAndIsInterrupted uses a FIFO, which polls like a port
// with a host. The virtio port itself is tested in a VM.
func TestAGuestPortWaitsAndIsInterrupted(t *testing.T) {
	noLeaks(t)
	fifo := t.TempDir() + "/fifo"
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := OpenGuestPort(fifo)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	p.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	if _, err := p.Read(make([]byte, 9)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Read without data: %v", err)
	}
	p.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
	n, err := p.Write(make([]byte, 1<<20))
	if !errors.Is(err, os.ErrDeadlineExceeded) || n == 0 {
		t.Errorf("Write without a reader: %d, %v", n, err)
	}
	p.SetReadDeadline(time.Time{})
	for got := 0; got < n; {
		m, err := p.Read(make([]byte, 9000))
		if err != nil {
			t.Fatal(err)
		}
		got += m
	}
	done := make(chan error, 1)
	go func() { _, err := p.Read(make([]byte, 1)); done <- err }()
	time.Sleep(10 * time.Millisecond)
	p.Close()
	if err := <-done; !errors.Is(err, os.ErrClosed) {
		t.Errorf("Read after Close: %v", err)
	}
}
