package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Home is the folder that holds all of Warren's shared state.
type Home string

// DefaultHome is $WARREN_HOME, else $XDG_DATA_HOME/warren, else
// ~/.local/share/warren. It creates nothing.
func DefaultHome() (Home, error) {
	for _, known := range []struct{ env, below string }{
		{"WARREN_HOME", ""},
		{"XDG_DATA_HOME", "warren"},
	} {
		dir := os.Getenv(known.env)
		if dir == "" {
			continue
		}
		if !filepath.IsAbs(dir) {
			return "", fmt.Errorf("%s is %q; set it to an absolute path or unset it", known.env, dir)
		}
		return Home(filepath.Join(dir, known.below)), nil
	}
	user, err := os.UserHomeDir()
	if err != nil || !filepath.IsAbs(user) {
		return "", errors.New("no home directory is known; set WARREN_HOME to an absolute path")
	}
	return Home(filepath.Join(user, ".local", "share", "warren")), nil
}

// Dir is the home itself.
func (h Home) Dir() string { return string(h) }

// Guest is the folder of the guest images.
func (h Home) Guest() string { return filepath.Join(string(h), "guest") }

// Cache is the folder for what can be made again.
func (h Home) Cache() string { return filepath.Join(string(h), "cache") }

// VMsDir is the folder of the running VMs.
func (h Home) VMsDir() string { return filepath.Join(string(h), "vms") }

// VMDir is the folder of one VM.
func (h Home) VMDir(id string) string { return filepath.Join(h.VMsDir(), id) }

// SnapshotsDir is the folder of the snapshots; see package snapshots.
func (h Home) SnapshotsDir() string { return filepath.Join(string(h), "snapshots") }

// Make creates the home and the folders in it, private to the user.
func (h Home) Make() error {
	for _, dir := range []string{h.Dir(), h.Guest(), h.Cache(), h.VMsDir()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return WithRemedy(err)
		}
	}
	return nil
}
