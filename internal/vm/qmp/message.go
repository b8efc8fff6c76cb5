package qmp

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
)

// MaxLine bounds one line from QEMU, in bytes. The longest honest answer,
// query-qmp-schema, is about 200 KiB in QEMU 7.2.
const MaxLine = 1 << 20

// maxText bounds texts of QEMU that end up in errors, in bytes.
const maxText = 1024

// Error is a command that QEMU refused.
type Error struct {
	// Class is QEMU's word, mostly "GenericError".
	Class string `json:"class"`
	// Desc is QEMU's sentence, cleaned.
	Desc string `json:"desc"`
}

func (e *Error) Error() string { return "qemu: " + e.Desc }

// Event is something QEMU tells without being asked.
type Event struct {
	Name string
	// Data is the event's JSON object, unchecked; nil when it has none.
	Data json.RawMessage
	// Time is QEMU's clock at the event.
	Time time.Time
}

// Version is QEMU's own.
type Version struct {
	Major, Minor, Micro int
	// Package is the distribution's addition, cleaned; often empty.
	Package string
}

func (v Version) String() string {
	return fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Micro)
}

// Full is the version with the distribution's addition, as QEMU itself prints
// it: two QEMUs with the same one are the same.
func (v Version) Full() string {
	if v.Package == "" {
		return v.String()
	}
	return fmt.Sprintf("%v (%s)", v, v.Package)
}

// AtLeast reports whether v is major.minor or newer.
func (v Version) AtLeast(major, minor int) bool {
	return v.Major > major || v.Major == major && v.Minor >= minor
}

// message is one decoded line; exactly one of greeting, event, ret and err is
// set.
type message struct {
	greeting *Version
	event    *Event
	ret      json.RawMessage
	err      *Error
	// id says which command ret or err answers. hasID is false for an error
	// that belongs to none: QEMU could not read what was sent.
	id    uint64
	hasID bool
}

// decode reads one line without its newline.
func decode(line []byte) (message, error) {
	var raw struct {
		QMP *struct {
			Version *struct {
				QEMU    struct{ Major, Minor, Micro int }
				Package string
			}
		}
		Return    json.RawMessage
		Error     *Error
		Event     *string
		Data      json.RawMessage
		Timestamp struct{ Seconds, Microseconds int64 }
		ID        *uint64
	}
	if err := json.Unmarshal(line, &raw); err != nil {
		return message{}, fmt.Errorf("not a QMP message: %w", err)
	}
	var m message
	kinds := 0
	if raw.QMP != nil {
		kinds++
		if raw.QMP.Version == nil {
			return message{}, errors.New("greeting without a version")
		}
		q := raw.QMP.Version.QEMU
		m.greeting = &Version{q.Major, q.Minor, q.Micro, guestapi.CleanLineTail([]byte(raw.QMP.Version.Package), 128)}
	}
	if raw.Event != nil {
		kinds++
		t := time.Unix(raw.Timestamp.Seconds, raw.Timestamp.Microseconds*1000)
		m.event = &Event{Name: *raw.Event, Data: raw.Data, Time: t}
	}
	if raw.Return != nil {
		kinds++
		m.ret = raw.Return
	}
	if raw.Error != nil {
		kinds++
		m.err = &Error{
			Class: guestapi.CleanLineTail([]byte(raw.Error.Class), 64),
			Desc:  guestapi.CleanLineTail([]byte(raw.Error.Desc), maxText),
		}
	}
	if raw.ID != nil {
		m.id, m.hasID = *raw.ID, true
	}
	switch {
	case kinds != 1:
		return message{}, fmt.Errorf("a message that is %d of greeting, event, answer and error", kinds)
	case m.ret != nil && !m.hasID:
		return message{}, errors.New("an answer without an id")
	}
	return m, nil
}

var errLongLine = fmt.Errorf("a line of more than %d bytes", MaxLine)

// readLine returns the next line without its line end. Memory for it grows
// with what arrives, never past MaxLine.
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		if len(line)+len(part) > MaxLine {
			return nil, errLongLine
		}
		line = append(line, part...)
		switch {
		case err == nil:
			return bytes.TrimRight(line, "\r\n"), nil
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF) && len(line) > 0:
			return nil, io.ErrUnexpectedEOF
		default:
			return nil, err
		}
	}
}
