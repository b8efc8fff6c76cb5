package guestapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
)

// Decode reads one JSON document of at most limit bytes into a T. Unknown
// fields, a second document and anything over the limit are errors.
func Decode[T any](r io.Reader, limit int64) (T, error) {
	var v T
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return v, err
	}
	if int64(len(data)) > limit {
		return v, fmt.Errorf("document of more than %d bytes", limit)
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&v); err != nil {
		return v, err
	}
	if _, err := dec.Token(); err != io.EOF {
		return v, fmt.Errorf("data after the document")
	}
	return v, nil
}
