package control

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
)

// EndWatch is a connection that tells when and why a VM ends.
type EndWatch struct {
	conn net.Conn
	done chan struct{}
	end  End
}

// WatchEnd connects to the supervisor in dir. When it returns without an
// error the supervisor answers.
func WatchEnd(ctx context.Context, dir string) (*EndWatch, error) {
	conn, err := Dial(ctx, dir)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	body, err := begin(conn)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	w := &EndWatch{conn: conn, done: make(chan struct{})}
	go w.wait(body)
	return w, nil
}

func begin(conn net.Conn) (io.ReadCloser, error) {
	if _, err := io.WriteString(conn, "GET "+WaitPath+" HTTP/1.1\r\nHost: supervisor\r\nConnection: close\r\n\r\n"); err != nil {
		return nil, err
	}
	resp, err := http.ReadResponse(bufio.NewReader(io.LimitReader(conn, MaxHeader+MaxFault)), nil)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		return nil, ReadFault(resp.Body)
	}
	return resp.Body, nil
}

func (w *EndWatch) wait(body io.ReadCloser) {
	defer close(w.done)
	defer w.conn.Close()
	end, err := guestapi.Decode[End](body, MaxFault)
	switch {
	case err == nil:
		w.end = end
	case errors.Is(err, net.ErrClosed):
		w.end.Reason = "this client was closed"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		w.end.Reason = "its supervisor died"
	default:
		w.end.Reason = fmt.Sprintf("its supervisor cannot be reached: %v", err)
	}
}

// Done is closed when the VM has ended, the supervisor died, or the watch was
// closed.
func (w *EndWatch) Done() <-chan struct{} { return w.done }

// End says why, once Done is closed.
func (w *EndWatch) End() End { return w.end }

// Close gives the watch up.
func (w *EndWatch) Close() {
	w.conn.Close()
	<-w.done
}
