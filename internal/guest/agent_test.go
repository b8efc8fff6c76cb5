package guest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/warren-vm/warren/internal/guestapi"
)

func identity() guestapi.PrepareRequest {
	return guestapi.PrepareRequest{Hostname: "box-1", MachineID: strings.Repeat("0a", 16), Generation: 5,
		Entropy: make([]byte, 32), UnixNano: 1}
}

func TestHelloNeedsNoPreparation(t *testing.T) {
	h := idle(t)
	info, err := do(h, guestapi.Hello, guestapi.Empty{})
	if err != nil || info.Protocol != guestapi.Protocol || info.ImageID != "image-1" || info.Prepared || info.Kernel == "" || info.UptimeMS <= 0 {
		t.Errorf("%+v, %v", info, err)
	}
}

func TestNothingRunsBeforePrepare(t *testing.T) {
	h := idle(t)
	_, execErr := h.exec(guestapi.ExecRequest{Argv: []string{"true"}})
	_, statErr := do(h, guestapi.Stat, guestapi.StatRequest{Path: "/"})
	_, spawnErr := do(h, guestapi.SpawnTime, guestapi.SpawnTimeRequest{Argv: []string{"true"}, Count: 1})
	_, fileErr := h.transfer("GET", guestapi.FilePath, url.Values{"path": {"/etc/passwd"}}, nil)
	for _, err := range []error{execErr, statErr, spawnErr, fileErr} {
		if code(err) != guestapi.CodeNotPrepared {
			t.Errorf("error %v", err)
		}
	}
	_, err := do(h, guestapi.Prepare, identity())
	ok(t, err)
	if r := h.start(guestapi.ExecRequest{Argv: []string{"true"}}).finish(); r.Code != 0 {
		t.Errorf("after it: %+v", r.ExitStatus)
	}
	if _, err := do(h, guestapi.Prepare, identity()); code(err) != guestapi.CodeConflict || h.system.prepares.Load() != 1 {
		t.Errorf("twice: error %v", err)
	}
}

func TestGuestThatCouldNotBePreparedRunsNothing(t *testing.T) {
	h := idle(t)
	h.system.prepareErr = errors.New("prepare, reseed: no such device")
	if _, err := do(h, guestapi.Prepare, identity()); code(err) != guestapi.CodeInternal || !strings.Contains(err.Error(), "reseed") {
		t.Errorf("error %v", err)
	}
	h.system.prepareErr = nil
	if _, err := do(h, guestapi.Prepare, identity()); code(err) != guestapi.CodeNotPrepared {
		t.Errorf("again: error %v", err)
	}
	if _, err := h.exec(guestapi.ExecRequest{Argv: []string{"true"}}); code(err) != guestapi.CodeNotPrepared {
		t.Errorf("run: error %v", err)
	}
}

func TestBadIdentityIsRefusedAndMayBeCorrected(t *testing.T) {
	h := idle(t)
	for name, change := range map[string]func(*guestapi.PrepareRequest){
		"no hostname":     func(r *guestapi.PrepareRequest) { r.Hostname = "" },
		"hostname":        func(r *guestapi.PrepareRequest) { r.Hostname = "a b" },
		"hostname dash":   func(r *guestapi.PrepareRequest) { r.Hostname = "-a" },
		"long hostname":   func(r *guestapi.PrepareRequest) { r.Hostname = strings.Repeat("a", 64) },
		"machine id":      func(r *guestapi.PrepareRequest) { r.MachineID = strings.Repeat("G", 32) },
		"short machine":   func(r *guestapi.PrepareRequest) { r.MachineID = "ab" },
		"little entropy":  func(r *guestapi.PrepareRequest) { r.Entropy = make([]byte, 31) },
		"much entropy":    func(r *guestapi.PrepareRequest) { r.Entropy = make([]byte, 4097) },
		"clock before it": func(r *guestapi.PrepareRequest) { r.UnixNano = -1 },
	} {
		req := identity()
		change(&req)
		if _, err := do(h, guestapi.Prepare, req); code(err) != guestapi.CodeBadRequest {
			t.Errorf("%s: error %v", name, err)
		}
	}
	_, err := do(h, guestapi.Prepare, identity())
	ok(t, err)
}

