package snapshots

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/digest"
)

// stamp is what a file was when its digest was last computed. An equal one
// proves an unchanged file: nobody but root can set the change time back.
type stamp struct {
	Size       int64  `json:"size"`
	Inode      uint64 `json:"inode"`
	ChangedNS  int64  `json:"changed_ns"`
	ModifiedNS int64  `json:"modified_ns"`
}

// stamps are those of the files of one snapshot.
type stamps struct {
	// Manifest is its digest: a stamp of another snapshot proves nothing.
	Manifest string           `json:"manifest"`
	Files    map[string]stamp `json:"files"`
}

var errNotRegular = errors.New("is not a regular file")

// look takes the stamp of a file as it is now, and the bytes it has on disk.
func look(path string) (stamp, int64, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return stamp{}, 0, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return stamp{}, 0, fmt.Errorf("%s %w", path, errNotRegular)
	}
	return stamp{st.Size, st.Ino, st.Ctim.Nano(), st.Mtim.Nano()}, st.Blocks * 512, nil
}

// readStamps reads those that belong to a manifest; none is no error.
func readStamps(path, manifest string) stamps {
	fresh := stamps{Manifest: manifest, Files: map[string]stamp{}}
	data, err := readSmall(path)
	if err != nil {
		return fresh
	}
	var was stamps
	if json.Unmarshal(data, &was) != nil || was.Manifest != manifest || was.Files == nil {
		return fresh
	}
	return was
}

func (s stamps) encode() []byte {
	data, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	return append(data, '\n')
}

// compute is the digest of a file as its manifest has it.
func compute(ctx context.Context, path string, sparse bool) (string, error) {
	if sparse {
		return digest.Sparse(ctx, path)
	}
	return digest.File(ctx, path)
}

// proof says what makes a file count as unchanged.
type proof int

const (
	byStamp proof = iota
	byDigest
)

// check makes sure that the named files of a held snapshot are what its
// manifest says. What it had to read it stamps anew; a home that cannot be
// written costs the digests each time, no more.
func (n *node) check(ctx context.Context, names []string, by proof, progress func(string)) error {
	known := readStamps(n.path(stampName), n.m.SHA256)
	learnt := false
	for _, name := range names {
		f := n.m.file(name)
		is, _, err := look(n.path(name))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return damaged(n.m.ID, "%s is missing", n.path(name))
		case errors.Is(err, errNotRegular):
			return damaged(n.m.ID, "%w", err)
		case err != nil:
			return fmt.Errorf("snapshot %s: %w", n.m.ID, err)
		case is.Size != f.Size:
			return damaged(n.m.ID, "%s has %d bytes, its manifest says %d", n.path(name), is.Size, f.Size)
		}
		if by == byStamp && known.Files[name] == is {
			continue
		}
		progress("reading " + name + " of snapshot " + n.m.ID)
		if is, err = n.read(ctx, f, is); err != nil {
			return err
		}
		known.Files[name], learnt = is, true
	}
	if learnt {
		_ = store.WriteVolatile(n.path(stampName), known.encode(), 0o600)
	}
	return nil
}

// maxReads is how often a file is read that changes meanwhile. Another process
// that opens the snapshot may give it to QEMU's user: its times change then,
// and its bytes do not.
const maxReads = 5

// read computes the digest of one file whose stamp was is, and returns the
// stamp it had while it was read.
func (n *node) read(ctx context.Context, f File, is stamp) (stamp, error) {
	path := n.path(f.Name)
	for range maxReads {
		got, err := compute(ctx, path, f.Sparse)
		if errors.Is(err, unix.EIO) {
			return is, damaged(n.m.ID, "%w", err)
		}
		if err != nil {
			return is, fmt.Errorf("verify snapshot %s: %w", n.m.ID, err)
		}
		if got != f.SHA256 {
			return is, damaged(n.m.ID, "%s has the digest %s, its manifest says %s", path, got, f.SHA256)
		}
		after, _, err := look(path)
		if err != nil {
			return is, damaged(n.m.ID, "%w", err)
		}
		if after == is {
			return is, nil
		}
		is = after
	}
	return is, damaged(n.m.ID, "%s changes while it is read", filepath.Base(path))
}
