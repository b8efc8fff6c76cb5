// Package initramfs writes what a guest boots from: a cpio archive in the
// kernel's "newc" format, not compressed (a guest without hardware
// virtualization would spend more on unpacking than the host on reading), and
// the same bytes for the same content.
package initramfs

import (
	"errors"
	"fmt"
	"io"
)

// Archive writes one cpio archive. Every entry belongs to root and has the
// time 0. Archives may follow each other in one file: the kernel unpacks them
// one after the other, later entries over earlier ones.
//
// It is not safe for use by several goroutines. After an error all that
// follows fails with the same.
type Archive struct {
	w   io.Writer
	ino int
	n   int64
	err error
}

// File types, as in stat's mode.
const (
	typeDir  = 0o040000
	typeFile = 0o100000
	typeChar = 0o020000
)

// NewArchive starts an archive.
func NewArchive(w io.Writer) *Archive { return &Archive{w: w} }

// Dir adds a folder. Its parents have to be there already; the kernel makes none.
func (a *Archive) Dir(name string, perm uint32) error {
	return a.entry(name, typeDir|perm, 2, 0, 0, nil)
}

// CharDevice adds a character device.
func (a *Archive) CharDevice(name string, perm, major, minor uint32) error {
	return a.entry(name, typeChar|perm, 1, major, minor, nil)
}

// File adds a file. A file is held in memory: the largest is the agent.
func (a *Archive) File(name string, perm uint32, content []byte) error {
	return a.entry(name, typeFile|perm, 1, 0, 0, content)
}

// Close ends the archive. It is followed by zeros up to a multiple of 512
// bytes, so that another archive may follow.
func (a *Archive) Close() error {
	if err := a.header("TRAILER!!!", 0, 1, 0, 0, 0); err != nil {
		return err
	}
	return a.pad(512)
}

// Size is how many bytes were written.
func (a *Archive) Size() int64 { return a.n }

func (a *Archive) entry(name string, mode, links, major, minor uint32, content []byte) error {
	if a.err == nil && (name == "" || name[0] == '/') {
		a.err = fmt.Errorf("initramfs entry %q: the name must be relative", name)
	}
	a.ino++
	if err := a.header(name, mode, links, major, minor, len(content)); err != nil {
		return err
	}
	if err := a.write(content); err != nil {
		return err
	}
	return a.pad(4)
}

func (a *Archive) header(name string, mode, links, major, minor uint32, size int) error {
	if int64(size) > 0xffffffff {
		a.err = errors.Join(a.err, fmt.Errorf("initramfs entry %s: %d bytes are more than the format can hold", name, size))
	}
	ino := a.ino
	if mode == 0 {
		ino = 0
	}
	// magic, inode, mode, uid, gid, links, mtime, size, device, special
	// device, name's length with its NUL, checksum (unused).
	head := fmt.Sprintf("070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		ino, mode, 0, 0, links, 0, size, 0, 0, major, minor, len(name)+1, 0, name)
	if err := a.write([]byte(head)); err != nil {
		return err
	}
	return a.pad(4)
}

func (a *Archive) pad(to int64) error {
	return a.write(make([]byte, (to-a.n%to)%to))
}

func (a *Archive) write(p []byte) error {
	if a.err != nil {
		return a.err
	}
	n, err := a.w.Write(p)
	a.n += int64(n)
	a.err = err
	return err
}
