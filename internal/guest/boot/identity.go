package boot

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/guestapi"
)

// identityFiles are the files that show a machine's identity. They are kept
// open: a copy's are written where they are, which takes an emulated processor
// 15 ms less than new files would, and works when the guest has left no room
// for new ones.
type identityFiles struct {
	root                  string // "" is the machine's own
	machineID, generation identityFile
}

// put gives the machine its name, machine id and generation. No program runs
// meanwhile. The generation is last: who sees it change finds all else new.
func (fs *identityFiles) put(id guestapi.Identity) error {
	if err := unix.Sethostname([]byte(id.Hostname)); err != nil {
		return os.NewSyscallError("set hostname", err)
	}
	return fs.write(id)
}

func (fs *identityFiles) write(id guestapi.Identity) error {
	machineID := []byte(id.MachineID + "\n")
	if err := fs.machineID.write(fs.root+guestapi.MachineIDFile, machineID); err != nil {
		return err
	}
	if err := replaceMachineID(fs.root+"/etc/machine-id", machineID); err != nil {
		return err
	}
	generation := strconv.FormatUint(id.Generation, 10) + "\n"
	return fs.generation.write(fs.root+guestapi.GenerationFile, []byte(generation))
}

// replaceMachineID writes to /etc/machine-id if it is not ours. On our root
// disk it is a link to our file, but a program may have put a file in its place
// before it was copied with its machine, or mounted one over it. What is not a
// file holds no id.
func replaceMachineID(path string, machineID []byte) error {
	if target, err := os.Readlink(path); err == nil && target == guestapi.MachineIDFile {
		return nil
	}
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG && st.Mode&unix.S_IFMT != unix.S_IFLNK {
		return nil
	}
	err := writeWhole(path, machineID)
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	mounted := identityFile{}
	if err := mounted.open(path); err != nil {
		return err
	}
	defer mounted.close()
	return mounted.overwrite(path, machineID)
}

// identityFile is a file that stays open from its first writing. The zero value
// is one that was not written yet.
type identityFile struct {
	isOpen bool
	fd     int
}

// write makes the file at path hold data: where it is, if nobody put another
// in its place.
func (f *identityFile) write(path string, data []byte) error {
	if f.isOpen {
		var ours, there unix.Stat_t
		if unix.Fstat(f.fd, &ours) == nil && unix.Lstat(path, &there) == nil && ours.Dev == there.Dev && ours.Ino == there.Ino {
			return f.overwrite(path, data)
		}
		f.close()
	}
	dir := filepath.Dir(path)
	if err := unix.Mkdir(dir, 0o755); err != nil && err != unix.EEXIST {
		return &os.PathError{Op: "mkdir", Path: dir, Err: err}
	}
	if err := writeWhole(path, data); err != nil {
		return err
	}
	return f.open(path)
}

func (f *identityFile) open(path string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	f.isOpen, f.fd = true, fd
	return nil
}

func (f *identityFile) overwrite(path string, data []byte) error {
	n, err := unix.Pwrite(f.fd, data, 0)
	if err == nil && n < len(data) {
		err = unix.ENOSPC
	}
	if err == nil {
		err = unix.Ftruncate(f.fd, int64(len(data)))
	}
	if err != nil {
		return &os.PathError{Op: "write", Path: path, Err: err}
	}
	return nil
}

func (f *identityFile) close() {
	if f.isOpen {
		unix.Close(f.fd)
	}
	f.isOpen = false
}

// writeWhole replaces a file. Plain system calls: everything else that package
// os does has to be translated first in a copy whose processor is emulated, and
// that took 20 ms.
func writeWhole(path string, data []byte) error {
	temporary := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".new")
	fd, err := unix.Open(temporary, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC|unix.O_CLOEXEC, 0o444)
	if err != nil {
		return &os.PathError{Op: "open", Path: temporary, Err: err}
	}
	n, err := unix.Write(fd, data)
	if closed := unix.Close(fd); err == nil {
		err = closed
	}
	if err == nil && n < len(data) {
		err = unix.ENOSPC
	}
	if err == nil {
		err = unix.Rename(temporary, path)
	}
	if err != nil {
		unix.Unlink(temporary)
		return &os.PathError{Op: "replace", Path: path, Err: err}
	}
	return nil
}
