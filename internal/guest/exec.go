package guest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"time"

	"github.com/warren-vm/warren/internal/guest/proc"
	"github.com/warren-vm/warren/internal/guestapi"
)

const switching = "HTTP/1.1 101 Switching Protocols\r\n" +
	"Connection: Upgrade\r\nUpgrade: " + guestapi.ExecUpgrade + "\r\n\r\n"

// exec answers an ExecRequest.
//
// The connection is taken over before the body is read: net/http would
// otherwise begin to read ahead in a goroutine of its own, only to be stopped
// again. So the answer, an error too, is written by hand.
func (a *Agent) exec(w http.ResponseWriter, r *http.Request) {
	if err := a.checkExec(r); err != nil {
		writeError(w, err)
		return
	}
	conn, rest, err := w.(http.Hijacker).Hijack()
	if err != nil {
		writeError(w, err)
		return
	}
	// net/http neither recovers nor closes what was taken over.
	a.safely(func() {
		defer conn.Close()
		body := make([]byte, r.ContentLength)
		if _, err := io.ReadFull(rest.Reader, body); err != nil {
			return
		}
		run, err := a.start(conn, body)
		if err != nil {
			writeRawError(conn, err)
			return
		}
		a.converse(run, rest.Reader)
	})
}

func (a *Agent) checkExec(r *http.Request) error {
	if err := a.ready(); err != nil {
		return err
	}
	switch {
	case !strings.EqualFold(r.Header.Get("Upgrade"), guestapi.ExecUpgrade):
		return refuse(guestapi.CodeBadRequest, "%s wants an upgrade to %s", guestapi.ExecPath, guestapi.ExecUpgrade)
	case r.ContentLength <= 0 || r.ContentLength > guestapi.MaxExecRequest:
		return refuse(guestapi.CodeBadRequest, "request of %s: length is not 1 to %d", guestapi.ExecPath, guestapi.MaxExecRequest)
	}
	return nil
}

func writeRawError(conn net.Conn, err error) {
	e := asError(err)
	body, _ := json.Marshal(e) // two strings
	fmt.Fprintf(conn, "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s",
		e.Code.HTTPStatus(), http.StatusText(e.Code.HTTPStatus()), len(body), body)
}

// decodeExec reads an ExecRequest.
func decodeExec(body []byte) (*guestapi.ExecRequest, error) {
	req, err := guestapi.Decode[guestapi.ExecRequest](bytes.NewReader(body), guestapi.MaxExecRequest)
	switch {
	case err != nil:
		return nil, refuse(guestapi.CodeBadRequest, "request of %s: %v", guestapi.ExecPath, err)
	case !validID(req.ID):
		return nil, refuse(guestapi.CodeBadRequest, "run id %q is not 1 to 64 of a-z, 0-9 and dash", req.ID)
	case req.TimeoutMS < 0 || req.TimeoutMS > maxTimeoutMS:
		return nil, refuse(guestapi.CodeBadRequest, "timeout of %d ms is not in 0 to %d", req.TimeoutMS, int64(maxTimeoutMS))
	}
	return &req, nil
}

// maxTimeoutMS is a hundred years: more would overflow a time.Duration.
const maxTimeoutMS = 100 * 365 * 24 * 3600 * 1000

func validID(id string) bool {
	for _, c := range []byte(id) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return len(id) >= 1 && len(id) <= 64
}

// start starts the program that body asks for.
func (a *Agent) start(conn net.Conn, body []byte) (*run, error) {
	req, err := decodeExec(body)
	if err != nil {
		return nil, err
	}
	command, err := a.opt.Accounts.Resolve(req)
	if err != nil {
		return nil, err
	}
	r := &run{id: req.ID, agent: a, req: req, conn: conn}
	fds := 2
	switch {
	case req.TTY:
		fds = 1
	case req.Stdin:
		fds = 3
	}
	if err := a.runs.enter(r, fds); err != nil {
		return nil, err
	}
	program, err := r.open(command.User)
	if err == nil {
		var p *proc.Process
		if p, err = a.launch(command, program.files[:], req.TTY); err == nil {
			a.runs.mu.Lock()
			r.process = p
			a.runs.mu.Unlock()
		}
		program.close()
	}
	if err != nil {
		r.closeOurs()
		a.runs.leave(r.id)
		a.runs.giveBack(fds)
		return nil, err
	}
	return r, nil
}

