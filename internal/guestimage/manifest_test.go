package guestimage

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestapi"
)

func goodManifest() Manifest {
	m := Manifest{
		Schema: schema, Arch: runtime.GOARCH, Protocol: guestapi.Protocol,
		SHA256: strings.Repeat("1", 64), KernelSHA256: strings.Repeat("2", 64), InitramfsSHA256: strings.Repeat("3", 64),
		DataSHA256: strings.Repeat("4", 64), OverlaySHA256: strings.Repeat("a", 64),
	}
	m.ImageID = m.id()
	return m
}

// with is the good manifest's text with a replacement.
func with(old, fresh string) string {
	text := string(goodManifest().encode())
	if !strings.Contains(text, old) {
		panic(old)
	}
	return strings.Replace(text, old, fresh, 1)
}

func TestManifestIsReadBackAsWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.json")
	if err := os.WriteFile(path, goodManifest().encode(), 0o600); err != nil {
		t.Fatal(err)
	}
	m, err := ReadManifest(path)
	if err != nil || m != goodManifest() {
		t.Fatalf("got %+v, %v", m, err)
	}
}

func TestManifestFaultsHaveTheirOwnErrors(t *testing.T) {
	id := goodManifest().ImageID
	for _, c := range []struct {
		name, text string
		want       error
		says       string
	}{
		{"empty", "", ErrManifestSyntax, "is not a JSON document: it does not begin with an object"},
		{"array", "[]", ErrManifestSyntax, "does not begin with an object"},
		{"truncated", `{"schema": 1,`, ErrManifestSyntax, "is not a JSON document"},
		{"not UTF-8", "{\"schema\": 1, \"arch\": \"\xff\"}", ErrManifestSyntax, "it is not UTF-8"},
		{"unknown field", with(`"schema"`, `"extra": 1, "schema"`), ErrManifestField, `"extra" is unknown or there twice`},
		{"field in other case", with(`"arch"`, `"Arch"`), ErrManifestField, `"Arch" is unknown or there twice`},
		{"field twice", with(`"schema"`, `"schema": 1, "schema"`), ErrManifestField, `"schema" is unknown or there twice`},
		{"missing field", `{"schema": 1}`, ErrManifestField, "arch is missing"},
		{"null", with(`"schema": 1`, `"schema": null`), ErrManifestField, "schema has a value of the wrong type"},
		{"wrong type", with(`"protocol": 6`, `"protocol": "6"`), ErrManifestField, "protocol has a value of the wrong type"},
		{"trailing data", string(goodManifest().encode()) + "{}", ErrManifestTrailing, "has data after its document"},
		{"trailing garbage", string(goodManifest().encode()) + "\x00", ErrManifestTrailing, "has data after its document"},
		{"too large", with(`{`, "{"+strings.Repeat(" ", maxManifest)), ErrManifestTooLarge, "is larger than 64 KiB"},
		{"other schema", `{"schema": 2, "colour": "red"}`, ErrManifestField, `"colour" is unknown`},
		{"newer schema", with(`"schema": 1`, `"schema": 2`), ErrManifestSchema, "it is 2, this version reads 1"},
		{"arch", with(`"`+runtime.GOARCH+`"`, `"vax"`), ErrManifestArch, `it is for "vax", this machine is ` + runtime.GOARCH},
		{"protocol", with(`"protocol": 6`, `"protocol": 3`), ErrManifestProtocol, "it speaks 3, this version speaks 6"},
		{"digest in capitals", with(strings.Repeat("a", 64), strings.Repeat("A", 64)), ErrManifestDigest, "overlay_sha256 is not 64 lower-case hex digits"},
		{"short digest", with(strings.Repeat("2", 64), "22"), ErrManifestDigest, "kernel_sha256 is not 64 lower-case hex digits"},
		{"id", with(id, strings.Repeat("0", 24)), ErrManifestID, "they make " + id},
		{"digest of another build", with(strings.Repeat("3", 64), strings.Repeat("5", 64)), ErrManifestID, "it says \"" + id},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "m.json")
			if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			checkFault(t, path, c.want, c.says)
		})
	}
}

func TestManifestMustBeARegularFile(t *testing.T) {
	dir := t.TempDir()
	good := filepath.Join(dir, "good")
	if err := os.WriteFile(good, goodManifest().encode(), 0o600); err != nil {
		t.Fatal(err)
	}
	link, pipe, folder := filepath.Join(dir, "link"), filepath.Join(dir, "pipe"), filepath.Join(dir, "folder")
	if err := errors.Join(os.Symlink(good, link), unix.Mkfifo(pipe, 0o600), os.Mkdir(folder, 0o700)); err != nil {
		t.Fatal(err)
	}
	checkFault(t, link, ErrManifestNotRegular, "it is a symbolic link")
	checkFault(t, pipe, ErrManifestNotRegular, "it is a pipe")
	checkFault(t, folder, ErrManifestNotRegular, "it is a folder")
	if _, err := ReadManifest(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing manifest: %v", err)
	}
}

func checkFault(t *testing.T, path string, want error, says string) {
	t.Helper()
	_, err := ReadManifest(path)
	if !errors.Is(err, want) || !strings.Contains(err.Error(), says) {
		t.Fatalf("got %v; want %q with %q", err, want, says)
	}
	if !strings.Contains(err.Error(), path) || !strings.HasSuffix(err.Error(), "; build the image anew: kosa8 image build") {
		t.Errorf("%q names neither the file nor the remedy", err)
	}
	for _, other := range []error{ErrManifestNotRegular, ErrManifestTooLarge, ErrManifestSyntax, ErrManifestTrailing, ErrManifestField,
		ErrManifestSchema, ErrManifestArch, ErrManifestID, ErrManifestProtocol, ErrManifestDigest} {
		if other != want && errors.Is(err, other) {
			t.Errorf("it is also %q", other)
		}
	}
}

func FuzzManifest(f *testing.F) {
	f.Add(string(goodManifest().encode()))
	f.Add(`{"schema": 1, "schema": 1}`)
	f.Add("{}")
	f.Fuzz(func(t *testing.T, text string) {
		m, err := parseManifest("m", []byte(text))
		if err == nil && m.check("m") != nil {
			t.Fatalf("accepted what does not pass: %+v", m)
		}
	})
}
