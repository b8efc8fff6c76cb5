package snapshots

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

// An archive is a tar in zstd. Its entries, in this order and no others:
//
//	warren-snapshot.json       archiveIndex
//	<id>/manifest.json         of each snapshot of the closure, what one needs
//	<id>/<file>…               before it; the files as the manifest lists them
//	image/<name>…              the guest image, if it was asked for
//	SHA256SUMS                 of all before it, as sha256sum writes them
const (
	indexName   = "warren-snapshot.json"
	sumsName    = "SHA256SUMS"
	imagePrefix = "image/"
)

// archiveIndex is the first entry.
type archiveIndex struct {
	Format int `json:"format"`
	// Snapshots are ids, what one needs before it; the last is the one that
	// was exported.
	Snapshots []string `json:"snapshots"`
	ImageID   string   `json:"image_id"`
}

func (x archiveIndex) last() string { return x.Snapshots[len(x.Snapshots)-1] }

func (x archiveIndex) encode() []byte {
	data, err := json.MarshalIndent(x, "", "  ")
	if err != nil {
		panic(err)
	}
	return append(data, '\n')
}

// decodeIndex takes exactly what encode writes.
func decodeIndex(data []byte, x *archiveIndex) error {
	var version struct{ Format int }
	if json.Unmarshal(data, &version) == nil && version.Format > format {
		return fmt.Errorf("the archive %w (format %d, this one reads %d); upgrade", ErrNewer, version.Format, format)
	}
	err := json.Unmarshal(data, x)
	if err == nil && (x.Format != format || !bytes.Equal(x.encode(), data)) {
		err = errors.New("it was not written by Warren")
	}
	if err == nil && (len(x.Snapshots) == 0 || len(x.Snapshots) > maxClosure) {
		err = fmt.Errorf("it names %d snapshots", len(x.Snapshots))
	}
	if err != nil {
		return wrong("%s: %w", indexName, err)
	}
	return nil
}

// ImageFile is a file of the guest image that goes into an archive.
type ImageFile struct {
	// Name is a plain file name, Path where it is.
	Name, Path string
}

// isImageName says whether a file of an image may have that name.
func isImageName(name string) bool {
	const first = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
	return name != "" && len(name) <= 100 && strings.Trim(name, first+"._-") == "" && strings.Contains(first, name[:1])
}

// ExportOptions are choices at Export.
type ExportOptions struct {
	// Image are the files of the guest image to add; nil for none.
	Image []ImageFile
}

// Export writes a snapshot with all that it needs as one archive. sn must
// stay open meanwhile. After an error what was written is of no use.
func (s *Store) Export(ctx context.Context, w io.Writer, sn *Snapshot, o ExportOptions) error {
	// The strongest usual level spends minutes on memory to save little.
	z, err := zstd.NewWriter(w, zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithEncoderCRC(true))
	if err != nil {
		return err
	}
	a := &archiveWriter{ctx: ctx, tar: tar.NewWriter(z), created: sn.n.m.Created}
	err = a.writeAll(sn, o)
	if err == nil {
		err = a.tar.Close()
	}
	// Closed in any case: it runs goroutines. Its own error is mostly the same.
	if closed := z.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return fmt.Errorf("export snapshot %s: %w", sn.ID(), err)
	}
	return nil
}

type archiveWriter struct {
	ctx     context.Context
	tar     *tar.Writer
	created time.Time // of all entries
	sums    bytes.Buffer
}

func (a *archiveWriter) writeAll(sn *Snapshot, o ExportOptions) error {
	index := archiveIndex{Format: format, ImageID: sn.n.m.ImageID}
	for _, n := range sn.c.order {
		index.Snapshots = append(index.Snapshots, n.m.ID)
	}
	if err := a.bytes(indexName, index.encode()); err != nil {
		return err
	}
	for _, n := range sn.c.order {
		if err := a.bytes(n.m.ID+"/"+manifestName, n.m.encode()); err != nil {
			return err
		}
		for _, f := range n.m.Files {
			if err := a.file(n.m.ID+"/"+f.Name, n.path(f.Name), f.Size); err != nil {
				return err
			}
		}
	}
	for _, f := range o.Image {
		if !isImageName(f.Name) {
			return fmt.Errorf("%.100q is no name for a file of a guest image", f.Name)
		}
		if err := a.file(imagePrefix+f.Name, f.Path, -1); err != nil {
			return err
		}
	}
	return a.bytes(sumsName, a.sums.Bytes())
}

func (a *archiveWriter) bytes(name string, data []byte) error {
	return a.entry(name, int64(len(data)), bytes.NewReader(data))
}

// file adds a file, of that size unless it is -1.
func (a *archiveWriter) file(name, path string, size int64) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() || size >= 0 && info.Size() != size {
		return fmt.Errorf("%s %w of %d bytes", path, errNotRegular, size)
	}
	return a.entry(name, info.Size(), f)
}

func (a *archiveWriter) entry(name string, size int64, r io.Reader) error {
	err := a.tar.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: name, Size: size, Mode: 0o600,
		ModTime: a.created.Truncate(time.Second), Format: tar.FormatGNU, // any size
	})
	if err != nil {
		return err
	}
	h := sha256.New()
	if n, err := io.Copy(a.tar, io.TeeReader(patient{a.ctx, io.LimitReader(r, size)}, h)); err != nil {
		return err
	} else if n != size {
		return fmt.Errorf("%s became shorter while it was read", name)
	}
	fmt.Fprint(&a.sums, sumLine(h, name))
	return nil
}

func sumLine(h hash.Hash, name string) string {
	return hex.EncodeToString(h.Sum(nil)) + "  " + name + "\n"
}

// patient is a reader that ends with its context.
type patient struct {
	ctx context.Context
	r   io.Reader
}

func (p patient) Read(b []byte) (int, error) {
	if p.ctx.Err() != nil {
		return 0, context.Cause(p.ctx)
	}
	return p.r.Read(b)
}
