package server

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

const (
	// execStartWait bounds the guest's answer to an exec request. Starting
	// a program takes milliseconds, but a guest that is very busy may need
	// long; every execStartTick it has to show that it is still there.
	execStartWait = 5 * time.Minute
	execStartTick = 20 * time.Second
	// lastWordWait bounds the writing of a final frame to a client.
	lastWordWait = 2 * time.Second
	// stdinTick is how often a stdin that the guest does not take looks
	// whether its client is still there.
	stdinTick = time.Second
	// streamBuffer is what a conversation holds for each direction while
	// nothing moves.
	streamBuffer = 4 << 10
)

// frames are buffers for one frame each, header and payload in one piece so
// that it goes out in one write. A conversation has one only while a frame
// is on its way.
var frames = sync.Pool{New: func() any { return new([guestapi.FrameHeader + guestapi.MaxFrame]byte) }}

func (s *server) serveExec(w http.ResponseWriter, r *http.Request) {
	c, fault := s.startExec(r)
	if fault != nil {
		control.WriteFault(w, fault)
		return
	}
	defer s.streams.free()
	defer c.guest.Close()
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		control.WriteFault(w, control.Faultf(control.Internal, "%v", err))
		return
	}
	defer conn.Close()
	c.client, c.clientIn = conn, rw.Reader
	conn.SetDeadline(time.Time{})
	if _, err := io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+guestapi.ExecUpgrade+"\r\n\r\n"); err != nil {
		return
	}
	c.run()
}

// conversation is one exec between its client and the guest.
type conversation struct {
	s        *server
	g        *guest
	client   net.Conn
	clientIn *bufio.Reader
	guest    net.Conn
	guestIn  *bufio.Reader
	stdin    bool // the request announced stdin
}

// abandon closes a stream that someone may be reading or writing.
func abandon(stream net.Conn) {
	stream.SetDeadline(time.Unix(1, 0))
	stream.Close()
}

// run relays both directions until the program's exit has been told, the
// client hangs up, or either side breaks off.
func (c *conversation) run() {
	unhook := context.AfterFunc(c.s.life, func() {
		// What the guest said last still goes out, but nobody waits long
		// for a client that does not read.
		c.client.SetWriteDeadline(time.Now().Add(lastWordWait))
	})
	defer unhook()
	var stdinErr error
	stdin, finished := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(finished)
		stdinErr = c.relayStdin()
		close(stdin)
		abandon(c.guest) // ends relayOutput, if nothing has yet
	}()
	if err := c.relayOutput(); err != nil {
		if isDone(stdin) {
			err = stdinErr // the first cause
		}
		if err != errHungUp {
			c.lastWord(c.fault(err))
		}
	}
	abandon(c.guest)
	c.client.Close()
	<-finished
}

func (c *conversation) fault(err error) *control.Fault {
	var fault *control.Fault
	if errors.As(err, &fault) {
		return fault
	}
	return c.g.explain(context.Background(), err)
}

// relayOutput carries the guest's frames to the client. It returns nil after
// the exit frame.
func (c *conversation) relayOutput() error {
	for {
		if _, err := c.guestIn.Peek(1); err != nil { // no buffer is held while nothing comes
			return err
		}
		done, err := c.relayOutputFrame()
		if done || err != nil {
			return err
		}
	}
}

func (c *conversation) relayOutputFrame() (done bool, err error) {
	buf := frames.Get().(*[guestapi.FrameHeader + guestapi.MaxFrame]byte)
	defer frames.Put(buf)
	kind, payload, err := guestapi.ReadFrame(c.guestIn, buf[guestapi.FrameHeader:])
	if err != nil {
		return false, err
	}
	n := len(payload)
	switch kind {
	case guestapi.FrameStdout, guestapi.FrameStderr:
		if n == 0 {
			return false, nil
		}
	case guestapi.FrameExit:
		exit, err := readExit(payload)
		if err != nil {
			return false, err
		}
		n, done = copy(buf[guestapi.FrameHeader:], exit), true
	default:
		return false, control.Faultf(control.Broken, "the guest agent sent a frame of kind %#x, which is not for it to send", byte(kind))
	}
	guestapi.PutFrameHeader(buf[:], kind, n)
	_, err = c.client.Write(buf[:guestapi.FrameHeader+n])
	return done, err
}

