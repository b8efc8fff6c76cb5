package supervisor

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// Exec is a program that runs in the guest.
//
// Wait must be called: it is what delivers the output. The other methods may
// be called from any goroutine meanwhile.
type Exec struct {
	c              *Client
	ctx            context.Context
	id             string
	conn           net.Conn
	in             *bufio.Reader
	stdout, stderr io.Writer
	stdin          *stdin
	unhook         func() bool
}

// Exec starts a program. An empty req.ID is filled in. What the program
// writes goes to stdout and stderr, from within Wait; nil drops it. A guest
// that cannot start it is a *guestapi.Error.
//
// When ctx ends the stream ends and Wait returns its cause; the program runs
// on, without anyone who reads its output.
func (c *Client) Exec(ctx context.Context, req guestapi.ExecRequest, stdout, stderr io.Writer) (*Exec, error) {
	if req.ID == "" {
		req.ID = strings.ToLower(rand.Text())
	}
	body, err := json.Marshal(req)
	if err != nil {
		return nil, &CallError{ErrBadRequest, err.Error()}
	}
	conn, err := control.Dial(ctx, c.dir)
	if err != nil {
		return nil, c.lost(ctx, err)
	}
	unhook := context.AfterFunc(ctx, func() { conn.Close() })
	in, err := upgrade(conn, body)
	if err != nil {
		unhook()
		conn.Close()
		var fault *control.Fault
		if errors.As(err, &fault) {
			return nil, fromFault(fault)
		}
		return nil, c.lost(ctx, err)
	}
	e := &Exec{c: c, ctx: ctx, id: req.ID, conn: conn, in: in, stdout: stdout, stderr: stderr, unhook: unhook}
	if req.Stdin {
		e.stdin = &stdin{conn: conn}
	}
	return e, nil
}

