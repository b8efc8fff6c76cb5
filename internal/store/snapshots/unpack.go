package snapshots

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

func (in *importer) readSnapshot(id string) error {
	h, err := in.expect(id + "/" + manifestName)
	if err != nil {
		return err
	}
	data, err := in.small(h, maxManifest)
	if err != nil {
		return err
	}
	m, err := parseManifest(id, data)
	if err != nil {
		return notWhole(err)
	}
	for _, need := range m.Needs() {
		known, ok := in.known[need]
		if !ok {
			return wrong("snapshot %s needs %s, which is not before it", id, need)
		}
		if !m.madeOn(known) {
			return wrong("snapshot %s was made on another %s than the one before it", id, need)
		}
	}
	in.known[id] = m
	d, err := in.draftOf(m)
	if err != nil {
		return err
	}
	for _, f := range m.Files {
		if err := in.readFile(d, id, f); err != nil {
			return err
		}
	}
	if d == nil {
		return nil
	}
	return notWhole(d.seal(in.ctx, m))
}

// draftOf is a draft for a snapshot that is not here yet, else nil.
func (in *importer) draftOf(m Manifest) (*Draft, error) {
	here, err := readManifest(in.s.folder(m.ID), m.ID)
	if err == nil && here.SHA256 == m.SHA256 {
		return nil, nil
	}
	if _, gone := os.Lstat(in.s.folder(m.ID)); gone == nil {
		return nil, fmt.Errorf("snapshot %s %w, and is not the one in the archive; delete it first (what is here: %w)",
			m.ID, ErrExists, cmpError(err))
	}
	d, err := in.s.Draft(in.ctx, m.ID)
	if err == nil {
		in.drafts = append(in.drafts, d)
	}
	return d, err
}

var errAnother = errors.New("another snapshot")

func cmpError(err error) error {
	if err == nil {
		return errAnother
	}
	return err
}

// readFile unpacks one file of a snapshot; without a draft it only reads.
func (in *importer) readFile(d *Draft, id string, f File) (err error) {
	h, err := in.expect(id + "/" + f.Name)
	if err != nil {
		return err
	}
	if h.Size != f.Size {
		return wrong("%s has %d bytes, its manifest says %d", h.Name, h.Size, f.Size)
	}
	var w *holeWriter
	if d != nil {
		file, err := in.s.disk.create(d.Path(f.Name), 0o600)
		if err != nil {
			return err
		}
		defer file.Close()
		w = &holeWriter{disk: in.s.disk, f: file}
	}
	if err := in.copy(h, w); err != nil || d == nil {
		return err
	}
	if err := in.s.disk.truncate(w.f, f.Size); err != nil {
		return err
	}
	if !f.Sparse {
		return nil
	}
	return in.s.own(d.Path(f.Name))
}

// copy reads a whole entry, into w if there is one.
func (in *importer) copy(h *tar.Header, w *holeWriter) error {
	sum := sha256.New()
	buf := make([]byte, 1<<20)
	for left := h.Size; left > 0; {
		n, err := io.ReadFull(in.tar, buf[:min(left, int64(len(buf)))])
		if err != nil {
			return in.fault(err)
		}
		sum.Write(buf[:n])
		if w != nil {
			if err := w.write(buf[:n]); err != nil {
				return err
			}
		}
		left -= int64(n)
	}
	in.note(sum, h.Name)
	return nil
}

// readImage hands a file of the guest image on.
func (in *importer) readImage(h *tar.Header, images int) error {
	name, ok := strings.CutPrefix(h.Name, imagePrefix)
	if !ok || !isImageName(name) {
		return wrong("it has %.100q, which belongs to nothing", h.Name)
	}
	if images >= maxImageFiles {
		return wrong("it has more than %d files of a guest image", maxImageFiles)
	}
	if in.o.Image == nil {
		return in.copy(h, nil)
	}
	sum := sha256.New()
	if err := in.o.Image(name, h.Size, io.TeeReader(in.tar, sum)); err != nil {
		return fmt.Errorf("guest image file %s: %w", name, err)
	}
	if _, err := io.Copy(sum, in.tar); err != nil {
		return in.fault(err)
	}
	in.note(sum, h.Name)
	return nil
}

// readEnd compares the sums and makes sure that nothing follows.
func (in *importer) readEnd(h *tar.Header) error {
	want := bytes.Clone(in.sums.Bytes())
	got, err := in.small(h, maxSums)
	if err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return wrong("%s is not that of its files", sumsName)
	}
	if _, err := in.tar.Next(); !errors.Is(err, io.EOF) {
		return wrong("something follows %s", sumsName)
	}
	// To the end of the stream: its last checksum is behind it.
	rest, err := io.ReadAll(io.LimitReader(in.z, 64<<10))
	if err != nil {
		return in.fault(err)
	}
	if len(bytes.Trim(rest, "\x00")) > 0 || len(rest) == 64<<10 {
		return wrong("something follows its end")
	}
	return nil
}
