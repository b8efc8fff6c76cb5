package snapshots

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// format is the version of the manifest.
const format = 1

const (
	maxManifest = 64 << 10
	maxText     = 200
	// maxMemMB is more memory than any host has: 16 TiB.
	maxMemMB = 16 << 20
)

// Kind says how long a snapshot stays.
type Kind string

// A template stays while its caller wants it, a snapshot until it is deleted,
// a fork while something needs it.
const (
	KindTemplate Kind = "template"
	KindSnapshot Kind = "snapshot"
	KindFork     Kind = "fork"
)

// MemoryKind says what the memory file of a snapshot holds.
type MemoryKind string

// A flat file is the guest's RAM byte for byte, with holes; a difference is
// what changed since the parent.
const (
	MemoryFlat       MemoryKind = "flat"
	MemoryDifference MemoryKind = "difference"
)

// Manifest says what a snapshot is. All fields but NeedsSHA256 are required in
// the file.
type Manifest struct {
	Format int    `json:"format"`
	ID     string `json:"id"`
	Kind   Kind   `json:"kind"`
	// Label is the user's, at most 200 bytes.
	Label   string    `json:"label"`
	Created time.Time `json:"created"`
	// Parent is the snapshot that the memory is a difference to; "" if flat.
	Parent  string  `json:"parent"`
	Machine Machine `json:"machine"`
	ImageID string  `json:"image_id"`
	// Prepared says that the guest has its disk and its identity.
	Prepared bool   `json:"prepared"`
	Memory   Memory `json:"memory"`
	// Disks are the ids of the snapshots whose overlays make up the disk,
	// oldest first. The snapshot itself is the last if it has an overlay.
	Disks []string `json:"disks"`
	// NeedsSHA256 has the digest of the manifest of each snapshot that Needs
	// names: another one under the same id is not what this one was made on.
	// Snapshots of early builds have none.
	NeedsSHA256 map[string]string `json:"needs_sha256,omitempty"`
	// Overlays is how many overlays it has itself: one when the disk had
	// changed, more when snapshots between it and the one before failed.
	Overlays int    `json:"overlays"`
	Files    []File `json:"files"`
	// SHA256 is of the manifest with this field empty.
	SHA256 string `json:"sha256"`
}

// Machine is what the VM ran on: what a restore has to offer again.
type Machine struct {
	CPUs  int    `json:"cpus"`
	MemMB int    `json:"mem_mb"`
	Accel string `json:"accel"`
	// QEMU is its version, CPUModel the host's, Firmware what booted.
	QEMU     string `json:"qemu"`
	CPUModel string `json:"cpu_model"`
	Firmware string `json:"firmware"`
}

// Memory describes the memory file.
type Memory struct {
	Kind MemoryKind `json:"kind"`
	// Bytes is how much of it is not hole, or how much changed.
	Bytes int64 `json:"bytes"`
}

// File is one file of a snapshot.
type File struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
	// Sparse says that SHA256 is digest.Sparse and not that of the bytes.
	Sparse bool `json:"sparse"`
}

// Needs are the snapshots that this one cannot be without, each once.
func (m Manifest) Needs() []string {
	var ids []string
	for _, id := range append([]string{m.Parent}, m.Disks...) {
		if id != "" && id != m.ID && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// file is the entry of that name, which check made sure of.
func (m Manifest) file(name string) File {
	for _, f := range m.Files {
		if f.Name == name {
			return f
		}
	}
	return File{}
}

// fileNames are the names that the files of m have to have, in order.
func (m Manifest) fileNames() []string {
	names := []string{StateName, MemoryName}
	return append(names, m.overlays()...)
}

// overlays are the names of its own overlays, oldest first.
func (m Manifest) overlays() []string {
	var names []string
	for i := range m.Overlays {
		names = append(names, DiskName(i))
	}
	return names
}

// sparse says which digest a file has: sparse files are those QEMU opens.
func (m Manifest) sparse(name string) bool {
	return isDisk(name) || name == MemoryName && m.Memory.Kind == MemoryFlat
}

// encode writes a manifest in the one form that parse takes.
func (m Manifest) encode() []byte {
	if m.Disks == nil {
		m.Disks = []string{}
	}
	if m.Files == nil {
		m.Files = []File{}
	}
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		panic(err) // a year after 9999, which check refuses
	}
	return append(data, '\n')
}

func (m Manifest) sum() string {
	m.SHA256 = ""
	sum := sha256.Sum256(m.encode())
	return hex.EncodeToString(sum[:])
}

// readManifest reads the manifest in the folder of a snapshot.
func readManifest(dir, id string) (Manifest, error) {
	data, err := readSmall(filepath.Join(dir, manifestName))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Manifest{}, damaged(id, "it has no manifest")
	case errors.Is(err, fs.ErrPermission):
		return Manifest{}, fmt.Errorf("snapshot %s: %w", id, err)
	case err != nil:
		return Manifest{}, damaged(id, "its manifest: %w", err)
	}
	return parseManifest(id, data)
}

// readSmall reads a regular file of at most 64 KiB without following a link,
// and without blocking on a pipe that was put in its place.
func readSmall(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err == nil && len(data) > maxManifest {
		err = fmt.Errorf("%s is larger than 64 KiB", path)
	}
	return data, err
}

