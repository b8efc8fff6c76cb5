package kernel

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/warren-vm/warren/internal/guestimage/tool"
)

// program is a small ELF file: with a PVH note when pvh is set, and with a
// section .modinfo when modinfo is not nil.
func program(t *testing.T, pvh bool, modinfo []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	note := []byte("\x04\x00\x00\x00\x04\x00\x00\x00\x12\x00\x00\x00Xen\x00\x00\x00\x10\x00")
	if !pvh {
		note[8] = 1
	}
	names := []byte("\x00.modinfo\x00.shstrtab\x00")
	const ehsize, phsize, shsize = 64, 56, 64
	data := uint64(ehsize + phsize)
	head := elf.Header64{
		Ident: [16]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), 1},
		Type:  uint16(elf.ET_EXEC), Machine: uint16(elf.EM_X86_64), Version: 1,
		Phoff: ehsize, Ehsize: ehsize, Phentsize: phsize, Phnum: 1, Shentsize: shsize, Shnum: 3, Shstrndx: 2,
		Shoff: data + uint64(len(note)+len(modinfo)+len(names)),
	}
	prog := elf.Prog64{Type: uint32(elf.PT_NOTE), Off: data, Filesz: uint64(len(note))}
	at := data + uint64(len(note))
	sections := []elf.Section64{
		{},
		{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: at, Size: uint64(len(modinfo))},
		{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: at + uint64(len(modinfo)), Size: uint64(len(names))},
	}
	if modinfo == nil {
		sections[1].Name = 0
	}
	for _, v := range []any{head, prog, note, modinfo, names, sections} {
		if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

// image is a bzImage with that payload.
func image(payload []byte) []byte {
	b := make([]byte, 3*512+16)
	b[setupSectors] = 2
	binary.LittleEndian.PutUint16(b[bootFlag:], 0xaa55)
	copy(b[headerMagic:], "HdrS")
	binary.LittleEndian.PutUint16(b[bootProtocol:], 0x20f)
	binary.LittleEndian.PutUint32(b[payloadOffset:], 16)
	binary.LittleEndian.PutUint32(b[payloadLength:], uint32(len(payload)))
	return append(b, payload...)
}

func sized(packed []byte, size int) []byte {
	return binary.LittleEndian.AppendUint32(packed, uint32(size))
}

func pack(t *testing.T, content []byte, name string, args ...string) []byte {
	t.Helper()
	var out bytes.Buffer
	run := &tool.Runner{}
	if err := run.Run(t.Context(), tool.Command{Name: name, Args: args, Stdin: bytes.NewReader(content), Stdout: &out}); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestVmlinuxComesOutOfEveryCompression(t *testing.T) {
	vmlinux := program(t, true, nil)
	var gz bytes.Buffer
	z := gzip.NewWriter(&gz)
	if _, err := z.Write(vmlinux); err != nil || z.Close() != nil {
		t.Fatal("gzip")
	}
	payloads := map[string][]byte{
		"gzip": gz.Bytes(),
		// As the kernel's build calls it.
		"xz":   sized(pack(t, vmlinux, "xz", "--check=crc32", "--x86", "--lzma2=dict=32MiB", "-c"), len(vmlinux)),
		"zstd": sized(pack(t, vmlinux, "zstd", "-q", "-c"), len(vmlinux)),
	}
	run := &tool.Runner{}
	if run.Has("lz4") { // no distribution we know uses it; setup does not install it
		payloads["lz4"] = sized(pack(t, vmlinux, "lz4", "-l", "-q", "-c"), len(vmlinux))
	}
	for name, p := range payloads {
		got, err := Vmlinux(t.Context(), run, image(p))
		if err != nil || !bytes.Equal(got, vmlinux) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
}

func TestVmlinuxRefusesWhatItCannotUse(t *testing.T) {
	run := &tool.Runner{}
	good := program(t, true, nil)
	xz := pack(t, good, "xz", "-c")
	old := image(sized(xz, len(good)))
	binary.LittleEndian.PutUint16(old[bootProtocol:], 0x207)
	outside := image(sized(xz, len(good)))
	binary.LittleEndian.PutUint32(outside[payloadLength:], 1<<31)
	for _, c := range []struct {
		name, says string
		image      []byte
		is         error
	}{
		{"empty", "not a Linux bzImage", nil, ErrNotBzImage},
		{"an ELF file", "not a Linux bzImage", append(bytes.Clone(good), make([]byte, 1024)...), ErrNotBzImage},
		{"old protocol", "boot protocol 2.08", old, ErrNotBzImage},
		{"payload outside", "does not lie in its", outside, ErrNotBzImage},
		{"unknown compression", "(first bytes 42 5a 68 39 31 41) is none of", image([]byte("BZh91AY&SY....")), nil},
		{"lying size", "instead of", image(sized(xz, len(good)+1)), nil},
		{"smaller size", "more than the", image(sized(xz, 10)), nil},
		{"absurd size", "more than 536870912", image(sized(xz, 1<<31)), nil},
		{"not an ELF file", "no ELF file", image(sized(pack(t, []byte("hello"), "xz", "-c"), 5)), nil},
		{"no PVH", "no PVH entry", image(sized(pack(t, program(t, false, nil), "xz", "-c"), len(good))), nil},
	} {
		_, err := Vmlinux(t.Context(), run, c.image)
		if err == nil || !strings.Contains(err.Error(), c.says) || c.is != nil && !errors.Is(err, c.is) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func FuzzPayload(f *testing.F) {
	f.Add(image([]byte("12345678")))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if p, err := payloadOf(b); err == nil && len(p) > len(b) {
			t.Fatal("more than there is")
		}
	})
}

// tree writes modules ("name": what it depends on) and opens them.
func tree(t *testing.T, builtin string, modules map[string]string) *Tree {
	t.Helper()
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "kernel", "drivers"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "modules.builtin"), []byte(builtin), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, needs := range modules {
		content := program(t, false, []byte("license=GPL\x00depends="+needs+"\x00name=x\x00"))
		switch filepath.Ext(name) {
		case ".xz":
			content = pack(t, content, "xz", "-c")
		case ".zst":
			content = pack(t, content, "zstd", "-q", "-c")
		}
		if err := os.WriteFile(filepath.Join(dir, "kernel", "drivers", name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	tr, err := OpenTree(&tool.Runner{}, dir)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func TestModulesComeAfterWhatTheyNeed(t *testing.T) {
	tr := tree(t, "kernel/lib/crc16.ko\n", map[string]string{
		"virtio.ko": "", "virtio_ring.ko": "", "virtio-pci.ko.xz": "virtio,virtio-ring,crc16", "virtio_blk.ko.zst": "virtio_ring,virtio", "other.ko": "",
	})
	modules, err := tr.Select(t.Context(), []string{"virtio_blk", "virtio_pci", "crc16", "virtio"})
	if err != nil {
		t.Fatal(err)
	}
	var order []string
	for _, m := range modules {
		order = append(order, filepath.Base(m.Path))
		if content, err := m.Content(); err != nil || !bytes.HasPrefix(content, []byte("\x7fELF")) {
			t.Errorf("%s: %v", m.Path, err)
		}
	}
	if want := []string{"virtio.ko", "virtio_ring.ko", "virtio_blk.ko", "virtio-pci.ko"}; !slices.Equal(order, want) {
		t.Errorf("got %v, want %v", order, want)
	}
	if needs := modules[2].Needs; !slices.Equal(needs, []string{"kernel/drivers/virtio.ko", "kernel/drivers/virtio_ring.ko"}) {
		t.Errorf("virtio_blk needs %v", needs)
	}
	if !tr.Has("virtio-blk") || tr.Has("nothing") {
		t.Error("Has")
	}
}

func TestModulesThatCannotBeLoadedEndTheBuild(t *testing.T) {
	tr := tree(t, "", map[string]string{"a.ko": "b", "b.ko": "a", "c.ko": "gone"})
	for name, says := range map[string]string{
		"a": "module a needs itself", "c": "c needs gone: the kernel package has no module gone", "d": "has no module d",
	} {
		if _, err := tr.Select(t.Context(), []string{name}); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestModulesLoseTheirSignatureAndNothingElse(t *testing.T) {
	const module = "\x7fELF and so on"
	info := func(size uint32) string {
		return "\x00\x00\x02\x00\x00\x00\x00\x00" + string(binary.BigEndian.AppendUint32(nil, size)) + signatureMark
	}
	for name, c := range map[string]struct{ in, want string }{
		"signed":               {module + "signature" + info(9), module},
		"not signed":           {module, module},
		"longer than the file": {module + info(1000), module + info(1000)},
		"as long as it gets":   {module + info(1<<32-1), module + info(1<<32-1)},
		"cut off":              {"x" + signatureMark, "x" + signatureMark},
		"empty":                {"", ""},
	} {
		if got := string(unsigned([]byte(c.in))); got != c.want {
			t.Errorf("%s: %q", name, got)
		}
	}
}
