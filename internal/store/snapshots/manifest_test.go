package snapshots

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func sample() Manifest {
	m := plan(KindSnapshot, "base", "base", "x")
	m.Format, m.ID, m.Overlays, m.Created = format, "x", 1, time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	for _, name := range m.fileNames() {
		m.Files = append(m.Files, File{name, 5, strings.Repeat("0a", 32), m.sparse(name)})
	}
	m.SHA256 = m.sum()
	return m
}

func TestAManifestReadsAsItWasWritten(t *testing.T) {
	data := sample().encode()
	m, err := parseManifest("x", data)
	if err != nil || !bytes.Equal(m.encode(), data) {
		t.Fatal(m, err)
	}
}

func TestEveryFlippedBitOfAManifestIsFound(t *testing.T) {
	data := sample().encode()
	for i := range data {
		for bit := range 8 {
			data[i] ^= 1 << bit
			if _, err := parseManifest("x", data); !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrNewer) {
				t.Errorf("byte %d bit %d: %v", i, bit, err)
			}
			data[i] ^= 1 << bit
		}
	}
}

func TestManifestsAreReadStrictly(t *testing.T) {
	good := string(sample().encode())
	// signed is a manifest whose own digest is right.
	signed := func(change func(*Manifest)) string {
		m := sample()
		change(&m)
		m.SHA256 = m.sum()
		return string(m.encode())
	}
	for name, text := range map[string]string{
		"empty":            "",
		"half":             good[:len(good)/2],
		"not an object":    "[]",
		"unknown field":    strings.Replace(good, "{\n", "{\n  \"more\": 1,\n", 1),
		"field twice":      strings.Replace(good, `"format": 1,`, "\"format\": 1,\n  \"format\": 1,", 1),
		"other case":       strings.Replace(good, `"label"`, `"Label"`, 1),
		"missing field":    strings.Replace(good, "  \"prepared\": false,\n", "", 1),
		"wrong type":       strings.Replace(good, `"cpus": 2`, `"cpus": "2"`, 1),
		"null":             strings.Replace(good, `"prepared": false`, `"prepared": null`, 1),
		"data after it":    good + "{}",
		"space after it":   good + "\n",
		"large":            good + strings.Repeat(" ", 64<<10),
		"other id":         signed(func(m *Manifest) { m.ID, m.Disks = "y", []string{"base", "y"} }),
		"format 0":         signed(func(m *Manifest) { m.Format = 0 }),
		"parent":           signed(func(m *Manifest) { m.Parent = "../base" }),
		"disk":             signed(func(m *Manifest) { m.Disks[0] = "/base" }),
		"digest":           signed(func(m *Manifest) { m.Files[0].SHA256 = strings.Repeat("0A", 32) }),
		"file elsewhere":   signed(func(m *Manifest) { m.Files[0].Name = "../state" }),
		"file missing":     signed(func(m *Manifest) { m.Files = m.Files[:2] }),
		"negative size":    signed(func(m *Manifest) { m.Files[0].Size = -1 }),
		"kind of digest":   signed(func(m *Manifest) { m.Files[0].Sparse = true }),
		"no date":          signed(func(m *Manifest) { m.Created = time.Time{} }),
		"too much memory":  signed(func(m *Manifest) { m.Machine.MemMB = 1 << 40 }),
		"own digest wrong": strings.Replace(good, `"a label"`, `"A label"`, 1),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parseManifest("x", []byte(text))
			wantIs(t, err, ErrDamaged)
		})
	}
}

func TestANewerManifestAsksForAnUpgrade(t *testing.T) {
	_, err := parseManifest("x", []byte(`{"format": 2, "what": "ever"}`))
	wantIs(t, err, ErrNewer, "snapshot x was made by a newer Warren", "upgrade")
}

func TestImagesOfUnreadableSnapshotsAreKnown(t *testing.T) {
	s := newStore(t)
	m := plan(KindSnapshot, "")
	published(t, s, "good", m)
	m.ImageID = "aaaaaaaaaaaaaaaaaaaaaaaa"
	published(t, s, "bad", m)
	path := filepath.Join(s.folder("bad"), manifestName)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	os.Chmod(path, 0o600)
	if err := os.WriteFile(path, bytes.Replace(data, []byte("label"), []byte("lebal"), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := s.ImageIDs(t.Context())
	if err != nil || strings.Join(got, " ") != "0123456789abcdef01234567 aaaaaaaaaaaaaaaaaaaaaaaa" {
		t.Errorf("got %s, %v", got, err)
	}
	all, problems, err := s.List(t.Context())
	if err != nil || len(all) != 1 || len(problems) != 1 || problems[0].ID != "bad" {
		t.Error(all, problems, err)
	}
}
