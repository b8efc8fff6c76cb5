package files

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// ArchiveError says what is wrong with an archive.
type ArchiveError struct {
	Entry string // empty: the archive itself
	Why   string
}

func (e *ArchiveError) Error() string {
	if e.Entry == "" {
		return "archive: " + e.Why
	}
	return fmt.Sprintf("archive entry %q: %s", e.Entry, e.Why)
}

// Unpack unpacks a tar archive into the folder path, which must exist.
//
// No entry reaches a file outside path, whatever it is called and whatever
// links are in its way: absolute names, "..", a name that passes through a
// link leading out, and a hard link to something outside are refused.
// A symbolic link may name anything, since a link that is only data harms
// nobody and environments are full of absolute ones; it is not followed out.
// Devices, pipes, sparse files and other special entries are refused.
//
// What is there is replaced, but a folder is only added to and never replaced
// by a file. All belongs to owner, or to the ids in the archive when owner is
// nil. Unpack stops at the first fault and leaves what it has unpacked; an
// archive that ends early is a fault.
func Unpack(r io.Reader, path string, owner *Owner) error {
	if err := check(path); err != nil {
		return err
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return err
	}
	u := &unpacker{root: root, owner: owner, ids: os.Geteuid() == 0}
	defer u.close()
	tr := tar.NewReader(r)
	for n := 0; ; n++ {
		h, err := tr.Next()
		if err == io.EOF {
			return u.finish()
		}
		if err != nil {
			return archiveFault(err)
		}
		if n == maxArchiveEntries {
			return &ArchiveError{"", fmt.Sprintf("more than %d entries; unpack it in parts", maxArchiveEntries)}
		}
		if err := u.entry(h, tr); err != nil {
			return err
		}
	}
}

// archiveFault tells a bad archive from a transfer that failed.
func archiveFault(err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, tar.ErrFieldTooLong) {
		return &ArchiveError{"", "not a tar archive, or damaged"}
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return &ArchiveError{"", "ends in the middle"}
	}
	return err
}

type unpacker struct {
	root  *os.Root
	owner *Owner
	ids   bool // the agent may give files away

	// parent is the folder of the last file: opening it again for each of a
	// thousand files would walk its path a thousand times. Entries that
	// could change what its name means drop it.
	parent     *os.Root
	parentName string

	// Folders get mode and time at the end: making files inside changes the
	// time and may need a permission that the archive takes away.
	dirs []folder
}

// folder is the part of a folder's header that finish needs.
type folder struct {
	name     string
	mode     fs.FileMode
	mtime    time.Time
	uid, gid int
}

func folderOf(h *tar.Header) folder {
	return folder{h.Name, h.FileInfo().Mode(), modTime(h), h.Uid, h.Gid}
}

func (u *unpacker) close() {
	u.dropParent()
	u.root.Close()
}

func (u *unpacker) dropParent() {
	if u.parent != nil {
		u.parent.Close()
	}
	u.parent, u.parentName = nil, ""
}

func (u *unpacker) entry(h *tar.Header, content io.Reader) error {
	name, err := localName(h.Name)
	if err != nil {
		return err
	}
	if isSparse(h) {
		return &ArchiveError{h.Name, "is sparse; pack it without its holes named (tar without -S)"}
	}
	switch h.Typeflag {
	case tar.TypeReg:
		err = u.file(name, h, content)
	case tar.TypeDir:
		err = u.dir(name, h)
	case tar.TypeSymlink, tar.TypeLink:
		err = u.link(name, h)
	case tar.TypeXGlobalHeader:
		return nil // comments for the whole archive, as git makes them
	default:
		return &ArchiveError{h.Name, "is no file, folder or link (type " + string(h.Typeflag) + ")"}
	}
	if err != nil {
		return entryFault(h.Name, err)
	}
	return nil
}

// isSparse tells of a file whose holes are only named: a hundred bytes of
// archive could fill the disk.
func isSparse(h *tar.Header) bool {
	if h.Typeflag == tar.TypeGNUSparse {
		return true
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return false
}

// localName is name inside the target.
func localName(name string) (string, error) {
	switch {
	case strings.HasPrefix(name, "/"):
		return "", &ArchiveError{name, "has an absolute name"}
	case strings.IndexByte(name, 0) >= 0 || name == "":
		return "", &ArchiveError{name, "has no valid name"}
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", &ArchiveError{name, `has ".." in its name`}
		}
	}
	return filepath.Clean(name), nil
}

// entryFault names the entry. An error without an errno under it comes from
// os.Root itself, which found the way leading out.
func entryFault(name string, err error) error {
	var fault *ArchiveError
	var errno syscall.Errno
	switch {
	case errors.As(err, &fault):
		return err
	case errors.Is(err, io.ErrUnexpectedEOF), errors.As(err, &errno):
		return fmt.Errorf("archive entry %q: %w", name, err)
	case strings.Contains(err.Error(), "escapes from parent"):
		return &ArchiveError{name, "would leave the target through a link"}
	default:
		return fmt.Errorf("archive entry %q: %w", name, err)
	}
}

// in returns the folder that holds name, made if need be, and name's last
// part.
func (u *unpacker) in(name string) (*os.Root, string, error) {
	dir, base := filepath.Split(name)
	dir = filepath.Clean(dir)
	if dir == "." {
		return u.root, base, nil
	}
	if u.parent != nil && u.parentName == dir {
		return u.parent, base, nil
	}
	u.dropParent()
	parent, err := u.root.OpenRoot(dir)
	if errors.Is(err, fs.ErrNotExist) {
		if err = u.makeParents(dir); err == nil {
			parent, err = u.root.OpenRoot(dir)
		}
	}
	if err != nil {
		return nil, "", err
	}
	u.parent, u.parentName = parent, dir
	return parent, base, nil
}

