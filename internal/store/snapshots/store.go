package snapshots

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/warren-vm/warren/internal/store"
)

// Errors that callers decide on.
var (
	// ErrNotFound says that there is no snapshot of that id.
	ErrNotFound = errors.New("no such snapshot")
	// ErrExists says that there is one already.
	ErrExists = errors.New("exists already")
	// ErrNeeded says that a snapshot cannot be deleted yet.
	ErrNeeded = errors.New("is needed")
	// ErrDamaged says that a snapshot is not what its manifest says, or that
	// its manifest says nothing.
	ErrDamaged = errors.New("is damaged")
	// ErrNewer says that a manifest has a later format.
	ErrNewer = errors.New("was made by a newer Warren")
)

// Names of files in a snapshot.
const (
	StateName  = "state"
	MemoryName = "memory"

	manifestName   = "manifest.json"
	stampName      = "stamp.json"
	lockName       = "lock"
	gateName       = ".lock"
	newPrefix      = ".new-"
	deadPrefix     = ".dead-"
	templatePrefix = ".template-"
)

// MaxOverlays bounds the overlays of one snapshot.
const MaxOverlays = 16

// DiskName is the name of a snapshot's own overlay of that place, the oldest
// being 0.
func DiskName(place int) string {
	if place == 0 {
		return "disk.qcow2"
	}
	return fmt.Sprintf("disk-%d.qcow2", place)
}

func isDisk(name string) bool {
	for i := range MaxOverlays {
		if name == DiskName(i) {
			return true
		}
	}
	return false
}

// Store is the snapshots of one home. Its methods may be called from any
// goroutine and any number of processes.
type Store struct {
	home store.Home
	disk disk
	own  func(path string) error
}

// Option is a choice at In.
type Option func(*Store)

// WithFaults asks fault before each write to the disk that Draft, Publish,
// MakeFlat and Import do; an error of it is what the write then fails with.
// It is for tests.
func WithFaults(fault func(op Op, path string) error) Option {
	return func(s *Store) { s.disk.fault = fault }
}

// WithOwner gives files for QEMU to their owner: what the store itself makes
// (flat memory in the cache, memory and disks of an import), and at Open what
// belongs to us still, in a home that was copied.
func WithOwner(own func(path string) error) Option {
	return func(s *Store) { s.own = own }
}

// In is the store of a home. It creates nothing.
func In(h store.Home, options ...Option) *Store {
	s := &Store{home: h, own: func(string) error { return nil }}
	for _, o := range options {
		o(s)
	}
	return s
}

// NewID is a fresh random snapshot id.
func NewID() string { return "s" + random(8) }

func random(n int) string {
	b := make([]byte, n)
	rand.Read(b)
	return fmt.Sprintf("%x", b)
}

// CheckID says what is wrong with a snapshot's id.
func CheckID(id string) error {
	if store.CheckID(id) != nil {
		return fmt.Errorf("snapshot id %.80q; use 1 to 63 of a-z, 0-9 and -, starting with a letter or digit", id)
	}
	return nil
}

func (s *Store) dir() string             { return s.home.SnapshotsDir() }
func (s *Store) folder(id string) string { return filepath.Join(s.dir(), id) }
func (s *Store) temporary(p, id string) string {
	return filepath.Join(s.dir(), p+id+"-"+random(4))
}

// make creates the folder of the snapshots.
func (s *Store) make() error {
	if err := s.home.Make(); err != nil {
		return err
	}
	if _, err := os.Stat(s.dir()); err == nil {
		return nil
	}
	if err := s.disk.mkdirAll(s.dir()); err != nil {
		return err
	}
	// A snapshot survives a power cut no better than the folders it is in.
	if err := s.disk.syncDir(s.home.Dir()); err != nil {
		return err
	}
	return s.disk.syncDir(filepath.Dir(s.home.Dir()))
}

// gate takes the lock of the snapshots folder; closing the file gives it up.
// fs.ErrNotExist says that there is no such folder.
func (s *Store) gate(ctx context.Context, mode store.LockMode) (*os.File, error) {
	// Read-only is enough for a lock, and goes on a disk that is.
	f, err := os.OpenFile(filepath.Join(s.dir(), gateName), os.O_RDONLY|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := store.Lock(ctx, f, mode); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// TemplateLock waits until nobody else makes the template of a key, which is
// made like an id; waiting is called first if somebody does. The lock goes with
// the process.
func (s *Store) TemplateLock(ctx context.Context, key string, waiting func()) (release func(), err error) {
	if err := CheckID(key); err != nil {
		return nil, fmt.Errorf("lock template: %w", err)
	}
	if err := s.make(); err != nil {
		return nil, fmt.Errorf("lock template %.80q: %w", key, store.WithRemedy(err))
	}
	path := filepath.Join(s.dir(), templatePrefix+key+".lock")
	f, free := tryLockPath(path)
	if !free {
		waiting()
		f, err = lockPath(ctx, path)
	}
	if err != nil {
		return nil, fmt.Errorf("lock template %.80q: %w", key, store.WithRemedy(err))
	}
	return func() {
		os.Remove(f.Name()) // held still: who waits for it looks again
		f.Close()
	}, nil
}

// lockPath takes, alone, the lock of a file that is created for it and that
// Collect may remove.
func lockPath(ctx context.Context, path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, err
		}
		if err := store.Lock(ctx, f, store.LockAlone); err != nil {
			f.Close()
			return nil, err
		}
		if store.IsAt(f, path) {
			return f, nil
		}
		f.Close()
	}
}

// tryLockPath is lockPath without the wait.
func tryLockPath(path string) (*os.File, bool) {
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, false
	}
	if store.TryLock(f, store.LockAlone) != nil || !store.IsAt(f, path) {
		f.Close()
		return nil, false
	}
	return f, true
}

// ids are the names of all snapshot folders, whatever is in them.
func (s *Store) ids() ([]string, error) {
	entries, err := os.ReadDir(s.dir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", store.WithRemedy(err))
	}
	var ids []string
	for _, e := range entries {
		if e.IsDir() && CheckID(e.Name()) == nil {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// notFound says so, and what there is instead.
func (s *Store) notFound(id string) error {
	all, _, _ := s.List(context.Background())
	var kept []string
	for _, m := range all {
		if m.Kind == KindSnapshot {
			kept = append(kept, m.ID)
		}
	}
	if len(kept) == 0 {
		return fmt.Errorf("%w: %.80q; there are no snapshots in %s", ErrNotFound, id, s.dir())
	}
	more := ""
	if n := len(kept) - 5; n > 0 {
		kept, more = kept[n:], fmt.Sprintf(" and %d older", n)
	}
	return fmt.Errorf("%w: %.80q; there are %s%s", ErrNotFound, id, strings.Join(kept, ", "), more)
}

// damage is ErrDamaged of one snapshot.
type damage struct {
	id  string
	err error
}

func (d *damage) Error() string {
	return fmt.Sprintf("snapshot %s %v: %v; delete it, or bring its files back from a copy", d.id, ErrDamaged, d.err)
}

func (d *damage) Unwrap() []error { return []error{ErrDamaged, d.err} }

func damaged(id, format string, args ...any) error { return &damage{id, fmt.Errorf(format, args...)} }

// neededFor is what is wrong with snapshot of, for a call about snapshot id,
// which needs it.
func neededFor(id, of string, err error) error {
	if of == id {
		return err
	}
	return fmt.Errorf("snapshot %s needs another: %w", id, err)
}
