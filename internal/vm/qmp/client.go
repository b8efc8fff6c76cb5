package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
)

// ErrClosed is what commands get once the connection has ended, by Close or
// by QEMU; the error says which.
var ErrClosed = errors.New("monitor connection closed")

// ErrGone is part of the error when it was QEMU that closed the connection,
// as it does when it ends.
var ErrGone = errors.New("QEMU closed it")

// DefaultDeadline is how long a command may take whose context has no
// deadline of its own.
const DefaultDeadline = 30 * time.Second

// Client is a connection to one QEMU. All methods may be called from any
// goroutine.
type Client struct {
	conn    *net.UnixConn
	version Version
	// writer is held while a command is written; by a command with files
	// until it is answered, because QEMU forgets descriptors that it has not
	// used when the next message brings others.
	writer chan struct{}
	done   chan struct{}

	mu      sync.Mutex
	err     error // why it ended; set before done is closed
	lastID  uint64
	waiting map[uint64]chan message
	subs    map[*Subscription]struct{}
}

// New takes over conn, waits for QEMU's greeting until ctx ends and makes the
// connection ready for commands. On an error conn is closed.
func New(ctx context.Context, conn *net.UnixConn) (*Client, error) {
	c := &Client{
		conn:    conn,
		writer:  make(chan struct{}, 1),
		done:    make(chan struct{}),
		waiting: map[uint64]chan message{},
		subs:    map[*Subscription]struct{}{},
	}
	greeted := make(chan Version, 1)
	go c.read(greeted)
	select {
	case c.version = <-greeted:
	case <-c.done:
		return nil, fmt.Errorf("no greeting from QEMU: %w", c.Err())
	case <-ctx.Done():
		c.Close()
		return nil, fmt.Errorf("no greeting from QEMU: %w", ctx.Err())
	}
	if err := c.Do(ctx, "qmp_capabilities", nil, nil); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// Version is what QEMU said in its greeting.
func (c *Client) Version() Version { return c.version }

// Done is closed when the connection has ended; Err then says why.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err is nil while the connection stands.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the connection and returns when nothing of it is left. It may be
// called any number of times.
func (c *Client) Close() {
	c.fail(ErrClosed)
	<-c.done
}

// Do runs a command. args is marshalled as its arguments (nil: none) and the
// answer unmarshalled into result (nil: dropped); unknown fields of the answer
// are ignored, as newer QEMUs add some.
//
// A refusal is an *Error. When ctx (or DefaultDeadline) ends first the command
// may still be carried out; its answer is dropped. After the connection has
// ended the error wraps ErrClosed.
func (c *Client) Do(ctx context.Context, command string, args, result any) error {
	return c.DoWithFiles(ctx, command, args, result)
}

// DoWithFiles is Do for commands that take descriptors, such as getfd and
// add-fd. The files stay the caller's and may be closed when it returns.
func (c *Client) DoWithFiles(ctx context.Context, command string, args, result any, files ...*os.File) error {
	ctx, cancel := withDefault(ctx)
	defer cancel()
	answer, err := c.roundTrip(ctx, command, args, files)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", command, err)
	case answer.err != nil:
		return fmt.Errorf("%s: %w", command, answer.err)
	case result == nil:
		return nil
	}
	if err := json.Unmarshal(answer.ret, result); err != nil {
		return fmt.Errorf("%s: answer of QEMU: %s", command, guestapi.CleanLineTail([]byte(err.Error()), maxText))
	}
	return nil
}

func withDefault(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, DefaultDeadline)
}

