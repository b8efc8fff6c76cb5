package kernel

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/warren-vm/warren/internal/guestimage/tool"
)

// Module is one kernel module of an unpacked package.
type Module struct {
	// Path is where it lies below /lib/modules/<version>, without a suffix
	// for compression: kernel/fs/squashfs/squashfs.ko.
	Path string
	// Needs are the paths of the modules that must be loaded before, nearest
	// last: what modules.dep says, in load order.
	Needs []string

	file string
	run  *tool.Runner
}

// Tree is the modules of an unpacked kernel package.
type Tree struct {
	run *tool.Runner
	// files has each module's file by its name in the kernel's own spelling.
	files map[string]string
	// builtin has the names that need no loading.
	builtin map[string]bool
	root    string
}

// OpenTree reads which modules are below dir, a /lib/modules/<version>.
func OpenTree(run *tool.Runner, dir string) (*Tree, error) {
	t := &Tree{run: run, files: map[string]string{}, builtin: map[string]bool{}, root: dir}
	list, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(list)) {
		t.builtin[moduleName(strings.TrimSpace(line))] = true
	}
	err = filepath.WalkDir(filepath.Join(dir, "kernel"), func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.Contains(d.Name(), ".ko") {
			t.files[moduleName(p)] = p
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return t, nil
}

// moduleName is the kernel's name for the module in a file: it does not tell
// - and _ apart, and writes _.
func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// Has says whether there is a module of that name to load.
func (t *Tree) Has(name string) bool {
	_, ok := t.files[strings.ReplaceAll(name, "-", "_")]
	return ok
}

// Select finds modules by name, together with all that they need, each after
// what it needs. Names that are built into the kernel are left out. A name
// that does not exist is an error: a guest that cannot see its disk is worse
// than a build that ends.
func (t *Tree) Select(ctx context.Context, names []string) ([]Module, error) {
	s := selection{tree: t, state: map[string]int{}, needs: map[string][]string{}}
	for _, n := range names {
		if _, err := s.visit(ctx, strings.ReplaceAll(n, "-", "_")); err != nil {
			return nil, err
		}
	}
	return s.modules, nil
}

type selection struct {
	tree    *Tree
	state   map[string]int // 1: being visited, 2: done
	needs   map[string][]string
	modules []Module
}

// visit adds a module after all it needs, and returns the paths of both, the
// module's own last; none when it is built in.
func (s *selection) visit(ctx context.Context, name string) ([]string, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if s.tree.builtin[name] {
		return nil, nil
	}
	switch s.state[name] {
	case 1:
		return nil, fmt.Errorf("kernel module %s needs itself", name)
	case 2:
		return s.needs[name], nil
	}
	s.state[name] = 1
	file, ok := s.tree.files[name]
	if !ok {
		return nil, fmt.Errorf("the kernel package has no module %s", name)
	}
	rel, err := filepath.Rel(s.tree.root, file)
	if err != nil {
		return nil, err
	}
	cut, _, _ := strings.Cut(path.Base(rel), ".ko")
	m := Module{Path: path.Join(path.Dir(rel), cut+".ko"), file: file, run: s.tree.run}
	content, err := m.content(ctx)
	if err != nil {
		return nil, err
	}
	needs, err := modinfo(content)
	if err != nil {
		return nil, fmt.Errorf("kernel module %s: %w", file, err)
	}
	for _, n := range needs {
		paths, err := s.visit(ctx, n)
		if err != nil {
			return nil, fmt.Errorf("%s needs %s: %w", name, n, err)
		}
		for _, p := range paths {
			if !slices.Contains(m.Needs, p) {
				m.Needs = append(m.Needs, p)
			}
		}
	}
	s.modules = append(s.modules, m)
	s.state[name] = 2
	s.needs[name] = append(slices.Clone(m.Needs), m.Path)
	return s.needs[name], nil
}

// Content is the module itself, uncompressed and without its signature.
//
// A kernel that finds a signature hashes the module and does the arithmetic,
// even when it would load the module anyway: 110 ms of each boot where
// processors are emulated. Here it proves nothing, because the host checks the
// digests of all that a guest starts from.
func (m Module) Content() ([]byte, error) { return m.content(context.Background()) }

func (m Module) content(ctx context.Context) ([]byte, error) {
	var name string
	switch filepath.Ext(m.file) {
	case ".ko":
		content, err := os.ReadFile(m.file)
		return unsigned(content), err
	case ".xz":
		name = "xz"
	case ".zst":
		name = "zstd"
	default:
		return nil, fmt.Errorf("kernel module %s: its compression is neither xz nor zstd", m.file)
	}
	var out bytes.Buffer
	err := m.run.Run(ctx, tool.Command{Name: name, Args: []string{"-q", "-d", "-c", m.file}, Stdout: &out})
	return unsigned(out.Bytes()), err
}

// signatureMark ends a signed module. Before it is a struct module_signature
// of 12 bytes, whose last 4 are the signature's length with the highest byte
// first, and before that the signature (include/linux/module_signature.h).
const (
	signatureMark = "~Module signature appended~\n"
	signatureInfo = 12
)

// unsigned is a module without its signature. One that is not signed, or not
// in a way that is understood, stays as it is.
func unsigned(module []byte) []byte {
	signed, ok := bytes.CutSuffix(module, []byte(signatureMark))
	if !ok || len(signed) < signatureInfo {
		return module
	}
	signature := int64(binary.BigEndian.Uint32(signed[len(signed)-4:]))
	end := int64(len(signed)) - signatureInfo - signature
	if end < 0 {
		return module
	}
	return signed[:end]
}

// modinfo reads which modules a module says it needs. Soft dependencies are
// aliases (ext4's is "crypto-crc32c") that need depmod's tables: whoever
// selects the module names them.
func modinfo(module []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(module))
	if err != nil {
		return nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, errors.New("it has no .modinfo section")
	}
	data, err := section.Data()
	if err != nil {
		return nil, err
	}
	var needs []string
	for _, field := range strings.Split(string(data), "\x00") {
		list, ok := strings.CutPrefix(field, "depends=")
		if !ok {
			continue
		}
		for _, n := range strings.Split(list, ",") {
			if n != "" {
				needs = append(needs, strings.ReplaceAll(n, "-", "_"))
			}
		}
	}
	slices.Sort(needs)
	return needs, nil
}
