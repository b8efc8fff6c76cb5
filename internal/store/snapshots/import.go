package snapshots

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"

	"github.com/klauspost/compress/zstd"

	"github.com/warren-vm/warren/internal/store"
)

var (
	// ErrArchive says that something is not a whole archive of Export.
	ErrArchive = errors.New("not a whole snapshot archive")
	// ErrTooLarge says that an archive unpacks to more than MaxBytes.
	ErrTooLarge = errors.New("unpacks to more than is allowed")
)

const (
	// defaultMaxBytes is what an import may unpack to unless it is told.
	defaultMaxBytes = 64 << 30
	// maxWindow bounds the memory that the archive can make the decoder take;
	// Export's window is 8 MiB.
	maxWindow = 32 << 20
	// maxImageFiles is well above what a guest image has.
	maxImageFiles = 64
	maxSums       = 1 << 20
)

// ImportOptions are choices at Import.
type ImportOptions struct {
	// MaxBytes bounds what the archive unpacks to, holes included; 0 is 64 GiB.
	MaxBytes int64
	// Image is given the files of the guest image, in order; nil skips them.
	// What it reads is not verified: the end of the archive may still be
	// missing. Its error ends the import.
	Image func(name string, size int64, r io.Reader) error
}

// Import reads an archive that may come from anyone and publishes what is in
// it, what a snapshot needs before it. Snapshots that are here already, with
// the same manifest, are left as they are.
//
// It returns the manifest of the snapshot that was exported. When it fails
// nothing new is there. ErrExists says that another snapshot has one of the
// ids, ErrTooLarge that there is more in it than o allows, ErrArchive that it is
// cut short or wrong; digests are proof of its wholeness, not of where it comes
// from.
func (s *Store) Import(ctx context.Context, r io.Reader, o ImportOptions) (Manifest, error) {
	m, err := s.importFrom(ctx, r, o)
	if err != nil {
		return Manifest{}, fmt.Errorf("import: %w", store.WithRemedy(err))
	}
	return m, nil
}

func (s *Store) importFrom(ctx context.Context, r io.Reader, o ImportOptions) (Manifest, error) {
	if o.MaxBytes == 0 {
		o.MaxBytes = defaultMaxBytes
	}
	z, err := zstd.NewReader(patient{ctx, r}, zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderLowmem(true))
	if err != nil {
		return Manifest{}, err
	}
	defer z.Close()
	in := &importer{s: s, ctx: ctx, o: o, z: z, tar: tar.NewReader(patient{ctx, z}), known: map[string]Manifest{}}
	defer in.discard()
	if err := in.read(); err != nil {
		return Manifest{}, err
	}
	if err := in.publish(); err != nil {
		return Manifest{}, err
	}
	return in.known[in.index.last()], nil
}

type importer struct {
	s   *Store
	ctx context.Context
	o   ImportOptions
	z   io.Reader
	tar *tar.Reader

	index  archiveIndex
	known  map[string]Manifest // those read so far
	drafts []*Draft            // sealed, in order
	total  int64
	sums   bytes.Buffer
}

func (in *importer) discard() {
	for _, d := range in.drafts {
		_ = d.Discard()
	}
}

func wrong(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrArchive, fmt.Errorf(format, args...))
}

// notWhole is err of a snapshot that is only in the archive: what to do about
// a damaged one here is no advice for it.
func notWhole(err error) error {
	if d := (*damage)(nil); errors.As(err, &d) {
		return wrong("snapshot %s in it: %w", d.id, d.err)
	}
	return err
}

// read takes the whole archive into drafts.
func (in *importer) read() error {
	if err := in.readIndex(); err != nil {
		return err
	}
	for _, id := range in.index.Snapshots {
		if err := in.readSnapshot(id); err != nil {
			return err
		}
	}
	if err := in.checkWhole(); err != nil {
		return err
	}
	for images := 0; ; images++ {
		h, err := in.next()
		if err != nil {
			return err
		}
		if h.Name == sumsName {
			return in.readEnd(h)
		}
		if err := in.readImage(h, images); err != nil {
			return err
		}
	}
}

// next is the next entry, which has to be a plain file.
func (in *importer) next() (*tar.Header, error) {
	h, err := in.tar.Next()
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, in.fault(err)
	}
	if h.Typeflag != tar.TypeReg || len(h.PAXRecords) > 0 || h.Size < 0 {
		return nil, wrong("%.100q is not a plain file", h.Name)
	}
	if in.total += h.Size; h.Size > in.o.MaxBytes || in.total > in.o.MaxBytes {
		return nil, fmt.Errorf("the archive %w (%d bytes)", ErrTooLarge, in.o.MaxBytes)
	}
	return h, nil
}

// fault tells the end of our patience from the archive's faults.
func (in *importer) fault(err error) error {
	if in.ctx.Err() != nil {
		return context.Cause(in.ctx)
	}
	return wrong("%w", err)
}

// expect is next, of that name.
func (in *importer) expect(name string) (*tar.Header, error) {
	h, err := in.next()
	if err == nil && h.Name != name {
		err = wrong("it has %.100q where %s belongs", h.Name, name)
	}
	return h, err
}

// small reads a whole entry and notes its sum.
func (in *importer) small(h *tar.Header, most int64) ([]byte, error) {
	if h.Size > most {
		return nil, wrong("%s has %d bytes; the most is %d", h.Name, h.Size, most)
	}
	data, err := io.ReadAll(in.tar)
	if err != nil {
		return nil, in.fault(err)
	}
	sum := sha256.New()
	sum.Write(data)
	in.note(sum, h.Name)
	return data, nil
}

func (in *importer) note(h hash.Hash, name string) { in.sums.WriteString(sumLine(h, name)) }

func (in *importer) readIndex() error {
	h, err := in.expect(indexName)
	if err != nil {
		return err
	}
	data, err := in.small(h, maxManifest)
	if err != nil {
		return err
	}
	if err := decodeIndex(data, &in.index); err != nil {
		return err
	}
	for i, id := range in.index.Snapshots {
		if CheckID(id) != nil || slices.Contains(in.index.Snapshots[:i], id) {
			return wrong("%s names snapshot %.80q, which is no id or there twice", indexName, id)
		}
	}
	return nil
}

// checkWhole makes sure that nothing rides along that the last snapshot does
// not need.
func (in *importer) checkWhole() error {
	last := in.index.last()
	if got := in.known[last].ImageID; got != in.index.ImageID {
		return wrong("it names image %.80q, its snapshot %s", in.index.ImageID, got)
	}
	needed := map[string]bool{last: true}
	for _, id := range slices.Backward(in.index.Snapshots) {
		if !needed[id] {
			return wrong("snapshot %s needs no %s", last, id)
		}
		for _, need := range in.known[id].Needs() {
			needed[need] = true
		}
	}
	return nil
}

// publish gives all drafts their names, or none.
func (in *importer) publish() error {
	var done []*Snapshot
	for _, d := range in.drafts {
		sn, err := d.commit(in.ctx)
		if err == nil {
			sn.c.releaseAllBut(sn.n)
			done = append(done, sn)
			continue
		}
		for _, sn := range slices.Backward(done) {
			err = errors.Join(err, sn.Close())
		}
		for _, sn := range slices.Backward(done) {
			err = errors.Join(err, in.s.Delete(context.WithoutCancel(in.ctx), sn.ID()))
		}
		return fmt.Errorf("publish snapshot %s: %w", d.id, err)
	}
	for _, sn := range done {
		if err := sn.Close(); err != nil {
			return err
		}
	}
	return nil
}