func (c *Client) roundTrip(ctx context.Context, command string, args any, files []*os.File) (message, error) {
	select {
	case c.writer <- struct{}{}:
	case <-c.done:
		return message{}, c.Err()
	case <-ctx.Done():
		return message{}, ctx.Err()
	}
	id, answer, err := c.expect()
	if err == nil {
		err = c.send(ctx, command, args, id, files)
	}
	if len(files) == 0 {
		<-c.writer
	} else {
		defer func() { <-c.writer }()
	}
	if err != nil {
		c.forget(id)
		return message{}, err
	}
	select {
	case m, ok := <-answer:
		if !ok {
			return message{}, c.Err()
		}
		return m, nil
	case <-ctx.Done():
		c.forget(id)
		return message{}, ctx.Err()
	}
}

// expect registers the next command.
func (c *Client) expect() (uint64, chan message, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, nil, c.err
	}
	c.lastID++
	answer := make(chan message, 1)
	c.waiting[c.lastID] = answer
	return c.lastID, answer, nil
}

func (c *Client) forget(id uint64) {
	c.mu.Lock()
	delete(c.waiting, id)
	c.mu.Unlock()
}

// send writes one command. A command written in part leaves the stream
// useless, so any fault here ends the connection.
func (c *Client) send(ctx context.Context, command string, args any, id uint64, files []*os.File) error {
	line, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        uint64 `json:"id"`
	}{command, args, id})
	if err != nil {
		return err
	}
	line = append(line, '\n')
	deadline, _ := ctx.Deadline()
	if err := c.conn.SetWriteDeadline(deadline); err != nil {
		return c.fail(err)
	}
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		n, _, err := c.conn.WriteMsgUnix(line, syscall.UnixRights(fds...), nil)
		runtime.KeepAlive(files) // a finalizer must not close them before they are sent
		if err != nil {
			return c.fail(err)
		}
		line = line[n:]
	}
	if len(line) > 0 {
		if _, err := c.conn.Write(line); err != nil {
			return c.fail(err)
		}
	}
	return nil
}

// fail ends the connection for the given reason, unless it has ended before,
// and returns the reason that counts.
func (c *Client) fail(why error) error {
	if !errors.Is(why, ErrClosed) {
		why = fmt.Errorf("%w: %w", ErrClosed, why)
	}
	c.mu.Lock()
	if c.err == nil {
		c.err = why
	}
	why = c.err
	c.mu.Unlock()
	c.conn.Close() // ends read
	return why
}

// read hands out everything QEMU says until the connection ends.
func (c *Client) read(greeted chan<- Version) {
	r := bufio.NewReaderSize(c.conn, 16<<10)
	why := c.readAll(r, greeted)
	switch {
	// A socket whose other end is closed with bytes unread says "reset".
	case errors.Is(why, io.EOF), errors.Is(why, syscall.ECONNRESET):
		why = ErrGone
	}
	c.fail(why)
	c.mu.Lock()
	for id, answer := range c.waiting {
		close(answer)
		delete(c.waiting, id)
	}
	for s := range c.subs {
		close(s.events)
		delete(c.subs, s)
	}
	c.mu.Unlock()
	close(c.done)
}

func (c *Client) readAll(r *bufio.Reader, greeted chan<- Version) error {
	isGreeted := false
	for {
		line, err := readLine(r)
		if err != nil {
			return err
		}
		if len(line) == 0 {
			continue
		}
		m, err := decode(line)
		if err != nil {
			return errors.New(guestapi.CleanLineTail([]byte(err.Error()), maxText))
		}
		switch {
		case m.greeting != nil:
			if isGreeted {
				return errors.New("a second greeting")
			}
			isGreeted = true
			greeted <- *m.greeting
		case !isGreeted:
			return errors.New("not a QMP greeting")
		case m.event != nil:
			c.publish(*m.event)
		case !m.hasID:
			return fmt.Errorf("QEMU cannot read it: %w", m.err)
		default:
			c.deliver(m)
		}
	}
}

// deliver hands an answer to who waits for it. Answers to commands given up,
// and to none that were ever sent, are dropped.
func (c *Client) deliver(m message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if answer, ok := c.waiting[m.id]; ok {
		delete(c.waiting, m.id)
		answer <- m
	}
}
