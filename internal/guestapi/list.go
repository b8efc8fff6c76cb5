package guestapi

import (
	"encoding/json"
	"fmt"
	"io"
)

// MaxList is how many entries a ListInfo holds at most, whatever the Limit
// asked for.
const MaxList = 10_000

// DecodeList is Decode for a ListInfo. It counts the entries while it reads:
// "{}," is three bytes and a FileInfo over a hundred, so that a document
// within the limit could otherwise grow to hundreds of megabytes.
func DecodeList(r io.Reader, limit int64) (ListInfo, error) {
	bounded := &io.LimitedReader{R: r, N: limit + 1}
	info, err := readList(json.NewDecoder(bounded))
	if bounded.N <= 0 {
		return ListInfo{}, fmt.Errorf("document of more than %d bytes", limit)
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return info, err
}

func readList(dec *json.Decoder) (ListInfo, error) {
	dec.DisallowUnknownFields()
	var info ListInfo
	if err := expect(dec, json.Delim('{')); err != nil {
		return info, err
	}
	for dec.More() {
		name, err := dec.Token()
		if err != nil {
			return info, err
		}
		switch name {
		case "entries":
			info.Entries, err = readEntries(dec)
		case "truncated":
			err = dec.Decode(&info.Truncated)
		default:
			err = fmt.Errorf("unknown field %q", name)
		}
		if err != nil {
			return info, err
		}
	}
	if err := expect(dec, json.Delim('}')); err != nil {
		return info, err
	}
	if _, err := dec.Token(); err != io.EOF {
		return info, fmt.Errorf("data after the document")
	}
	return info, nil
}

func readEntries(dec *json.Decoder) ([]FileInfo, error) {
	open, err := dec.Token()
	if err != nil || open == nil { // null: an empty folder, as encoding/json writes a nil slice
		return nil, err
	}
	if open != json.Delim('[') {
		return nil, fmt.Errorf("entries are no array")
	}
	entries := []FileInfo{}
	for dec.More() {
		if len(entries) == MaxList {
			return nil, fmt.Errorf("list of more than %d entries", MaxList)
		}
		var one FileInfo
		if err := dec.Decode(&one); err != nil {
			return nil, err
		}
		entries = append(entries, one)
	}
	return entries, expect(dec, json.Delim(']'))
}

func expect(dec *json.Decoder, want json.Delim) error {
	got, err := dec.Token()
	if err == nil && got != want {
		err = fmt.Errorf("%q where %q was due", fmt.Sprint(got), want.String())
	}
	return err
}
