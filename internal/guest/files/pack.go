package files

import (
	"archive/tar"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// maxArchiveEntries bounds an archive in either direction.
const maxArchiveEntries = 1 << 20

// CanPack tells early whether Pack has something to pack.
func CanPack(path string) error {
	if err := check(path); err != nil {
		return err
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !info.IsDir() && !info.Mode().IsRegular() {
		return &BadPathError{path, "is no file or folder but a " + kind(info.Mode())}
	}
	return nil
}

// Pack writes path as a tar archive. Names are relative to path, which is
// itself the entry "./"; a single file is one entry with its own name.
//
// Links are packed as links; two names of one file as one file and a hard
// link. Sockets, pipes and devices hold nothing that could be packed and are
// left out, as are other file systems mounted below path. A file that shrinks
// while it is read is an error, one that grows is cut at the size it had.
func Pack(w io.Writer, path string) error {
	if err := CanPack(path); err != nil {
		return err
	}
	// The name a caller gives may be a link; what is below never is followed.
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	p := packer{tw: tar.NewWriter(w), links: map[inode]string{}}
	info, err := os.Lstat(real)
	if err != nil {
		return err
	}
	p.dev = info.Sys().(*syscall.Stat_t).Dev
	if info.IsDir() {
		err = p.tree(real)
	} else {
		err = p.entry(real, filepath.Base(path), info)
	}
	if err != nil {
		return err
	}
	return p.tw.Close()
}

type inode struct{ dev, ino uint64 }

type packer struct {
	tw      *tar.Writer
	dev     uint64
	entries int
	links   map[inode]string // files with several names, by the first one packed
}

func (p *packer) tree(root string) error {
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return gone(err, path == root)
		}
		info, err := d.Info()
		if err != nil {
			return gone(err, path == root)
		}
		if info.Sys().(*syscall.Stat_t).Dev != p.dev && info.IsDir() {
			return fs.SkipDir
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		return p.entry(path, name, info)
	})
}

// gone makes nothing of a file that was removed during the walk.
func gone(err error, isRoot bool) error {
	if os.IsNotExist(err) && !isRoot {
		return nil
	}
	return err
}

func (p *packer) entry(path, name string, info fs.FileInfo) error {
	if p.entries++; p.entries > maxArchiveEntries {
		return fmt.Errorf("%s: more than %d files; pack a folder inside it", path, maxArchiveEntries)
	}
	var link string
	switch mode := info.Mode(); {
	case mode&fs.ModeSymlink != 0:
		var err error
		if link, err = os.Readlink(path); err != nil {
			return gone(err, false)
		}
	case !mode.IsRegular() && !mode.IsDir():
		return nil
	}
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	h.Name, h.Format = name, tar.FormatPAX
	// Only what a later Unpack uses: the other times would double the size
	// of every small entry.
	h.AccessTime, h.ChangeTime = time.Time{}, time.Time{}
	h.Uname, h.Gname = "", ""
	if info.IsDir() {
		h.Name += "/"
	}
	st := info.Sys().(*syscall.Stat_t)
	if info.Mode().IsRegular() && st.Nlink > 1 {
		key := inode{st.Dev, st.Ino}
		if first, ok := p.links[key]; ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
			return p.tw.WriteHeader(h)
		}
		p.links[key] = name
	}
	if !info.Mode().IsRegular() {
		return p.tw.WriteHeader(h)
	}
	return p.content(path, h)
}

func (p *packer) content(path string, h *tar.Header) error {
	file, err := Open(path, 0)
	if err != nil {
		return gone(err, false)
	}
	defer file.Close()
	if err := p.tw.WriteHeader(h); err != nil {
		return err
	}
	n, err := copyBuffered(p.tw, io.LimitReader(file, h.Size))
	if err == nil && n < h.Size {
		err = fmt.Errorf("%s: shrank from %d to %d bytes while it was packed", path, h.Size, n)
	}
	return err
}
