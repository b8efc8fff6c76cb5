package vm

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/store"
)

// versionFile is where QEMU's version is remembered: asking takes as long as
// restoring a VM.
const versionFile = "qemu.json"

// rememberedVersion is the content of versionFile: one program, by the file
// that it is, and its version.
type rememberedVersion struct {
	Path    string `json:"path"`
	Inode   uint64 `json:"inode"`
	Size    int64  `json:"size"`
	MTime   int64  `json:"mtime_ns"`
	CTime   int64  `json:"ctime_ns"`
	Version string `json:"version"`
}

// Version is the version of qemu ("" is DefaultQEMU), as qmp.Version.Full
// gives it: "7.2.22 (Debian …)". It is remembered in cacheDir for as long as the
// program's file stays the same; that it cannot be is no error.
func Version(ctx context.Context, qemu, cacheDir string) (string, error) {
	path, err := findQEMU(qemu)
	if err != nil {
		return "", err
	}
	now, err := describeProgram(path)
	if err != nil {
		return "", err
	}
	file := filepath.Join(cacheDir, versionFile)
	if was, ok := readVersion(file); ok {
		now.Version = was.Version
		if now == was {
			return was.Version, nil
		}
	}
	if now.Version, err = askVersion(ctx, path); err != nil {
		return "", err
	}
	if data, err := json.Marshal(now); err == nil && os.MkdirAll(cacheDir, 0o700) == nil {
		store.WriteVolatile(file, data, 0o600)
	}
	return now.Version, nil
}

func describeProgram(path string) (rememberedVersion, error) {
	info, err := os.Stat(path)
	if err != nil {
		return rememberedVersion{}, fmt.Errorf("%w: %w", ErrNoQEMU, err)
	}
	st := info.Sys().(*syscall.Stat_t)
	return rememberedVersion{Path: path, Inode: st.Ino, Size: st.Size, MTime: st.Mtim.Nano(), CTime: st.Ctim.Nano()}, nil
}

func readVersion(file string) (v rememberedVersion, ok bool) {
	f, err := os.Open(file)
	if err != nil {
		return v, false
	}
	defer f.Close()
	v, err = guestapi.Decode[rememberedVersion](f, 64<<10)
	return v, err == nil && v.Version != ""
}

func askVersion(ctx context.Context, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.Env = []string{"LC_ALL=C"}
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("ask QEMU for its version: %s: %w", path, err)
	}
	line, _, _ := strings.Cut(string(out), "\n")
	_, version, ok := strings.Cut(line, "version ")
	if version = guestapi.CleanLine(strings.TrimSpace(version)); !ok || version == "" {
		return "", fmt.Errorf("ask QEMU for its version: %s answers %q; is it QEMU?", path, guestapi.CleanLine(line))
	}
	return version, nil
}
