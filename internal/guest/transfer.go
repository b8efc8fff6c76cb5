package guest

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"

	"github.com/warren-vm/warren/internal/guest/files"
	"github.com/warren-vm/warren/internal/guestapi"
)

func (a *Agent) stat(ctx context.Context, req guestapi.StatRequest) (info guestapi.FileInfo, err error) {
	if err := a.files.acquire(ctx); err != nil {
		return info, err
	}
	defer a.files.release()
	return files.Stat(req.Path)
}

func (a *Agent) list(ctx context.Context, req guestapi.ListRequest) (info guestapi.ListInfo, err error) {
	if err := a.files.acquire(ctx); err != nil {
		return info, err
	}
	defer a.files.release()
	return files.List(req.Path, req.Limit)
}

func (a *Agent) remove(ctx context.Context, req guestapi.RemoveRequest) (none guestapi.Empty, err error) {
	if err := a.files.acquire(ctx); err != nil {
		return none, err
	}
	defer a.files.release()
	return none, files.Remove(req.Path, req.Recursive)
}

// transfer makes a handler of a call that carries a body of any length.
func (a *Agent) transfer(do func(*response, *http.Request, url.Values) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		resp := &response{w: w}
		defer func() {
			if resp.begun {
				if v := recover(); v != nil {
					a.logPanic(v)
					panic(http.ErrAbortHandler)
				}
				return
			}
			recovered(a, w)
		}()
		err := a.ready()
		if err == nil {
			err = a.files.acquire(r.Context())
		}
		if err == nil {
			defer a.files.release()
			var query url.Values
			if query, err = checkQuery(r); err == nil {
				err = do(resp, r, query)
			}
		}
		resp.end(err)
	}
}

// checkQuery refuses what the calls do not know: a misspelt parameter must
// not be as if it had not been given.
func checkQuery(r *http.Request) (url.Values, error) {
	known := map[string][]string{
		"GET " + guestapi.FilePath: {"path", "offset", "limit"},
		"PUT " + guestapi.FilePath: {"path", "mode", "user"},
		"GET " + guestapi.TarPath:  {"path"},
		"PUT " + guestapi.TarPath:  {"path", "user"},
	}[r.Method+" "+r.URL.Path]
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, refuse(guestapi.CodeBadRequest, "query: %v", err)
	}
	for name, values := range query {
		if !slices.Contains(known, name) || len(values) != 1 {
			return nil, refuse(guestapi.CodeBadRequest, "query: %q is unknown here, or there twice", name)
		}
	}
	return query, nil
}

// response is a body of unknown length whose failure is told in the trailer.
type response struct {
	w     http.ResponseWriter
	begun bool
}

func (r *response) Write(p []byte) (int, error) {
	if !r.begun {
		r.begun = true
		h := r.w.Header()
		h["Content-Type"] = []string{"application/octet-stream"}
		h["Trailer"] = []string{guestapi.ErrorTrailer}
		h["Date"] = nil
	}
	return r.w.Write(p)
}

// end answers with err, wherever it belongs.
func (r *response) end(err error) {
	switch {
	case err == nil && !r.begun:
		writeJSON(r.w, http.StatusOK, guestapi.Empty{})
	case err != nil && !r.begun:
		writeError(r.w, err)
	case err != nil:
		text, _ := json.Marshal(asError(err)) // two strings
		r.w.Header().Set(guestapi.ErrorTrailer, string(text))
	}
}

func (a *Agent) readFile(w *response, _ *http.Request, query url.Values) error {
	offset, err := number(query, "offset")
	if err != nil {
		return err
	}
	limit, err := number(query, "limit")
	if err != nil {
		return err
	}
	file, err := files.Open(query.Get("path"), offset)
	if err != nil {
		return err
	}
	defer file.Close()
	var from io.Reader = file
	if query.Has("limit") {
		from = io.LimitReader(file, limit)
	}
	return copyBody(w, from)
}

// copyBody begins the body even if there is nothing in it.
func copyBody(w *response, from io.Reader) error {
	n, err := files.Copy(w, from)
	if n == 0 && err == nil {
		_, err = w.Write(nil)
	}
	return err
}

func number(query url.Values, name string) (int64, error) {
	if !query.Has(name) {
		return 0, nil
	}
	n, err := strconv.ParseInt(query.Get(name), 10, 64)
	if err != nil || n < 0 {
		return 0, refuse(guestapi.CodeBadRequest, "%s %q is no number of bytes", name, query.Get(name))
	}
	return n, nil
}

func (a *Agent) writeFile(_ *response, r *http.Request, query url.Values) error {
	owner, err := a.owner(query)
	if err != nil {
		return err
	}
	opt := files.WriteOptions{Owner: owner}
	if query.Has("mode") {
		mode, err := strconv.ParseUint(query.Get("mode"), 8, 32)
		if err != nil || mode > 0o7777 {
			return refuse(guestapi.CodeBadRequest, "mode %q is not octal up to 7777", query.Get("mode"))
		}
		bits := uint32(mode)
		opt.Mode = &bits
	}
	return files.Write(query.Get("path"), r.Body, opt)
}

// owner is the user that the query names, or nil.
func (a *Agent) owner(query url.Values) (*files.Owner, error) {
	if !query.Has("user") {
		return nil, nil
	}
	user, err := a.opt.Accounts.Lookup(query.Get("user"))
	if err != nil {
		return nil, err
	}
	return &files.Owner{UID: int(user.UID), GID: int(user.GID)}, nil
}

func (a *Agent) packTar(w *response, _ *http.Request, query url.Values) error {
	return files.Pack(w, query.Get("path"))
}

func (a *Agent) unpackTar(_ *response, r *http.Request, query url.Values) error {
	owner, err := a.owner(query)
	if err != nil {
		return err
	}
	if err := files.Unpack(r.Body, query.Get("path"), owner); err != nil {
		return err
	}
	// An archive ends before its padding; an unread body would end the stream.
	_, err = files.Copy(io.Discard, r.Body)
	return err
}
