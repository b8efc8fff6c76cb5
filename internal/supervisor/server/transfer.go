package server

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// transfer is a pair of calls that carry a body of any length.
type transfer struct {
	path string
	get  []string // the parameters of a download
	put  []string // and of an upload
}

var transfers = []transfer{
	{guestapi.FilePath, []string{"path", "offset", "limit"}, []string{"path", "mode", "user"}},
	{guestapi.TarPath, []string{"path"}, []string{"path", "user"}},
}

const (
	// stallWait is how long a guest may move nothing in a transfer.
	stallWait = 30 * time.Second
	// finishWait is how long it may take from the end of an upload to its
	// answer: it syncs what it got.
	finishWait = 2 * time.Minute
	// maxParameter bounds one parameter of a transfer.
	maxParameter = 8 << 10
)

var chunks = sync.Pool{New: func() any { return new([32 << 10]byte) }}

// query takes the known parameters over and refuses any other.
func query(r *http.Request, known []string) (string, *control.Fault) {
	in, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return "", badRequest(err)
	}
	out := make(url.Values)
	for _, name := range known {
		if v, ok := in[name]; ok && len(v) == 1 && len(v[0]) <= maxParameter {
			out[name] = v
			delete(in, name)
		}
	}
	if len(in) != 0 || out.Get("path") == "" {
		return "", control.Faultf(control.Bad, "a transfer has a path and, once each, some of: %s", strings.Join(known[1:], ", "))
	}
	return out.Encode(), nil
}

// begin does what both directions start with. On success the caller calls
// done when the transfer is over.
func (t transfer) begin(s *server, r *http.Request, known []string) (g *guest, out *http.Request, w *watch, done func(), fault *control.Fault) {
	g, fault = s.ready()
	if fault != nil {
		return
	}
	params, fault := query(r, known)
	if fault != nil {
		return
	}
	if fault = s.streams.try(); fault != nil {
		return
	}
	ctx, cancel := s.withLife(r.Context())
	ctx, silent := context.WithCancelCause(ctx)
	w = newWatch(func() { silent(errSilent) })
	done = func() { w.stop(); silent(nil); cancel(); s.streams.free() }
	out, err := http.NewRequestWithContext(ctx, r.Method, "http://guest"+t.path+"?"+params, nil)
	if err != nil {
		done()
		fault = badRequest(err)
	}
	return
}

func (t transfer) download(s *server) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		g, out, watch, done, fault := t.begin(s, r, t.get)
		if fault != nil {
			control.WriteFault(w, fault)
			return
		}
		defer done()
		watch.guest(s.wait(stallWait))
		resp, err := g.transfers.RoundTrip(out)
		if err != nil {
			control.WriteFault(w, g.explain(out.Context(), err))
			return
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			control.WriteFault(w, g.refusal(out.Context(), resp))
			return
		}
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Trailer", guestapi.ErrorTrailer)
		w.WriteHeader(http.StatusOK)
		if fault := g.copyDown(out.Context(), w, resp, watch, s.wait(stallWait)); fault != nil {
			line, _ := json.Marshal(fault)
			w.Header().Set(guestapi.ErrorTrailer, string(line))
		}
	}
}

// copyDown copies a body from the guest to a client. Only the guest's time is
// counted.
func (g *guest) copyDown(ctx context.Context, w io.Writer, resp *http.Response, watch *watch, limit time.Duration) *control.Fault {
	buf := chunks.Get().(*[32 << 10]byte)
	defer chunks.Put(buf)
	for {
		watch.guest(limit)
		n, err := resp.Body.Read(buf[:])
		watch.client()
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				return control.Faultf(control.Gone, "the client hung up")
			}
		}
		if err == io.EOF {
			return trailerFault(resp)
		}
		if err != nil {
			return g.explain(ctx, err)
		}
	}
}

// trailerFault is what the guest reports after a body.
func trailerFault(resp *http.Response) *control.Fault {
	line := resp.Trailer.Get(guestapi.ErrorTrailer)
	if line == "" {
		return nil
	}
	e, err := guestapi.Decode[guestapi.Error](strings.NewReader(line), 64<<10)
	if err != nil {
		return control.Faultf(control.Broken, "the guest agent reports an error that cannot be read: %s", oneLine(err.Error(), 200))
	}
	return refused(e)
}

func (t transfer) upload(s *server) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		g, out, watch, done, fault := t.begin(s, r, t.put)
		if fault != nil {
			control.WriteFault(w, fault)
			return
		}
		defer done()
		body := &uploadBody{client: r.Body, watch: watch, stall: s.wait(stallWait), finish: s.wait(finishWait)}
		out.Body, out.ContentLength = body, r.ContentLength
		watch.guest(s.wait(stallWait))
		resp, err := g.transfers.RoundTrip(out)
		if err != nil {
			if cause := body.failed(); cause != nil {
				err = badRequest(cause)
			}
			control.WriteFault(w, g.explain(out.Context(), err))
			return
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusNoContent {
			control.WriteFault(w, g.refusal(out.Context(), resp))
			return
		}
		writeJSON(w, guestapi.Empty{})
	}
}

// uploadBody reads from the client for the transport: between two reads it is
// the guest that takes its time, within one it is the client.
type uploadBody struct {
	client        io.Reader
	watch         *watch
	stall, finish time.Duration

	mu  sync.Mutex
	err error // the client's
}

func (b *uploadBody) Read(p []byte) (int, error) {
	b.watch.client()
	n, err := b.client.Read(p)
	switch {
	case err == nil:
		b.watch.guest(b.stall)
	case errors.Is(err, io.EOF):
		b.watch.guest(b.finish)
	default:
		b.mu.Lock()
		b.err = err
		b.mu.Unlock()
	}
	return n, err
}

// Close leaves the client's body to its server.
func (b *uploadBody) Close() error { return nil }

func (b *uploadBody) failed() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

// watch counts the time that the guest alone takes.
type watch struct {
	mu    sync.Mutex
	timer *time.Timer
	over  bool
}

func newWatch(late func()) *watch {
	w := &watch{timer: time.AfterFunc(time.Hour, late)}
	w.timer.Stop()
	return w
}

// guest starts the count: from now on the guest has d.
func (w *watch) guest(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.over {
		w.timer.Reset(d)
	}
}

// client stops the count: it is the client's turn.
func (w *watch) client() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.timer.Stop()
}

// stop ends the watch; a late read of the transport does not start it again.
func (w *watch) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
	w.timer.Stop()
}