// converse sends the answer and the program's output until its end.
func (a *Agent) converse(r *run, rest *bufio.Reader) {
	stop := r.limit()
	defer stop()
	if _, err := io.WriteString(r.conn, switching); err != nil {
		r.gone = true // the program runs on
	}
	r.follow(r.out)
	r.follow(r.err)
	if r.in != nil {
		go a.safely(func() {
			if !r.req.Stdin {
				r.in.end()
				return
			}
			r.in.feed(withBuffered(rest, r.conn))
		})
	}
	<-r.process.Done()
	r.out.finish()
	if r.err != nil {
		r.err.finish()
	}
	// Before the Exit frame, so that the host may use the id again on seeing it.
	a.runs.leave(r.id)
	status := r.exit()
	frame := make([]byte, guestapi.FrameHeader, 128)
	frame = appendExit(frame, status)
	r.send(guestapi.FrameExit, frame, len(frame)-guestapi.FrameHeader)
	if r.in != nil {
		r.in.stop()
		if !r.in.isTerminal() {
			a.runs.giveBack(1)
		}
	}
}

func (r *run) follow(o *output) {
	if o != nil {
		go r.agent.safely(o.follow)
	}
}

// withBuffered reads what net/http read ahead, then the connection itself:
// its own buffer is small and would be copied through for ever.
func withBuffered(rest *bufio.Reader, conn net.Conn) io.Reader {
	n := rest.Buffered()
	if n == 0 {
		return conn
	}
	ahead, _ := rest.Peek(n) // they are there
	return io.MultiReader(bytes.NewReader(bytes.Clone(ahead)), conn)
}

func (a *Agent) signal(_ context.Context, req guestapi.SignalRequest) (guestapi.Empty, error) {
	if req.Signal < 1 || req.Signal > 64 {
		return guestapi.Empty{}, refuse(guestapi.CodeBadRequest, "signal %d is not 1 to 64", req.Signal)
	}
	r, err := a.runs.find(req.ID)
	if err != nil {
		return guestapi.Empty{}, err
	}
	return guestapi.Empty{}, r.signal(syscall.Signal(req.Signal))
}

func (a *Agent) resize(_ context.Context, req guestapi.ResizeRequest) (guestapi.Empty, error) {
	r, err := a.runs.find(req.ID)
	if err != nil {
		return guestapi.Empty{}, err
	}
	if r.tty == nil {
		return guestapi.Empty{}, refuse(guestapi.CodeBadRequest, "run %q has no terminal", req.ID)
	}
	return guestapi.Empty{}, r.tty.resize(req.Rows, req.Cols)
}

// spawnTime runs a program again and again without input or output.
func (a *Agent) spawnTime(ctx context.Context, req guestapi.SpawnTimeRequest) (info guestapi.SpawnTimeInfo, err error) {
	if req.Count < 1 || req.Count > 1000 {
		return info, refuse(guestapi.CodeBadRequest, "count %d is not 1 to 1000", req.Count)
	}
	if err := a.floors.acquire(ctx); err != nil {
		return info, err
	}
	defer a.floors.release()
	deadline := time.NewTimer(guestapi.SpawnTime.Deadline - 10*time.Second)
	defer deadline.Stop()
	null := a.null
	for range req.Count {
		begin := time.Now()
		command, err := a.opt.Accounts.Resolve(&guestapi.ExecRequest{Argv: req.Argv})
		if err != nil {
			return info, err
		}
		p, err := a.launch(command, []uintptr{null, null, null}, false)
		if err != nil {
			return info, err
		}
		select {
		case <-p.Done():
		case <-deadline.C:
			_ = a.opt.Reaper.SignalGroup(p, syscall.SIGKILL, nil)
			return info, refuse(guestapi.CodeBadRequest, "%s runs for too long to be measured", req.Argv[0])
		}
		info.Microseconds = append(info.Microseconds, time.Since(begin).Microseconds())
	}
	return info, nil
}

// programSide is what the program gets: three descriptors, some of which are
// closed once it has them.
type programSide struct {
	files [3]uintptr
	owned []int
}

func (p *programSide) close() {
	for _, fd := range p.owned {
		syscall.Close(fd)
	}
}

// closeOurs closes what open made, for a program that did not start.
func (r *run) closeOurs() {
	for _, o := range []*output{r.out, r.err} {
		if o != nil {
			o.file.Close()
		}
	}
	if r.in != nil && !r.in.isTerminal() {
		r.in.file.Close()
	}
}

func (in *input) isTerminal() bool { return in.tty != nil }
