package guestimage

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
	"regexp"
	"runtime"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestapi"
)

// schema is the version of the manifest.
const schema = 1

// maxManifest bounds a manifest, in bytes.
const maxManifest = 64 << 10

// Manifest says what a generation is. It lies beside the root disk, which is
// how other programs find it; all of its fields are required.
type Manifest struct {
	Schema int `json:"schema"`
	// Arch is Go's name of the architecture.
	Arch string `json:"arch"`
	// ImageID is made from the digests; see Manifest.id.
	ImageID string `json:"image_id"`
	// Protocol is the version of the calls that the agent in it speaks.
	Protocol int `json:"protocol"`
	// SHA256 is of the root disk.
	SHA256          string `json:"sha256"`
	KernelSHA256    string `json:"kernel_sha256"`
	InitramfsSHA256 string `json:"initramfs_sha256"`
	// DataSHA256 is the sparse digest (package digest) of the data disk,
	// OverlaySHA256 the digest of the empty overlay over it.
	DataSHA256    string `json:"data_sha256"`
	OverlaySHA256 string `json:"overlay_sha256"`
}

// What can be wrong with a manifest. Each error that ReadManifest returns is
// exactly one of them, or one of the file system's.
var (
	ErrManifestNotRegular = errors.New("is not a regular file")
	ErrManifestTooLarge   = errors.New("is larger than 64 KiB")
	ErrManifestSyntax     = errors.New("is not a JSON document")
	ErrManifestTrailing   = errors.New("has data after its document")
	ErrManifestField      = errors.New("has a field it must not have, or lacks one")
	ErrManifestSchema     = errors.New("has a schema this version does not read")
	ErrManifestArch       = errors.New("is for another architecture")
	ErrManifestID         = errors.New("has an image id that does not belong to its digests")
	ErrManifestProtocol   = errors.New("is for another protocol")
	ErrManifestDigest     = errors.New("has a malformed digest")
)

// manifestFault is a fault of one manifest, for the one who must act.
func manifestFault(path string, what error, format string, args ...any) error {
	detail := fmt.Sprintf(format, args...)
	if detail != "" {
		detail = ": " + detail
	}
	return fmt.Errorf("guest image manifest %s %w%s; build the image anew: kosa8 image build", path, what, detail)
}

// ReadManifest reads a manifest strictly: whatever it does not understand
// exactly is refused.
func ReadManifest(path string) (Manifest, error) {
	data, err := readRegular(path)
	if err != nil {
		return Manifest{}, err
	}
	m, err := parseManifest(path, data)
	if err != nil {
		return Manifest{}, err
	}
	return m, nil
}

// readRegular reads a small regular file without following a link, and
// without blocking on a pipe that was put in its place.
func readRegular(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ELOOP) {
		return nil, manifestFault(path, ErrManifestNotRegular, "it is a symbolic link")
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, damaged("its manifest is gone: %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("guest image manifest: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, manifestFault(path, ErrManifestNotRegular, "it is %s", kindOf(info.Mode()))
	}
	data, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err != nil {
		return nil, fmt.Errorf("guest image manifest: %w", err)
	}
	if len(data) > maxManifest {
		return nil, manifestFault(path, ErrManifestTooLarge, "")
	}
	return data, nil
}

func kindOf(m fs.FileMode) string {
	switch {
	case m.IsDir():
		return "a folder"
	case m&fs.ModeNamedPipe != 0:
		return "a pipe"
	case m&fs.ModeSocket != 0:
		return "a socket"
	case m&fs.ModeSymlink != 0:
		return "a symbolic link"
	}
	return "a device"
}

// parseManifest decodes by hand where encoding/json is lenient: it takes
// fields in any case and the last of two with one name.
func parseManifest(path string, data []byte) (Manifest, error) {
	var m Manifest
	fields := map[string]any{
		"schema": &m.Schema, "arch": &m.Arch, "image_id": &m.ImageID, "protocol": &m.Protocol,
		"sha256": &m.SHA256, "kernel_sha256": &m.KernelSHA256, "initramfs_sha256": &m.InitramfsSHA256,
		"data_sha256": &m.DataSHA256, "overlay_sha256": &m.OverlaySHA256,
	}
	syntax := func(err error) (Manifest, error) {
		return Manifest{}, manifestFault(path, ErrManifestSyntax, "%v", err)
	}
	if !utf8.Valid(data) {
		return syntax(errors.New("it is not UTF-8"))
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return syntax(fmt.Errorf("it does not begin with an object"))
	}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return syntax(err)
		}
		name, _ := t.(string)
		target, ok := fields[name]
		if !ok {
			return Manifest{}, manifestFault(path, ErrManifestField, "%.40q is unknown or there twice", name)
		}
		delete(fields, name)
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return syntax(err)
		}
		if err := json.Unmarshal(raw, target); err != nil || string(raw) == "null" {
			return Manifest{}, manifestFault(path, ErrManifestField, "%s has a value of the wrong type", name)
		}
	}
	if _, err := d.Token(); err != nil {
		return syntax(err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return Manifest{}, manifestFault(path, ErrManifestTrailing, "")
	}
	// The schema first: another one may well have other fields.
	if _, missing := fields["schema"]; !missing && m.Schema != schema {
		return Manifest{}, manifestFault(path, ErrManifestSchema, "it is %d, this version reads %d", m.Schema, schema)
	}
	for _, name := range fieldOrder {
		if _, missing := fields[name]; missing {
			return Manifest{}, manifestFault(path, ErrManifestField, "%s is missing", name)
		}
	}
	return m, m.check(path)
}

var fieldOrder = []string{"schema", "arch", "image_id", "protocol",
	"sha256", "kernel_sha256", "initramfs_sha256", "data_sha256", "overlay_sha256"}

var digestForm = regexp.MustCompile(`^[0-9a-f]{64}$`)

func (m Manifest) check(path string) error {
	if m.Arch != runtime.GOARCH {
		return manifestFault(path, ErrManifestArch, "it is for %.20q, this machine is %s", m.Arch, runtime.GOARCH)
	}
	if m.Protocol != guestapi.Protocol {
		return manifestFault(path, ErrManifestProtocol, "it speaks %d, this version speaks %d", m.Protocol, guestapi.Protocol)
	}
	for i, d := range m.digests() {
		if !digestForm.MatchString(d) {
			return manifestFault(path, ErrManifestDigest, "%s is not 64 lower-case hex digits", fieldOrder[4+i])
		}
	}
	if m.ImageID != m.id() {
		return manifestFault(path, ErrManifestID, "it says %.40q, they make %s", m.ImageID, m.id())
	}
	return nil
}

// digests are all digests in the order of their fields.
func (m Manifest) digests() []string {
	return []string{m.SHA256, m.KernelSHA256, m.InitramfsSHA256, m.DataSHA256, m.OverlaySHA256}
}

// id is the image id that belongs to a manifest: 24 hex digits of the sha256
// of everything else in it.
func (m Manifest) id() string {
	h := sha256.New()
	fmt.Fprintf(h, "warren guest image\n%d\n%s\n%d\n", m.Schema, m.Arch, m.Protocol)
	for _, d := range m.digests() {
		fmt.Fprintln(h, d)
	}
	return hex.EncodeToString(h.Sum(nil))[:24]
}

func (m Manifest) encode() []byte {
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		panic(err) // strings and numbers alone
	}
	return append(data, '\n')
}
