package guestapi

import (
	"encoding/json"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestDecodeListReadsWhatDecodeReads(t *testing.T) {
	for _, want := range []ListInfo{
		{},
		{Entries: []FileInfo{}},
		{Entries: []FileInfo{{Name: "a", Size: 1, Mode: 0o644, Type: "file"}, {Name: "b", Link: "a"}}, Truncated: true},
	} {
		data, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		got, err := DecodeList(strings.NewReader(string(data)), List.MaxResponse)
		if err != nil {
			t.Fatalf("%s: %v", data, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", data, diff)
		}
	}
}

func TestDecodeListRefusesEverythingElse(t *testing.T) {
	for _, row := range []struct{ name, in, want string }{
		{"nothing", ``, "unexpected EOF"},
		{"an array", `[]`, `"[" where "{" was due`},
		{"cut off", `{"entries":[{"name":"a"}`, "unexpected EOF"},
		{"unknown field", `{"entries":[],"more":1}`, `unknown field "more"`},
		{"unknown field of an entry", `{"entries":[{"colour":1}]}`, `unknown field "colour"`},
		{"entries that are no array", `{"entries":{}}`, "no array"},
		{"a second document", `{} {}`, "data after the document"},
		{"too long", `{"entries":[` + strings.Repeat(" ", 2000) + `]}`, "more than 1000 bytes"},
	} {
		t.Run(row.name, func(t *testing.T) {
			_, err := DecodeList(strings.NewReader(row.in), 1000)
			if err == nil || !strings.Contains(err.Error(), row.want) {
				t.Errorf("error %v, want %q", err, row.want)
			}
		})
	}
}

func TestDecodeListStopsAtItsLimitOfEntries(t *testing.T) {
	bomb := `{"entries":[` + strings.Repeat("{},", 5<<20) + `{}]}`
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := DecodeList(strings.NewReader(bomb), List.MaxResponse)
	runtime.ReadMemStats(&after)
	if err == nil || !strings.Contains(err.Error(), "more than 10000 entries") {
		t.Fatalf("error %v", err)
	}
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 32<<20 {
		t.Errorf("allocated %d bytes for a document it refuses", grown)
	}
}

func FuzzDecodeList(f *testing.F) {
	f.Add(`{"entries":[{"name":"a","type":"file"}],"truncated":true}`)
	f.Add(`{"entries":null}`)
	f.Fuzz(func(t *testing.T, s string) {
		got, err := DecodeList(strings.NewReader(s), 4096)
		if err == nil && (len(s) > 4096 || len(got.Entries) > MaxList) {
			t.Fatalf("%q was accepted", s)
		}
	})
}