// readExit decodes an exit status and writes it anew.
func readExit(payload []byte) ([]byte, error) {
	status, err := guestapi.Decode[guestapi.ExitStatus](bytes.NewReader(payload), streamBuffer)
	if err == nil && (status.Code < 0 || status.Code > 255 || status.Signal < 0 || status.Signal > 64) {
		err = fmt.Errorf("code %d, signal %d", status.Code, status.Signal)
	}
	if err != nil {
		return nil, control.Faultf(control.Broken, "the guest agent sent an exit status that is none: %s", oneLine(err.Error(), 200))
	}
	return json.Marshal(status)
}

// lastWord tells the client why there will be no exit frame.
func (c *conversation) lastWord(f *control.Fault) {
	payload, err := json.Marshal(f)
	if err != nil || len(payload) > guestapi.MaxFrame {
		return
	}
	frame := make([]byte, guestapi.FrameHeader, guestapi.FrameHeader+len(payload))
	guestapi.PutFrameHeader(frame, control.FrameFault, len(payload))
	c.client.SetWriteDeadline(time.Now().Add(lastWordWait))
	c.client.Write(append(frame, payload...))
}

// errHungUp says that the client is gone.
var errHungUp = errors.New("the client hung up")

// relayStdin carries the client's frames to the guest until the client hangs
// up or breaks the rules.
func (c *conversation) relayStdin() error {
	open := c.stdin
	for {
		if _, err := c.clientIn.Peek(1); err != nil {
			return errHungUp
		}
		end, err := c.relayStdinFrame(open)
		if err != nil {
			return err
		}
		if end {
			open = false
		}
	}
}

func (c *conversation) relayStdinFrame(open bool) (end bool, err error) {
	buf := frames.Get().(*[guestapi.FrameHeader + guestapi.MaxFrame]byte)
	defer frames.Put(buf)
	kind, payload, err := guestapi.ReadFrame(c.clientIn, buf[guestapi.FrameHeader:])
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return false, errHungUp
	case err != nil:
		return false, badRequest(err)
	case !open:
		return false, control.Faultf(control.Bad, "a frame after the end of stdin, or without an announced one")
	case kind == guestapi.FrameStdin:
	case kind == guestapi.FrameStdinEnd && len(payload) == 0:
		end = true
	default:
		return false, control.Faultf(control.Bad, "a frame of kind %#x, which is not for a client to send", byte(kind))
	}
	guestapi.PutFrameHeader(buf[:], kind, len(payload))
	return end, c.writeGuest(buf[:guestapi.FrameHeader+len(payload)])
}

// writeGuest writes a frame to a guest that may not take it for as long as
// its program does not read, and meanwhile looks after the client. A stream
// that takes no more at all swallows the frame: the program may have ended,
// and its output is still to come.
func (c *conversation) writeGuest(frame []byte) error {
	for len(frame) > 0 {
		c.guest.SetWriteDeadline(time.Now().Add(stdinTick))
		n, err := c.guest.Write(frame)
		frame = frame[n:]
		switch {
		case err == nil:
		case !isTimeout(err) && !errors.Is(err, os.ErrDeadlineExceeded):
			return nil
		case hungUp(c.client):
			return errHungUp
		}
	}
	return nil
}

// hungUp looks, past anything that is still to be read, whether the other end
// of a socket is closed.
func hungUp(conn net.Conn) bool {
	bounded, ok := conn.(*boundedConn)
	if !ok {
		return false
	}
	raw, err := bounded.SyscallConn()
	if err != nil {
		return true
	}
	gone := false
	err = raw.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(p, 0)
		gone = err == nil && n > 0 && p[0].Revents&(unix.POLLHUP|unix.POLLRDHUP|unix.POLLERR) != 0
	})
	return gone || err != nil
}
