package proc

import (
	"bufio"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/warren-vm/warren/internal/guestapi"
)

// maxAccountFile bounds how much of passwd or group is read: the guest's
// root writes them.
const maxAccountFile = 4 << 20

// User is who a program runs as.
type User struct {
	Name     string
	UID, GID uint32
	Groups   []uint32 // supplementary
	Home     string
}

// Accounts looks users up in passwd and group files. It remembers what it
// read for as long as the files stay the same. Safe for concurrent use.
type Accounts struct {
	dir string

	mu     sync.Mutex
	passwd table[account]
	group  table[membership]
}

type account struct {
	name     string
	uid, gid uint32
	home     string
}

type membership struct {
	name    string
	gid     uint32
	members []string
}

// NewAccounts reads passwd and group in dir ("/etc").
func NewAccounts(dir string) *Accounts {
	return &Accounts{
		dir:    dir,
		passwd: table[account]{parse: parsePasswd},
		group:  table[membership]{parse: parseGroup},
	}
}

// Lookup finds a user by name, by "uid" or by "uid:gid"; empty is root.
//
// A uid without an entry is allowed: its group has the same number, its home
// is "/". With "uid:gid" there are no supplementary groups. A missing passwd
// file is an empty one, in which root still exists.
func (a *Accounts) Lookup(user string) (User, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	entries := a.passwd.read(filepath.Join(a.dir, "passwd"))
	if user == "" {
		user = "root"
	}
	for _, e := range entries {
		if e.name == user {
			return a.complete(e), nil
		}
	}
	if user == "root" {
		return User{Name: "root", Home: "/root"}, nil
	}
	first, second, hasGroup := strings.Cut(user, ":")
	uid, ok := parseID(first)
	if !ok {
		return User{}, refuse(guestapi.CodeNotFound, "no user %q in the guest; give a name from its /etc/passwd, a uid or uid:gid", user)
	}
	found := User{Name: first, UID: uid, GID: uid, Home: "/"}
	for _, e := range entries {
		if e.uid == uid {
			found = a.complete(e)
			break
		}
	}
	if hasGroup {
		gid, ok := parseID(second)
		if !ok {
			return User{}, refuse(guestapi.CodeBadRequest, "user %q: the group must be a number", user)
		}
		found.GID, found.Groups = gid, nil
	}
	return found, nil
}

func (a *Accounts) complete(e account) User {
	u := User{Name: e.name, UID: e.uid, GID: e.gid, Home: e.home}
	if u.Home == "" {
		u.Home = "/"
	}
	for _, g := range a.group.read(filepath.Join(a.dir, "group")) {
		if g.gid != u.GID && slices.Contains(g.members, u.Name) {
			u.Groups = append(u.Groups, g.gid)
		}
	}
	return u
}

// table is a parsed file and what shows whether the file is still the same.
type table[T any] struct {
	parse   func(fields []string) (T, bool)
	entries []T
	stamp   syscall.Stat_t
}

func (t *table[T]) read(path string) []T {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil || st.Mode&syscall.S_IFMT != syscall.S_IFREG {
		t.entries, t.stamp = nil, syscall.Stat_t{}
		return nil
	}
	if t.stamp.Ino == st.Ino && t.stamp.Dev == st.Dev && t.stamp.Size == st.Size &&
		t.stamp.Mtim == st.Mtim && t.stamp.Ctim == st.Ctim {
		return t.entries
	}
	file, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer file.Close()
	t.entries, t.stamp = parseTable(file, t.parse), st
	return t.entries
}

func parseTable[T any](r io.Reader, parse func([]string) (T, bool)) []T {
	var entries []T
	lines := bufio.NewScanner(io.LimitReader(r, maxAccountFile))
	lines.Buffer(nil, maxAccountFile)
	for lines.Scan() {
		if e, ok := parse(strings.Split(lines.Text(), ":")); ok {
			entries = append(entries, e)
		}
	}
	return entries
}

func parsePasswd(f []string) (account, bool) {
	if len(f) < 7 || f[0] == "" {
		return account{}, false
	}
	uid, ok1 := parseID(f[2])
	gid, ok2 := parseID(f[3])
	return account{name: f[0], uid: uid, gid: gid, home: f[5]}, ok1 && ok2
}

func parseGroup(f []string) (membership, bool) {
	if len(f) < 4 || f[0] == "" {
		return membership{}, false
	}
	gid, ok := parseID(f[2])
	return membership{name: f[0], gid: gid, members: strings.Split(f[3], ",")}, ok
}

// parseID reads a uid or gid. The highest number means "unchanged" to the
// kernel and is no id.
func parseID(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err == nil && n != 1<<32-1
}
