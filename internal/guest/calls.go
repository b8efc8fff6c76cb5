package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"strconv"
	"syscall"

	"github.com/warren-vm/warren/internal/guest/files"
	"github.com/warren-vm/warren/internal/guestapi"
)

func refuse(code guestapi.Code, format string, args ...any) *guestapi.Error {
	return &guestapi.Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// when says in which state of the agent a call is answered.
type when bool

const (
	anytime  when = false
	prepared when = true
)

// on makes answer the answer to call.
func on[Req, Resp any](a *Agent, call guestapi.Call[Req, Resp], w when, answer func(context.Context, Req) (Resp, error)) {
	a.routes["POST "+call.Path] = func(rw http.ResponseWriter, r *http.Request) {
		defer recovered(a, rw)
		if w == prepared {
			if err := a.ready(); err != nil {
				writeError(rw, err)
				return
			}
		}
		req, err := guestapi.Decode[Req](r.Body, call.MaxRequest)
		if err != nil {
			writeError(rw, refuse(guestapi.CodeBadRequest, "request of %s: %v", call.Path, err))
			return
		}
		resp, err := answer(r.Context(), req)
		if err != nil {
			writeError(rw, err)
			return
		}
		writeJSON(rw, http.StatusOK, resp)
	}
}

// recovered answers a panic in a handler with an error.
func recovered(a *Agent, w http.ResponseWriter) {
	v := recover()
	if v == nil {
		return
	}
	if v == http.ErrAbortHandler {
		panic(v)
	}
	a.logPanic(v)
	writeError(w, refuse(guestapi.CodeInternal, "the guest agent has a fault: %s", panicText(v)))
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		writeError(w, err)
		return
	}
	h := w.Header()
	h["Content-Type"] = []string{"application/json"}
	h["Content-Length"] = []string{strconv.Itoa(len(body))}
	h["Date"] = nil // nobody reads it
	w.WriteHeader(status)
	w.Write(body)
}

func writeError(w http.ResponseWriter, err error) {
	e := asError(err)
	writeJSON(w, e.Code.HTTPStatus(), e)
}

// asError gives an error the code that callers decide on.
func asError(err error) *guestapi.Error {
	var e *guestapi.Error
	if errors.As(err, &e) {
		return e
	}
	code := guestapi.CodeInternal
	var path *files.BadPathError
	var archive *files.ArchiveError
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &path), errors.As(err, &archive), errors.As(err, &tooLarge):
		code = guestapi.CodeBadRequest
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		code = guestapi.CodeNotFound
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		code = guestapi.CodeNoSpace
	case isAny(err, syscall.EISDIR, syscall.ENOTEMPTY, syscall.EEXIST, syscall.EBUSY, syscall.EROFS, syscall.EACCES,
		syscall.EPERM, syscall.ELOOP, syscall.ENAMETOOLONG, syscall.EINVAL, syscall.EXDEV, syscall.ETXTBSY):
		// What the caller asked for cannot be done to this file.
		code = guestapi.CodeBadRequest
	}
	return &guestapi.Error{Code: code, Message: err.Error()}
}

func isAny(err error, errnos ...syscall.Errno) bool {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return false
	}
	for _, e := range errnos {
		if e == errno {
			return true
		}
	}
	return false
}
