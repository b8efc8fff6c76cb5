// Package kernel takes what a guest needs out of a distribution's kernel
// package: the kernel itself, uncompressed, and modules in load order.
package kernel

import (
	"bytes"
	"compress/gzip"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/warren-vm/warren/internal/guestimage/tool"
)

// Places in the header of a bzImage, from Documentation/arch/x86/boot.rst of
// the kernel.
const (
	setupSectors  = 0x1f1 // u8: 512-byte sectors of real-mode code after the first
	bootFlag      = 0x1fe // u16: 0xaa55
	headerMagic   = 0x202 // "HdrS"
	bootProtocol  = 0x206 // u16
	payloadOffset = 0x248 // u32: from the start of the protected-mode code
	payloadLength = 0x24c // u32
	headerEnd     = 0x250
)

// maxVmlinux bounds what a payload may unpack to. Debian's is 66 MB.
const maxVmlinux = 512 << 20

// ErrNotBzImage says that a file is not a compressed x86 Linux kernel of boot
// protocol 2.08 or newer, the first that says where its payload is.
var ErrNotBzImage = errors.New("not a Linux bzImage of boot protocol 2.08 or newer")

// Vmlinux is the uncompressed kernel, an ELF file, inside a bzImage. QEMU
// starts it through its PVH entry; a guest without hardware virtualization
// boots five seconds sooner than when it has to unpack itself (measured: 2 s
// instead of 7).
//
// The payload is unpacked by the distribution's xz, zstd or lz4: the kernel's
// xz has the x86 filter, which no Go library reads.
func Vmlinux(ctx context.Context, run *tool.Runner, image []byte) ([]byte, error) {
	payload, err := payloadOf(image)
	if err != nil {
		return nil, err
	}
	out, err := unpack(ctx, run, payload)
	if err != nil {
		return nil, fmt.Errorf("unpack the kernel: %w", err)
	}
	f, err := elf.NewFile(bytes.NewReader(out))
	if err != nil {
		return nil, fmt.Errorf("unpack the kernel: what was inside is no ELF file: %w", err)
	}
	if !hasPVH(f) {
		return nil, errors.New("the kernel has no PVH entry, so QEMU cannot start it uncompressed; " +
			"it was built without CONFIG_PVH")
	}
	return out, nil
}

func payloadOf(image []byte) ([]byte, error) {
	if len(image) < headerEnd ||
		binary.LittleEndian.Uint16(image[bootFlag:]) != 0xaa55 ||
		string(image[headerMagic:headerMagic+4]) != "HdrS" ||
		binary.LittleEndian.Uint16(image[bootProtocol:]) < 0x208 {
		return nil, ErrNotBzImage
	}
	sectors := uint64(image[setupSectors])
	if sectors == 0 {
		sectors = 4 // what the boot protocol says of a zero
	}
	from := (sectors+1)*512 + uint64(binary.LittleEndian.Uint32(image[payloadOffset:]))
	length := uint64(binary.LittleEndian.Uint32(image[payloadLength:]))
	if length < 8 || from+length > uint64(len(image)) {
		return nil, fmt.Errorf("%w: its payload (%d bytes at %d) does not lie in its %d bytes",
			ErrNotBzImage, length, from, len(image))
	}
	return image[from : from+length], nil
}

// formats are the compressions that distributions use.
var formats = []struct {
	magic string
	name  string
	// args unpack from standard input to standard output.
	args []string
}{
	{"\xfd7zXZ\x00", "xz", []string{"-d", "-c"}},
	{"\x28\xb5\x2f\xfd", "zstd", []string{"-q", "-d", "-c", "--long=31"}},
	{"\x02\x21\x4c\x18", "lz4", []string{"-q", "-d", "-c"}},
}

// unpack unpacks a payload. All formats but gzip, which ends with its size by
// itself, have the size appended as 32 bits, little-endian.
func unpack(ctx context.Context, run *tool.Runner, payload []byte) ([]byte, error) {
	if bytes.HasPrefix(payload, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(bytes.NewReader(payload))
		if err != nil {
			return nil, err
		}
		return readBounded(z)
	}
	for _, f := range formats {
		if !bytes.HasPrefix(payload, []byte(f.magic)) {
			continue
		}
		body, size := payload[:len(payload)-4], binary.LittleEndian.Uint32(payload[len(payload)-4:])
		if size > maxVmlinux {
			return nil, fmt.Errorf("it says that it unpacks to %d bytes, more than %d", size, int64(maxVmlinux))
		}
		out := &bounded{max: int(size)}
		out.buf.Grow(int(size))
		if err := run.Run(ctx, tool.Command{Name: f.name, Args: f.args, Stdin: bytes.NewReader(body), Stdout: out}); err != nil {
			return nil, err
		}
		if out.buf.Len() != int(size) {
			return nil, fmt.Errorf("it unpacked to %d bytes instead of %d", out.buf.Len(), size)
		}
		return out.buf.Bytes(), nil
	}
	return nil, fmt.Errorf("its compression (first bytes % x) is none of gzip, xz, zstd, lz4", payload[:6])
}

func readBounded(r io.Reader) ([]byte, error) {
	out, err := io.ReadAll(io.LimitReader(r, maxVmlinux+1))
	if err == nil && len(out) > maxVmlinux {
		err = fmt.Errorf("it unpacks to more than %d bytes", int64(maxVmlinux))
	}
	return out, err
}

// bounded refuses to grow over max.
type bounded struct {
	buf bytes.Buffer
	max int
}

func (b *bounded) Write(p []byte) (int, error) {
	if b.buf.Len()+len(p) > b.max {
		return 0, fmt.Errorf("more than the %d bytes it should be", b.max)
	}
	return b.buf.Write(p)
}

// hasPVH looks for the Xen note of type 18, XEN_ELFNOTE_PHYS32_ENTRY.
func hasPVH(f *elf.File) bool {
	const physEntry = 18
	for _, p := range f.Progs {
		if p.Type != elf.PT_NOTE || p.Filesz > 1<<20 {
			continue
		}
		notes := make([]byte, p.Filesz)
		if _, err := p.ReadAt(notes, 0); err != nil {
			continue
		}
		for len(notes) >= 12 {
			name := uint64(f.ByteOrder.Uint32(notes))
			desc := uint64(f.ByteOrder.Uint32(notes[4:]))
			kind := f.ByteOrder.Uint32(notes[8:])
			end := 12 + (name+3)&^3 + (desc+3)&^3
			if end > uint64(len(notes)) {
				break
			}
			if kind == physEntry && bytes.HasPrefix(notes[12:], []byte("Xen\x00")) {
				return true
			}
			notes = notes[end:]
		}
	}
	return false
}
