package rootdisk

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/warren-vm/warren/internal/guestimage/tool"
)

// squash writes the tar that r gives to target as a squashfs without any
// compression. created is the time of the file system and of its root folder.
func squash(ctx context.Context, run *tool.Runner, r io.Reader, target string, created time.Time) error {
	at := strconv.FormatInt(created.Unix(), 10)
	c := tool.Command{Name: "sqfstar", Stdin: r, Args: []string{
		"-quiet", "-no-progress", "-no-xattrs", "-no-fragments",
		"-noI", "-noId", "-noD", "-noF", "-noX",
		"-processors", "2", "-mem", "256M",
		"-mkfs-time", at, "-root-mode", "755", "-root-uid", "0", "-root-gid", "0", "-root-time", at,
		target,
	}}
	// sqfstar 4.5.1 takes of the -root options only the mode to heart: the root
	// folder belongs to whoever runs it, as fakeroot lets nobody notice ...
	if os.Geteuid() != 0 {
		c.Args = append([]string{"--", c.Name}, c.Args...)
		c.Name = "fakeroot"
	}
	if err := run.Run(ctx, c); err != nil {
		return err
	}
	// ... and it is from just now.
	if err := setRootTime(target, created); err != nil {
		return fmt.Errorf("set the time of the root folder: %w", err)
	}
	return nil
}

// Places in a squashfs superblock, version 4.0, little-endian.
const (
	squashMagic      = 0x73717368
	superMajor       = 28 // u16
	superRootInode   = 32 // u64: block's place in the inode table << 16 | place in the block
	superInodeTable  = 64 // u64
	superSize        = 96
	metaUncompressed = 1 << 15
	inodeDir         = 1
	inodeLongDir     = 8
	inodeTime        = 8 // u32, after type, mode, uid and gid
)

// setRootTime sets the time of the root folder of a squashfs whose inodes are
// not compressed.
func setRootTime(path string, at time.Time) (err error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	le := binary.LittleEndian
	super := make([]byte, superSize)
	if _, err := f.ReadAt(super, 0); err != nil {
		return err
	}
	if le.Uint32(super) != squashMagic || le.Uint16(super[superMajor:]) != 4 {
		return errors.New("not a squashfs of version 4")
	}
	ref := le.Uint64(super[superRootInode:])
	block := int64(le.Uint64(super[superInodeTable:]) + ref>>16)
	size := make([]byte, 2)
	if _, err := f.ReadAt(size, block); err != nil {
		return err
	}
	if le.Uint16(size)&metaUncompressed == 0 {
		return errors.New("its inodes are compressed")
	}
	inode := block + 2 + int64(ref&0xffff)
	kind := make([]byte, 2)
	if _, err := f.ReadAt(kind, inode); err != nil {
		return err
	}
	if k := le.Uint16(kind); k != inodeDir && k != inodeLongDir {
		return fmt.Errorf("its root has type %d, not a folder's", k)
	}
	_, err = f.WriteAt(le.AppendUint32(nil, uint32(at.Unix())), inode+inodeTime)
	return err
}