// parseManifest takes exactly what encode writes: a manifest that reads well
// but was written another way, with a field twice, unknown, missing or in
// other case, or with data after it, is not one of ours.
func parseManifest(id string, data []byte) (Manifest, error) {
	var m Manifest
	if len(data) > maxManifest {
		return m, damaged(id, "its manifest is larger than 64 KiB")
	}
	var version struct{ Format int }
	if json.Unmarshal(data, &version) == nil && version.Format > format {
		return m, fmt.Errorf("snapshot %s %w (format %d, this one reads %d); upgrade", id, ErrNewer, version.Format, format)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&m); err != nil {
		return Manifest{}, damaged(id, "its manifest: %w", err)
	}
	err := m.check()
	switch {
	case err != nil:
	case m.ID != id:
		err = fmt.Errorf("it is that of snapshot %s", m.ID)
	case !bytes.Equal(m.encode(), data):
		err = errors.New("it was not written by Warren: a field twice, missing, or something after it")
	case m.SHA256 != m.sum():
		err = errors.New("its digest is not that of its content")
	}
	if err != nil {
		return Manifest{}, damaged(id, "its manifest: %w", err)
	}
	return m, nil
}

// madeOn says whether other, of an id that m needs, is the one it needs.
func (m Manifest) madeOn(other Manifest) bool {
	want, known := m.NeedsSHA256[other.ID]
	return !known || want == other.SHA256
}

// isDigest says whether text is a SHA-256 as we write it.
func isDigest(text string) bool {
	return len(text) == 64 && strings.Trim(text, "0123456789abcdef") == ""
}

// check says what is wrong with a whole manifest but for its own digest.
func (m Manifest) check() error {
	if m.Format != format {
		return fmt.Errorf("it has format %d", m.Format)
	}
	needs := m.Needs()
	for id, sum := range m.NeedsSHA256 {
		if !slices.Contains(needs, id) || !isDigest(sum) {
			return fmt.Errorf("it has a digest of %.80q, which it does not need, or none", id)
		}
	}
	if m.Created.IsZero() || m.Created.Year() > 9999 || m.Created.Year() < 1970 {
		return errors.New("it has no date")
	}
	if err := m.checkPlan(); err != nil {
		return err
	}
	names := m.fileNames()
	if len(m.Files) != len(names) {
		return fmt.Errorf("it lists %d files, not %d", len(m.Files), len(names))
	}
	for i, f := range m.Files {
		switch {
		case f.Name != names[i]:
			return fmt.Errorf("it lists %.40q where %s belongs", f.Name, names[i])
		case f.Size < 0:
			return fmt.Errorf("%s has the size %d", f.Name, f.Size)
		case f.Name == MemoryName && m.Memory.Kind == MemoryFlat && f.Size != m.ram():
			return fmt.Errorf("memory has %d bytes, the machine %d", f.Size, m.ram())
		case !isDigest(f.SHA256):
			return fmt.Errorf("the digest of %s is not 64 lower-case hex digits", f.Name)
		case f.Sparse != m.sparse(f.Name):
			return fmt.Errorf("%s has the wrong kind of digest", f.Name)
		}
	}
	return nil
}

// ram is the size of the guest's memory in bytes.
func (m Manifest) ram() int64 { return int64(m.Machine.MemMB) << 20 }

// checkPlan says what is wrong with what the caller of Publish fills in.
func (m Manifest) checkPlan() error {
	if err := CheckID(m.ID); err != nil {
		return err
	}
	switch m.Kind {
	case KindTemplate, KindSnapshot, KindFork:
	default:
		return fmt.Errorf("kind %.40q; it is template, snapshot or fork", m.Kind)
	}
	for _, t := range []struct{ name, text string }{
		{"label", m.Label}, {"accel", m.Machine.Accel}, {"qemu", m.Machine.QEMU},
		{"cpu_model", m.Machine.CPUModel}, {"firmware", m.Machine.Firmware},
	} {
		if len(t.text) > maxText || !utf8.ValidString(t.text) {
			return fmt.Errorf("%s is not UTF-8 of at most %d bytes", t.name, maxText)
		}
	}
	if m.Machine.CPUs < 1 || m.Machine.MemMB < 1 || m.Machine.MemMB > maxMemMB {
		return fmt.Errorf("a machine of %d CPUs and %d MB", m.Machine.CPUs, m.Machine.MemMB)
	}
	if CheckID(m.ImageID) != nil {
		return fmt.Errorf("image id %.80q", m.ImageID)
	}
	if m.Memory.Bytes < 0 {
		return fmt.Errorf("memory of %d bytes", m.Memory.Bytes)
	}
	return m.checkNeeds()
}

func (m Manifest) checkNeeds() error {
	switch m.Memory.Kind {
	case MemoryFlat:
		if m.Parent != "" {
			return errors.New("flat memory has no parent")
		}
	case MemoryDifference:
		if CheckID(m.Parent) != nil || m.Parent == m.ID {
			return fmt.Errorf("parent %.80q", m.Parent)
		}
	default:
		return fmt.Errorf("memory kind %.40q; it is flat or difference", m.Memory.Kind)
	}
	if len(m.Disks) > maxClosure {
		return fmt.Errorf("a disk of %d overlays; the most is %d", len(m.Disks), maxClosure)
	}
	for i, id := range m.Disks {
		if CheckID(id) != nil || slices.Contains(m.Disks[:i], id) {
			return fmt.Errorf("disk %.80q is no id or there twice", id)
		}
		if id == m.ID && i != len(m.Disks)-1 {
			return errors.New("its own overlay is not the last of its disk")
		}
	}
	if own := slices.Contains(m.Disks, m.ID); m.Overlays < 0 || m.Overlays > MaxOverlays || own != (m.Overlays > 0) {
		return fmt.Errorf("a disk with %d overlays of its own", m.Overlays)
	}
	return nil
}