// upgrade sends an exec request in one write and reads the answer.
func upgrade(conn net.Conn, body []byte) (*bufio.Reader, error) {
	var b bytes.Buffer
	b.Grow(len(body) + 200)
	fmt.Fprintf(&b, "POST %s HTTP/1.1\r\nHost: supervisor\r\nConnection: Upgrade\r\nUpgrade: %s\r\nContent-Length: %d\r\n\r\n",
		control.GuestPrefix+guestapi.ExecPath, guestapi.ExecUpgrade, len(body))
	b.Write(body)
	_, writeErr := conn.Write(b.Bytes())
	// A supervisor that refuses early answers before it has read all.
	in := bufio.NewReaderSize(conn, 16<<10)
	resp, err := http.ReadResponse(in, &http.Request{Method: http.MethodPost})
	if err != nil {
		return nil, errors.Join(writeErr, err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer resp.Body.Close()
		return nil, control.ReadFault(resp.Body)
	}
	return in, nil
}

// ID names the run for guestapi.Signal and guestapi.Resize.
func (e *Exec) ID() string { return e.id }

// Stdin takes the program's input, and Close ends it. It is nil when the
// request did not ask for it. Writes block while the program does not read,
// and fail once it has ended.
func (e *Exec) Stdin() io.WriteCloser {
	if e.stdin == nil {
		return nil
	}
	return e.stdin
}

// Signal sends a signal to the program's process group.
func (e *Exec) Signal(ctx context.Context, sig int) error {
	_, err := Do(ctx, e.c, guestapi.Signal, guestapi.SignalRequest{ID: e.id, Signal: sig})
	return err
}

// Resize sets the size of the program's terminal.
func (e *Exec) Resize(ctx context.Context, rows, cols uint16) error {
	_, err := Do(ctx, e.c, guestapi.Resize, guestapi.ResizeRequest{ID: e.id, Rows: rows, Cols: cols})
	return err
}

// Close ends the stream; the program runs on. After Wait it does nothing.
func (e *Exec) Close() error {
	e.unhook()
	return e.conn.Close()
}

// frames are the buffers of Wait and of Stdin, each with room for a header
// and a payload.
var frames = sync.Pool{New: func() any { return new([guestapi.FrameHeader + guestapi.MaxFrame]byte) }}

// Wait delivers the program's output until it has ended, and returns how. An
// error of one of the writers ends the stream and is returned. When the
// guest or the VM ends first the error says so, after all output that came.
func (e *Exec) Wait() (guestapi.ExitStatus, error) {
	defer e.Close()
	buf := frames.Get().(*[guestapi.FrameHeader + guestapi.MaxFrame]byte)
	defer frames.Put(buf)
	for {
		kind, payload, err := guestapi.ReadFrame(e.in, buf[:])
		if err != nil {
			return guestapi.ExitStatus{}, e.c.lost(e.ctx, err)
		}
		switch kind {
		case guestapi.FrameStdout:
			err = deliver(e.stdout, payload)
		case guestapi.FrameStderr:
			err = deliver(e.stderr, payload)
		case guestapi.FrameExit:
			return guestapi.Decode[guestapi.ExitStatus](bytes.NewReader(payload), guestapi.MaxFrame)
		case control.FrameFault:
			return guestapi.ExitStatus{}, fromFault(control.ReadFault(bytes.NewReader(payload)))
		default:
			err = &CallError{nil, fmt.Sprintf("the supervisor sent a frame of kind %#x", byte(kind))}
		}
		if err != nil {
			return guestapi.ExitStatus{}, err
		}
	}
}

func deliver(w io.Writer, p []byte) error {
	if w == nil {
		return nil
	}
	_, err := w.Write(p)
	return err
}

// stdin writes frames.
type stdin struct {
	conn net.Conn
	mu   sync.Mutex
	end  bool
}

// Write sends p, with one write to the socket for each frame.
func (s *stdin) Write(p []byte) (int, error) {
	n, err := s.ReadFrom(bytes.NewReader(p))
	return int(n), err
}

// ReadFrom spares io.Copy its own buffer and one copy of everything.
func (s *stdin) ReadFrom(r io.Reader) (int64, error) {
	buf := frames.Get().(*[guestapi.FrameHeader + guestapi.MaxFrame]byte)
	defer frames.Put(buf)
	var done int64
	for {
		n, err := r.Read(buf[guestapi.FrameHeader:])
		if n > 0 {
			guestapi.PutFrameHeader(buf[:], guestapi.FrameStdin, n)
			if err := s.write(buf[:guestapi.FrameHeader+n]); err != nil {
				return done, err
			}
			done += int64(n)
		}
		if err == io.EOF {
			return done, nil
		}
		if err != nil {
			return done, err
		}
	}
}

func (s *stdin) write(frame []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.end {
		return io.ErrClosedPipe
	}
	_, err := s.conn.Write(frame)
	return err
}

// Close tells the program that there is no more. Closing again does nothing.
func (s *stdin) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.end {
		return nil
	}
	s.end = true
	var frame [guestapi.FrameHeader]byte
	guestapi.PutFrameHeader(frame[:], guestapi.FrameStdinEnd, 0)
	_, err := s.conn.Write(frame[:])
	return err
}

// Run starts a program, gives it all of in (nil is an empty input) and
// returns when it has ended.
//
// Reading in is not waited for: a program may end without taking its input,
// and a read of a terminal cannot be called back. An input that cannot be
// read ends the program's input there, and the error is returned when the
// program has ended.
func (c *Client) Run(ctx context.Context, req guestapi.ExecRequest, in io.Reader, stdout, stderr io.Writer) (guestapi.ExitStatus, error) {
	req.Stdin = in != nil
	e, err := c.Exec(ctx, req, stdout, stderr)
	if err != nil {
		return guestapi.ExitStatus{}, err
	}
	failed := make(chan error, 1)
	if in != nil {
		go func() {
			in := &source{r: in}
			io.Copy(e.stdin, in) // writes fail when the program has ended
			if in.err != nil {
				failed <- in.err
			}
			e.stdin.Close()
		}()
	}
	status, err := e.Wait()
	select {
	case inErr := <-failed:
		if err == nil {
			err = fmt.Errorf("read the input: %w", inErr)
		}
	default:
	}
	return status, err
}

// source tells errors of reading from those of writing.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}
