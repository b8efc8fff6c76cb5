package supervisor

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/vm"
)

// Config is what a supervisor is told on its standard input: one VM, its
// identity and its bounds.
type Config struct {
	// ID is the VM's name and Dir its folder, which the starter made with
	// store.CreateVM and whose lock the supervisor inherits.
	ID  string `json:"id"`
	Dir string `json:"dir"`
	// Label is kept in the record, for whoever looks at it.
	Label string  `json:"label,omitempty"`
	VM    vm.Spec `json:"vm"`
	// ImageID is the guest image the agent must say it was built into.
	ImageID  string   `json:"image_id"`
	Identity Identity `json:"identity"`
	// Machine is what QEMU and host are, for the snapshots of the VM.
	Machine snapshots.Machine `json:"machine"`
	// Snapshot is what VM.State and the rest of VM are of; the supervisor
	// holds it. "" is a VM that is booted. Prepared: its guest has an identity,
	// of which it needs another.
	Snapshot string `json:"snapshot,omitempty"`
	Prepared bool   `json:"prepared,omitempty"`
	// DataTemplate is the empty overlay that the VM's next one, after a
	// snapshot, is a copy of.
	DataTemplate string `json:"data_template,omitempty"`
	// BootTimeout bounds the time from the start of QEMU until the agent
	// answers; 0 is DefaultBootTimeout.
	BootTimeout time.Duration `json:"boot_timeout_ns,omitempty"`
	// Outlive lets the VM live on when the process that started it ends. It
	// then runs until it is stopped, and Connect adopts it.
	Outlive bool `json:"outlive,omitempty"`
	// SpawnedUnixNano is when Start began; Start sets it.
	SpawnedUnixNano int64 `json:"spawned_unix_nano,omitempty"`
}

// Identity is what makes a guest itself. Randomness, clock and generation
// are the supervisor's to give, at the last moment.
type Identity struct {
	// Hostname is a DNS label.
	Hostname string `json:"hostname"`
	// MachineID is 32 lower-case hex digits; empty is a random one.
	MachineID string `json:"machine_id,omitempty"`
}

// Bounds of the boot timeout.
const (
	DefaultBootTimeout = time.Minute
	maxBootTimeout     = time.Hour
)

// maxConfig bounds the document on standard input.
const maxConfig = 1 << 20

// No regular expressions here: compiling a few takes as long as all the rest of
// a supervisor's start.
const (
	letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	digits  = "0123456789"
)

func consistsOf(s, set string) bool { return strings.Trim(s, set) == "" }

// isHostname says whether s is a DNS label.
func isHostname(s string) bool {
	return s != "" && len(s) <= 63 && consistsOf(s, letters+digits+"-") && s[0] != '-' && s[len(s)-1] != '-'
}

// Check reports everything that is wrong with the config, joined.
func (c Config) Check() error {
	var faults []error
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf(format, args...))
	}
	if err := store.CheckID(c.ID); err != nil {
		faults = append(faults, err)
	}
	if !filepath.IsAbs(c.Dir) || filepath.Base(c.Dir) != c.ID {
		fault("VM folder %q; it must be an absolute path that ends in the VM's id", c.Dir)
	}
	if len(c.Label) > 1000 {
		fault("a label of %d bytes; use at most 1000", len(c.Label))
	}
	if n := len(c.ImageID); n == 0 || n > 200 || !consistsOf(c.ImageID, letters+digits+"._:+-") {
		fault("image id %q; it must be the image_id of the guest image's manifest", c.ImageID)
	}
	if !isHostname(c.Identity.Hostname) {
		fault("host name %q; use up to 63 letters, digits and hyphens", c.Identity.Hostname)
	}
	if id := c.Identity.MachineID; id != "" && (len(id) != 32 || !consistsOf(id, digits+"abcdef")) {
		fault("machine id %q; use 32 lower-case hex digits, or leave it out", id)
	}
	if t := c.BootTimeout; t < 0 || t > 0 && t < time.Second || t > maxBootTimeout {
		fault("a boot timeout of %v; use 1s to %v", t, maxBootTimeout)
	}
	if err := c.VM.Check(); err != nil {
		faults = append(faults, err)
	}
	return errors.Join(faults...)
}

// ReadConfig reads and checks a config. An unknown field, a second document
// or more than 1 MiB is an error.
func ReadConfig(r io.Reader) (Config, error) {
	c, err := guestapi.Decode[Config](r, maxConfig)
	if err != nil {
		return c, fmt.Errorf("read the VM's config: %w", err)
	}
	if err := c.Check(); err != nil {
		return c, fmt.Errorf("check the VM's config: %w", err)
	}
	if c.BootTimeout == 0 {
		c.BootTimeout = DefaultBootTimeout
	}
	return c, nil
}
