package guestimage

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// stamp is how the files of a generation looked when their digests were last
// computed, in the order of Image.files. It is compared whole.
type stamp [5]fileStamp

type fileStamp struct {
	Size  int64  `json:"size"`
	Inode uint64 `json:"inode"`
	// ChangedNS is the change time: unlike the modification time nobody but
	// root can set it back.
	ChangedNS int64 `json:"changed_ns"`
}

// look takes the stamp of the files as they are now.
func (img *Image) look() (stamp, error) {
	var s stamp
	for i, f := range img.files() {
		var st unix.Stat_t
		err := unix.Lstat(f.path, &st)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return s, damaged("the %s %s is missing", f.what, f.path)
		case err != nil:
			return s, fmt.Errorf("guest image: %s: %w", f.path, err)
		case st.Mode&unix.S_IFMT != unix.S_IFREG:
			return s, damaged("the %s %s is not a regular file", f.what, f.path)
		}
		s[i] = fileStamp{Size: st.Size, Inode: st.Ino, ChangedNS: st.Ctim.Nano()}
	}
	return s, nil
}

// stamped says whether the files are as they were when last verified.
func (img *Image) stamped() bool {
	data, err := os.ReadFile(filepath.Join(img.Dir, stampName))
	if err != nil {
		return false
	}
	var was stamp
	if json.Unmarshal(data, &was) != nil {
		return false
	}
	is, err := img.look()
	return err == nil && is == was
}

// record writes a stamp. A home that cannot be written costs the digests on
// each start, no more.
func (img *Image) record(s stamp) {
	data, err := json.Marshal(s)
	if err != nil {
		return
	}
	_ = writeWhole(filepath.Join(img.Dir, stampName), append(data, '\n'), 0o600)
}

// stamps are generations whose stamps are right, during a build. Generations
// share files by hard link, and to make or remove one link changes the change
// time of them all; without a renewal each build would cost the next start
// its digests.
type stamps map[*Image]stamp

// rightStamps finds the generations with right stamps.
func rightStamps(home string) stamps {
	right := stamps{}
	entries, _ := os.ReadDir(guestDir(home))
	for _, e := range entries {
		if !generationName.MatchString(e.Name()) {
			continue
		}
		if img, err := load(home, e.Name()); err == nil && img.stamped() {
			right.add(img)
		}
	}
	return right
}

// add notes one that was verified just now.
func (r stamps) add(img *Image) {
	if s, err := img.look(); err == nil {
		r[img] = s
	}
}

// renew records those that are still there, if nothing but the change times
// is new.
func (r stamps) renew() {
	for img, was := range r {
		is, err := img.look()
		if err != nil {
			continue
		}
		same := true
		for i := range is {
			same = same && is[i].Size == was[i].Size && is[i].Inode == was[i].Inode
		}
		if same {
			img.record(is)
		}
	}
}

// writeWhole writes a file beside its name, flushes it and renames it.
func writeWhole(path string, data []byte, perm os.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(perm), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}