// makeParents makes folders that the archive has no entries for.
func (u *unpacker) makeParents(dir string) error {
	var made string
	for part := range strings.SplitSeq(dir, "/") {
		made = filepath.Join(made, part)
		err := u.root.Mkdir(made, 0o755)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return err
		}
		if u.owner != nil && u.ids {
			if err := u.root.Lchown(made, u.owner.UID, u.owner.GID); err != nil {
				return err
			}
		}
	}
	return nil
}

func (u *unpacker) file(name string, h *tar.Header, content io.Reader) error {
	in, base, err := u.in(name)
	if err != nil {
		return err
	}
	// O_EXCL: never write through a link or into a file with other names.
	const flags = os.O_WRONLY | os.O_CREATE | os.O_EXCL
	file, err := in.OpenFile(base, flags, 0o600)
	if errors.Is(err, fs.ErrExist) {
		if err := u.clear(in, base); err != nil {
			return err
		}
		file, err = in.OpenFile(base, flags, 0o600)
	}
	if err != nil {
		return err
	}
	defer file.Close()
	if _, err := copyBuffered(file, content); err != nil {
		return err
	}
	if uid, gid, ok := u.idsOf(h.Uid, h.Gid); ok {
		if err := file.Chown(uid, gid); err != nil {
			return err
		}
	}
	if err := syscall.Fchmod(int(file.Fd()), uint32(h.Mode)&0o7777); err != nil {
		return err
	}
	if err := file.Close(); err != nil {
		return err
	}
	return in.Chtimes(base, time.Time{}, modTime(h))
}

// modTime is the entry's time; one that no file system can hold is now.
func modTime(h *tar.Header) time.Time {
	if s := h.ModTime.Unix(); s < -1<<31 || s > 1<<34 {
		return time.Now()
	}
	return h.ModTime
}

// clear removes what is at base, unless it is a folder.
func (u *unpacker) clear(in *os.Root, base string) error {
	info, err := in.Lstat(base)
	if err != nil {
		return err
	}
	if info.IsDir() {
		return syscall.EISDIR
	}
	u.dropIf(in)
	return in.Remove(base)
}

// dropIf forgets the parent when something in the tree is replaced, unless it
// is the very folder in use, which an entry inside it cannot rename.
func (u *unpacker) dropIf(in *os.Root) {
	if in != u.parent {
		u.dropParent()
	}
}

func (u *unpacker) dir(name string, h *tar.Header) error {
	if name == "." {
		u.dirs = append(u.dirs, folderOf(h))
		return nil
	}
	in, base, err := u.in(name)
	if err != nil {
		return err
	}
	err = in.Mkdir(base, 0o700)
	if errors.Is(err, fs.ErrExist) {
		info, statErr := in.Lstat(base)
		if statErr != nil {
			return statErr
		}
		if info.IsDir() {
			u.dirs = append(u.dirs, folderOf(h))
			return nil
		}
		if err := u.clear(in, base); err != nil {
			return err
		}
		err = in.Mkdir(base, 0o700)
	}
	if err != nil {
		return err
	}
	u.dirs = append(u.dirs, folderOf(h))
	return nil
}

func (u *unpacker) link(name string, h *tar.Header) error {
	if h.Typeflag == tar.TypeLink {
		return u.hardLink(name, h)
	}
	in, base, err := u.in(name)
	if err != nil {
		return err
	}
	err = in.Symlink(h.Linkname, base)
	if errors.Is(err, fs.ErrExist) {
		if err := u.clear(in, base); err != nil {
			return err
		}
		err = in.Symlink(h.Linkname, base)
	}
	if err != nil {
		return err
	}
	if uid, gid, ok := u.idsOf(h.Uid, h.Gid); ok {
		return in.Lchown(base, uid, gid)
	}
	return nil
}

func (u *unpacker) hardLink(name string, h *tar.Header) error {
	old, err := localName(h.Linkname)
	if err != nil {
		return &ArchiveError{h.Name, "is a hard link to something outside the target"}
	}
	if old == name {
		return nil
	}
	if _, _, err := u.in(name); err != nil { // makes the parents
		return err
	}
	err = u.root.Link(old, name)
	if errors.Is(err, fs.ErrExist) {
		in, base, inErr := u.in(name)
		if inErr != nil {
			return inErr
		}
		if err := u.clear(in, base); err != nil {
			return err
		}
		err = u.root.Link(old, name)
	}
	return err
}

// finish gives the folders their owner, mode and time, innermost first.
func (u *unpacker) finish() error {
	u.dropParent()
	for i := len(u.dirs) - 1; i >= 0; i-- {
		d := u.dirs[i]
		name := filepath.Clean(d.name)
		info, err := u.root.Lstat(name)
		if err != nil || !info.IsDir() {
			continue // replaced by a later entry
		}
		if uid, gid, ok := u.idsOf(d.uid, d.gid); ok {
			if err := u.root.Lchown(name, uid, gid); err != nil {
				return entryFault(d.name, err)
			}
		}
		if err := u.root.Chmod(name, d.mode); err != nil {
			return entryFault(d.name, err)
		}
		if err := u.root.Chtimes(name, time.Time{}, d.mtime); err != nil {
			return entryFault(d.name, err)
		}
	}
	return nil
}

// idsOf is whom an entry with these ids will belong to, if it is ours to say.
func (u *unpacker) idsOf(uid, gid int) (int, int, bool) {
	switch {
	case !u.ids:
		return 0, 0, false
	case u.owner != nil:
		return u.owner.UID, u.owner.GID, true
	default:
		return uid, gid, true
	}
}