func TestBadRequestsHarmNothing(t *testing.T) {
	h := ready(t)
	for _, c := range []struct{ method, path, body string }{
		{"POST", "/v1/hello", ""},
		{"POST", "/v1/hello", "{"},
		{"POST", "/v1/hello", `{"x":1}`},
		{"POST", "/v1/hello", `{} {}`},
		{"POST", "/v1/hello", strings.Repeat(" ", 8192) + "{}"},
		{"GET", "/v1/hello", ""},
		{"POST", "/v1/nothing", "{}"},
		{"POST", "/v1/exec", "{}"}, // no upgrade
		{"PUT", "/v1/file?path=/tmp/x&pth=y", ""},
		{"PUT", "/v1/file?path=/tmp/x&mode=9", ""},
		{"PUT", "/v1/file?path=/tmp/x&mode=777777", ""},
		{"GET", "/v1/file?path=/etc/passwd&offset=-1", ""},
		{"GET", "/v1/file?path=/etc/passwd&path=/etc/group", ""},
		{"GET", "/v1/file?path=relative", ""},
		{"GET", "/v1/file?path=%zz", ""},
		{"GET", "/v1/tar", ""},
	} {
		req, err := http.NewRequest(c.method, "http://guest"+c.path, strings.NewReader(c.body))
		ok(t, err)
		resp, err := h.client.Do(req)
		ok(t, err)
		if err := readError(resp); code(err) != guestapi.CodeBadRequest {
			t.Errorf("%s %s %q: %v", c.method, c.path, c.body, err)
		}
		resp.Body.Close()
	}
	_, err := do(h, guestapi.Hello, guestapi.Empty{})
	ok(t, err)
}

func TestPanicInACallIsAnErrorOfThatCallAlone(t *testing.T) {
	h := ready(t)
	fault := guestapi.Call[guestapi.Empty, guestapi.Empty]{Path: "/v1/fault", MaxRequest: 100, MaxResponse: 100}
	on(h.agent, fault, anytime, func(context.Context, guestapi.Empty) (guestapi.Empty, error) { panic("a fault") })
	h.agent.routes["GET /v1/late"] = h.agent.transfer(func(w *response, _ *http.Request, _ url.Values) error {
		w.Write([]byte("begun"))
		panic("a late fault")
	})
	if _, err := do(h, fault, guestapi.Empty{}); code(err) != guestapi.CodeInternal || !strings.Contains(err.Error(), "a fault") {
		t.Errorf("error %v", err)
	}
	if data, err := h.transfer("GET", "/v1/late", nil, nil); err == nil {
		t.Errorf("a cut answer looked whole: %q", data)
	}
	_, err := do(h, guestapi.Hello, guestapi.Empty{})
	ok(t, err)
}

func TestClockAndShutdownReachTheSystem(t *testing.T) {
	h := ready(t)
	_, err := do(h, guestapi.SetClock, guestapi.SetClockRequest{UnixNano: 1_900_000_000_000_000_001})
	if err != nil || h.system.clock.Load() != 1_900_000_000_000_000_001 {
		t.Errorf("clock %d, %v", h.system.clock.Load(), err)
	}
	if _, err := do(h, guestapi.SetClock, guestapi.SetClockRequest{}); code(err) != guestapi.CodeBadRequest {
		t.Errorf("no clock: error %v", err)
	}
	for range 3 {
		_, err := do(h, guestapi.Shutdown, guestapi.Empty{})
		ok(t, err)
	}
	eventually(t, "the system was told", func() bool { return h.system.shutdowns.Load() > 0 })
	if n := h.system.shutdowns.Load(); n != 1 {
		t.Errorf("told %d times", n)
	}
}

func TestFiguresAreTrue(t *testing.T) {
	h := ready(t)
	k := h.start(guestapi.ExecRequest{Argv: []string{"cat"}, Stdin: true})
	f, err := do(h, guestapi.Figures, guestapi.Empty{})
	ok(t, err)
	if f.MemTotal <= 0 || f.MemAvailable <= 0 || f.MemAvailable > f.MemTotal || f.DiskTotal <= 0 || f.DiskFree > f.DiskTotal ||
		f.Processes < 2 || f.AgentHeap <= 0 || f.AgentMemory < f.AgentHeap || f.AgentFDs < 5 || f.AgentGoroutines < 2 || f.Execs != 1 {
		t.Errorf("%+v", f)
	}
	ok(t, k.send(guestapi.FrameStdinEnd, nil))
	k.finish()
}

// transfer moves a body; the error is a refusal, early or in the trailer.
func (h *host) transfer(method, path string, query url.Values, body io.Reader) ([]byte, error) {
	h.t.Helper()
	req, err := http.NewRequest(method, "http://guest"+path+"?"+query.Encode(), body)
	ok(h.t, err)
	resp, err := h.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, readError(resp)
	}
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return data, err
	}
	if text := resp.Trailer.Get(guestapi.ErrorTrailer); text != "" {
		e, err := guestapi.Decode[guestapi.Error](strings.NewReader(text), 64<<10)
		ok(h.t, err)
		return data, &e
	}
	return data, nil
}

