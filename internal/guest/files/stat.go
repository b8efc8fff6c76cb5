package files

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/warren-vm/warren/internal/guestapi"
)

// Limits of List.
const (
	defaultEntries = 10_000
	maxEntries     = 100_000
	// maxListBytes keeps the answer, as JSON, under guestapi.List's bound:
	// a byte of a name can take six ("\u0001").
	maxListBytes = 15 << 20
	entryBytes   = 200 // an entry without its names
)

// BadPathError says that a path cannot be meant.
type BadPathError struct{ Path, Why string }

func (e *BadPathError) Error() string { return fmt.Sprintf("path %q: %s", e.Path, e.Why) }

func check(path string) error {
	switch {
	case !filepath.IsAbs(path):
		return &BadPathError{path, "not absolute"}
	case strings.IndexByte(path, 0) >= 0:
		return &BadPathError{path, "holds a zero byte"}
	}
	return nil
}

// Stat describes path itself; a link is not followed.
func Stat(path string) (guestapi.FileInfo, error) {
	if err := check(path); err != nil {
		return guestapi.FileInfo{}, err
	}
	info, err := os.Lstat(path)
	if err != nil {
		return guestapi.FileInfo{}, err
	}
	return describe(path, info), nil
}

func describe(path string, info fs.FileInfo) guestapi.FileInfo {
	f := guestapi.FileInfo{
		Name:  info.Name(),
		Size:  info.Size(),
		Type:  kind(info.Mode()),
		MTime: info.ModTime().Unix(),
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		f.Mode, f.UID, f.GID = st.Mode&0o7777, st.Uid, st.Gid
	}
	if f.Type == "symlink" {
		f.Link, _ = os.Readlink(path) // gone since: no target to show
	}
	return f
}

func kind(m fs.FileMode) string {
	switch {
	case m.IsRegular():
		return "file"
	case m.IsDir():
		return "dir"
	case m&fs.ModeSymlink != 0:
		return "symlink"
	case m&fs.ModeNamedPipe != 0:
		return "pipe"
	case m&fs.ModeSocket != 0:
		return "socket"
	default:
		return "device"
	}
}

// List describes what is in the folder, by name, the first limit entries
// (0: 10,000). A folder of any size is read in bounded memory.
func List(path string, limit int) (guestapi.ListInfo, error) {
	if err := check(path); err != nil {
		return guestapi.ListInfo{}, err
	}
	switch {
	case limit < 0 || limit > maxEntries:
		return guestapi.ListInfo{}, &BadPathError{path, fmt.Sprintf("limit %d is not in 0 to %d", limit, maxEntries)}
	case limit == 0:
		limit = defaultEntries
	}
	names, truncated, err := firstNames(path, limit)
	if err != nil {
		return guestapi.ListInfo{}, err
	}
	list := guestapi.ListInfo{Entries: make([]guestapi.FileInfo, 0, len(names)), Truncated: truncated}
	bytes := 0
	for _, name := range names {
		full := filepath.Join(path, name)
		info, err := os.Lstat(full)
		if err != nil {
			continue // removed since it was listed
		}
		entry := describe(full, info)
		bytes += entryBytes + jsonLen(entry.Name) + jsonLen(entry.Link)
		if bytes > maxListBytes {
			list.Truncated = true
			break
		}
		list.Entries = append(list.Entries, entry)
	}
	return list, nil
}

// jsonLen is at least the length of s inside a JSON document.
func jsonLen(s string) int {
	n := len(s)
	for i := range len(s) {
		if c := s[i]; c < ' ' || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&' || c >= 0x7f {
			n += 5
		}
	}
	return n
}

// firstNames returns the first limit names of a folder in order, and whether
// there are more.
func firstNames(path string, limit int) (names []string, more bool, err error) {
	dir, err := os.Open(path)
	if err != nil {
		return nil, false, err
	}
	defer dir.Close()
	for {
		batch, err := dir.Readdirnames(1024)
		names = append(names, batch...)
		if len(names) > 2*limit+1024 || err != nil {
			slices.Sort(names)
			if len(names) > limit {
				clear(names[limit:])
				names, more = names[:limit], true
			}
		}
		if err == io.EOF {
			return names, more, nil
		}
		if err != nil {
			return nil, false, err
		}
	}
}

// Remove removes path, with recursive a folder with all that is in it. Links
// are removed, never followed.
func Remove(path string, recursive bool) error {
	if err := check(path); err != nil {
		return err
	}
	if filepath.Clean(path) == "/" {
		return &BadPathError{path, "is the root of the file system"}
	}
	if !recursive {
		return os.Remove(path)
	}
	if _, err := os.Lstat(path); err != nil {
		return err // RemoveAll is content with what is not there
	}
	return os.RemoveAll(path)
}
