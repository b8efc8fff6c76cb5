package server

import (
	"context"
	"encoding/json"
	"log"
	"net"
	"net/http"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/supervisor/control"
)

// api is the control socket and who is connected to it.
type api struct {
	http     *http.Server
	handlers sync.WaitGroup // http.Server forgets those that were hijacked
	served   chan struct{}
}

func (s *server) listen() (*api, error) {
	l, err := control.Listen(s.Dir.Path)
	if err != nil {
		return nil, err
	}
	a := &api{served: make(chan struct{})}
	mux := s.routes()
	a.http = &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			a.handlers.Add(1)
			defer a.handlers.Done()
			mux.ServeHTTP(w, r)
		}),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    control.MaxHeader,
		ErrorLog:          log.New(logWriter{s}, "", 0),
	}
	go func() {
		defer close(a.served)
		a.http.Serve(&boundedListener{Listener: l, free: make(chan struct{}, maxConns)})
	}()
	return a, nil
}

// close lets the handlers finish, which at the VM's end all do soon, and
// drops the clients that do not read.
func (a *api) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	a.http.Shutdown(ctx)
	a.http.Close()
	<-a.served
	a.handlers.Wait()
}

type logWriter struct{ s *server }

func (w logWriter) Write(p []byte) (int, error) {
	w.s.Log.Warn("control socket", "error", oneLine(string(p), 2000))
	return len(p), nil
}

// boundedListener holds at most cap(free) connections; more wait unaccepted.
type boundedListener struct {
	*control.Listener
	free chan struct{}
}

func (l *boundedListener) Accept() (net.Conn, error) {
	l.free <- struct{}{}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.free
		return nil, err
	}
	return &boundedConn{UnixConn: c.(*net.UnixConn), free: sync.OnceFunc(func() { <-l.free })}, nil
}

type boundedConn struct {
	*net.UnixConn
	free func()
}

func (c *boundedConn) Close() error {
	c.free()
	return c.UnixConn.Close()
}

func (s *server) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+control.StatusPath, s.serveStatus)
	mux.HandleFunc("GET "+control.WaitPath, s.serveWait)
	mux.HandleFunc("POST "+control.StopPath, s.serveStop)

	serve(s, mux, control.SnapshotPath, s.serveSnapshot)
	serve(s, mux, control.PausePath, s.servePause)
	serve(s, mux, control.ResumePath, s.serveResume)

	relay(s, mux, guestapi.Hello)
	relay(s, mux, guestapi.SetClock)
	relay(s, mux, guestapi.Signal)
	relay(s, mux, guestapi.Resize)
	relay(s, mux, guestapi.Stat)
	relay(s, mux, guestapi.Remove)
	relay(s, mux, guestapi.Figures)
	relay(s, mux, guestapi.SpawnTime)
	mux.HandleFunc("POST "+control.GuestPrefix+guestapi.List.Path, s.serveList)
	mux.HandleFunc("POST "+control.GuestPrefix+guestapi.ExecPath, s.serveExec)
	for _, t := range transfers {
		mux.HandleFunc("GET "+control.GuestPrefix+t.path, t.download(s))
		mux.HandleFunc("PUT "+control.GuestPrefix+t.path, t.upload(s))
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		control.WriteFault(w, control.Faultf(control.Bad, "this supervisor has no call %s %q", r.Method, oneLine(r.URL.Path, 200)))
	})
	return mux
}

func writeJSON(w http.ResponseWriter, v any) {
	data, err := json.Marshal(v)
	if err != nil {
		control.WriteFault(w, control.Faultf(control.Internal, "%v", err))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(data)
}

func (s *server) serveStatus(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, s.status())
}

func (s *server) status() control.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := control.Status{
		ID:            s.Config.ID,
		Label:         s.Config.Label,
		State:         s.state,
		Paused:        s.history.paused.Load(),
		Outlive:       s.Config.Outlive,
		SupervisorPID: os.Getpid(),
		Phases:        append([]control.Phase{}, s.phases...),
		Prepare:       s.prepare,
		Guest:         s.hello,
		Streams:       len(s.streams),
		HeapBytes:     heapBytes(),
		Goroutines:    runtime.NumGoroutine(),
		FDs:           openFDs(),
	}
	if s.machine != nil {
		st.QEMUPID = s.machine.PID()
	}
	return st
}

func heapBytes() int64 {
	// Not package runtime/metrics: its tables take a start 1 ms.
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func openFDs() int {
	d, err := os.Open("/proc/self/fd")
	if err != nil {
		return 0
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	return max(0, len(names)-1) // without d itself
}

// serveWait answers its header at once, so that the client knows it will be
// told, and the rest when there is something to tell.
func (s *server) serveWait(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	http.NewResponseController(w).Flush()
	select {
	case <-s.told:
		json.NewEncoder(w).Encode(s.end)
	case <-r.Context().Done():
	}
}

func (s *server) serveStop(w http.ResponseWriter, r *http.Request) {
	mode := control.StopMode(r.URL.Query().Get("mode"))
	switch mode {
	case control.StopAsk, control.StopNow:
	default:
		control.WriteFault(w, control.Faultf(control.Bad, "stop mode %q; use %s or %s", mode, control.StopAsk, control.StopNow))
		return
	}
	s.requestStop(mode, control.End{Reason: "it was stopped", Asked: true})
	w.WriteHeader(http.StatusAccepted)
	w.Write([]byte("{}"))
}
