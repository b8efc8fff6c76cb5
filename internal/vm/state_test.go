package vm

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
)

func TestAStateReadsAsItWasWritten(t *testing.T) {
	state := append(bytes.Repeat([]byte{0}, 190_000), "and something at the end"...)
	path := filepath.Join(t.TempDir(), "state")
	var file bytes.Buffer
	if err := writeState(&file, state); err != nil {
		t.Fatal(err)
	}
	if file.Len() > len(state)/10 {
		t.Errorf("%d bytes for %d that are mostly zero", file.Len(), len(state))
	}
	if err := os.WriteFile(path, file.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := OpenState(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if got, err := io.ReadAll(f); err != nil || !bytes.Equal(got, state) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

func TestAStateThatIsNoneIsRefused(t *testing.T) {
	var good bytes.Buffer
	if err := writeState(&good, []byte("devices")); err != nil {
		t.Fatal(err)
	}
	change := func(at int, to byte) []byte {
		b := bytes.Clone(good.Bytes())
		b[at] = to
		return b
	}
	for name, data := range map[string][]byte{
		"empty": nil, "short": good.Bytes()[:stateHeader-1], "cut": good.Bytes()[:good.Len()-1], "foreign": change(0, 'X'),
		"newer": change(8, 2), "other length": change(12, 200), "gigabytes": change(15, 0xff), "longer": append(change(0, 'W'), 0),
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "state")
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
			if f, err := OpenState(path); !errors.Is(err, ErrState) {
				t.Errorf("%v, %v", f, err)
			}
		})
	}
}