func TestFilesPassExactly(t *testing.T) {
	h := ready(t)
	path := t.TempDir() + "/file with space & ü"
	for _, n := range []int{0, 1, 4096, 3_000_001} {
		data := bytes.Repeat([]byte{0, 0xff, 'x', '\n', '\r'}, n/5+1)[:n]
		_, err := h.transfer("PUT", guestapi.FilePath, url.Values{"path": {path}, "mode": {"640"}}, bytes.NewReader(data))
		ok(t, err)
		got, err := h.transfer("GET", guestapi.FilePath, url.Values{"path": {path}}, nil)
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes came back as %d, %v", n, len(got), err)
		}
	}
	got, err := h.transfer("GET", guestapi.FilePath, url.Values{"path": {path}, "offset": {"3000000"}, "limit": {"10"}}, nil)
	if err != nil || len(got) != 1 {
		t.Errorf("the last byte: %q, %v", got, err)
	}
	info, err := do(h, guestapi.Stat, guestapi.StatRequest{Path: path})
	if err != nil || info.Mode != 0o640 || info.Size != 3_000_001 {
		t.Errorf("%+v, %v", info, err)
	}
	_, err = do(h, guestapi.Remove, guestapi.RemoveRequest{Path: path})
	ok(t, err)
	if _, err := h.transfer("GET", guestapi.FilePath, url.Values{"path": {path}}, nil); code(err) != guestapi.CodeNotFound {
		t.Errorf("removed: error %v", err)
	}
}

// brokenReader ends an upload before its length.
type brokenReader struct{ n int }

func (b *brokenReader) Read(p []byte) (int, error) {
	if b.n == 0 {
		return 0, errors.New("the host died")
	}
	n := min(len(p), b.n)
	b.n -= n
	return n, nil
}

func TestBrokenUploadLeavesTheOldFile(t *testing.T) {
	h := ready(t)
	dir := t.TempDir()
	ok(t, os.WriteFile(dir+"/file", []byte("old"), 0o600))
	if _, err := h.transfer("PUT", guestapi.FilePath, url.Values{"path": {dir + "/file"}}, &brokenReader{100_000}); err == nil {
		t.Error("a broken upload succeeded")
	}
	eventually(t, "the temporary file is gone", func() bool {
		entries, err := os.ReadDir(dir)
		return err == nil && len(entries) == 1
	})
	if data, err := os.ReadFile(dir + "/file"); err != nil || string(data) != "old" {
		t.Errorf("%q, %v", data, err)
	}
}

func TestTreesPassAndBadOnesAreRefused(t *testing.T) {
	h := ready(t)
	from, to := t.TempDir(), t.TempDir()
	ok(t, os.MkdirAll(from+"/a/b", 0o755))
	ok(t, os.WriteFile(from+"/a/b/c", []byte("deep"), 0o644))
	data, err := h.transfer("GET", guestapi.TarPath, url.Values{"path": {from}}, nil)
	ok(t, err)
	_, err = h.transfer("PUT", guestapi.TarPath, url.Values{"path": {to}}, bytes.NewReader(data))
	ok(t, err)
	if text, err := os.ReadFile(to + "/a/b/c"); err != nil || string(text) != "deep" {
		t.Errorf("%q, %v", text, err)
	}
	var evil bytes.Buffer
	w := tar.NewWriter(&evil)
	ok(t, w.WriteHeader(&tar.Header{Name: "../evil", Typeflag: tar.TypeReg}))
	ok(t, w.Close())
	if _, err := h.transfer("PUT", guestapi.TarPath, url.Values{"path": {to}}, &evil); code(err) != guestapi.CodeBadRequest {
		t.Errorf("error %v", err)
	}
	if _, err := h.transfer("GET", guestapi.TarPath, url.Values{"path": {to + "/absent"}}, nil); code(err) != guestapi.CodeNotFound {
		t.Errorf("error %v", err)
	}
}

func TestFailureInTheMiddleIsToldInTheTrailer(t *testing.T) {
	h := ready(t)
	h.agent.routes["GET /v1/half"] = h.agent.transfer(func(w *response, _ *http.Request, _ url.Values) error {
		w.Write([]byte("half"))
		return fmt.Errorf("write: %w", syscall.ENOSPC)
	})
	data, err := h.transfer("GET", "/v1/half", nil, nil)
	if string(data) != "half" || code(err) != guestapi.CodeNoSpace {
		t.Errorf("%q, %v", data, err)
	}
}

func TestFullDiskHasItsOwnCode(t *testing.T) {
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("no /dev/full here to stand for a full disk")
	}
	file, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	ok(t, err)
	defer file.Close()
	_, err = file.Write([]byte("x"))
	if e := asError(err); e.Code != guestapi.CodeNoSpace {
		t.Errorf("%v", e)
	}
}

func TestListTellsOfALongFolder(t *testing.T) {
	h := ready(t)
	dir := t.TempDir()
	for i := range 5 {
		ok(t, os.WriteFile(fmt.Sprintf("%s/f%d", dir, i), nil, 0o600))
	}
	list, err := do(h, guestapi.List, guestapi.ListRequest{Path: dir, Limit: 3})
	if err != nil || len(list.Entries) != 3 || !list.Truncated || list.Entries[0].Name != "f0" {
		t.Errorf("%+v, %v", list, err)
	}
}
