// Package debian gets packages from the sources that this host's own apt is
// configured to use, as any user and without touching the host's own state.
package debian

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/warren-vm/warren/internal/guestimage/tool"
)

// Errors that need something from the user.
var (
	// ErrNotDebian says that the host is not one whose packages a guest is
	// made of.
	ErrNotDebian = errors.New("not a Debian host")
	// ErrNoSources says that apt is configured, but not for Debian itself.
	ErrNoSources = errors.New("apt has no sources of Debian's own packages")
)

// Release is what host and guest run: the guest is made of the host's own
// packages.
type Release struct {
	// Codename is Debian's: bookworm.
	Codename string
	// Arch is Debian's name of the architecture: amd64.
	Arch string
}

// Host reads what release this host runs.
func Host(ctx context.Context, run *tool.Runner) (Release, error) {
	data, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return Release{}, fmt.Errorf("%w: %w", ErrNotDebian, err)
	}
	r, err := parseRelease(string(data))
	if err != nil {
		return Release{}, err
	}
	arch, err := run.Output(ctx, "dpkg", "--print-architecture")
	r.Arch = strings.TrimSpace(arch)
	return r, err
}

func parseRelease(osRelease string) (Release, error) {
	field := map[string]string{}
	for line := range strings.Lines(osRelease) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), "=")
		field[k] = strings.Trim(v, `"'`)
	}
	if field["ID"] != "debian" {
		return Release{}, fmt.Errorf("%w: /etc/os-release says %q; build the guest image on Debian 12 or newer, "+
			"or in a container of it, and share WARREN_HOME", ErrNotDebian, field["ID"])
	}
	if field["VERSION_CODENAME"] == "" {
		return Release{}, fmt.Errorf("%w of a named release: /etc/os-release has no VERSION_CODENAME; use a stable release", ErrNotDebian)
	}
	return Release{Codename: field["VERSION_CODENAME"]}, nil
}

// Apt is a view of the host's sources with package lists of its own, so that
// nothing depends on when the host last ran apt-get update, or on who may.
type Apt struct {
	run  *tool.Runner
	rel  Release
	dir  string
	conf string
}

// settings keep apt in its own folder and from running the host's hooks
// (some tell the desktop about new packages).
const settings = `#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::Retries "3";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::IndexTargets::deb::DEP-11-icons-small::DefaultEnabled "false";
Acquire::IndexTargets::deb::DEP-11-icons::DefaultEnabled "false";
Acquire::IndexTargets::deb::DEP-11-icons-hidpi::DefaultEnabled "false";
Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled "false";
Dir::State "%[1]s/state";
Dir::Cache "%[1]s/cache";
`

// Open fetches the package lists into dir, which it makes.
func Open(ctx context.Context, run *tool.Runner, rel Release, dir string) (*Apt, error) {
	for _, d := range []string{"state/lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			return nil, err
		}
	}
	a := &Apt{run: run, rel: rel, dir: dir, conf: filepath.Join(dir, "apt.conf")}
	if strings.ContainsAny(dir, "\"\n") {
		return nil, fmt.Errorf("the path %q cannot be written in an apt configuration", dir)
	}
	if err := os.WriteFile(a.conf, fmt.Appendf(nil, settings, dir), 0o600); err != nil {
		return nil, err
	}
	if err := run.Run(ctx, a.command("apt-get", "update", "-q")); err != nil {
		return nil, fmt.Errorf("fetch package lists: %w", err)
	}
	return a, nil
}

func (a *Apt) command(name string, args ...string) tool.Command {
	return tool.Command{Name: name, Args: append([]string{"-c", a.conf}, args...), Dir: a.dir}
}

func (a *Apt) output(ctx context.Context, name string, args ...string) (string, error) {
	var out strings.Builder
	c := a.command(name, args...)
	c.Stdout = &out
	err := a.run.Run(ctx, c)
	return out.String(), err
}

// Lists is the folder with the package lists, in apt's layout.
func (a *Apt) Lists() string { return filepath.Join(a.dir, "state", "lists") }

// indexFields are asked of apt for every index of every source.
const indexFields = "$(REPO_URI)\t$(RELEASE)\t$(COMPONENT)\t$(ORIGIN)\t$(CODENAME)\t$(CREATED_BY)\t$(ARCHITECTURE)"

// Sources are the lines of a sources.list for Debian's own packages of this
// release, its updates and its security fixes. Sources of others that the
// host may have are left out: a guest made of them would not be the same as
// the next host's.
func (a *Apt) Sources(ctx context.Context) ([]string, error) {
	out, err := a.output(ctx, "apt-get", "indextargets", "--format", indexFields)
	if err != nil {
		return nil, err
	}
	lines := parseTargets(out, a.rel)
	if len(lines) == 0 {
		return nil, fmt.Errorf("%w of %s; see /etc/apt/sources.list.d and sources.list(5)", ErrNoSources, a.rel.Codename)
	}
	return lines, nil
}

func parseTargets(targets string, rel Release) []string {
	var lines []string
	seen := map[string]bool{}
	s := bufio.NewScanner(strings.NewReader(targets))
	for s.Scan() {
		f := strings.Split(s.Text(), "\t")
		if len(f) != 7 || f[3] != "Debian" || f[5] != "Packages" || f[6] != rel.Arch {
			continue
		}
		switch strings.TrimPrefix(f[4], rel.Codename) {
		case "", "-updates", "-security":
		default:
			continue
		}
		// main is enough for all that the recipe names.
		line := fmt.Sprintf("deb %s %s %s", f[0], f[1], f[2])
		if f[2] == "main" && !seen[line] {
			seen[line] = true
			lines = append(lines, line)
		}
	}
	return lines
}

// Settings are the host's own settings for fetching (proxies, retries,
// certificates, where its passwords are) as lines of an apt configuration.
func (a *Apt) Settings(ctx context.Context) (string, error) {
	out, err := a.output(ctx, "apt-config", "dump", "--no-empty")
	if err != nil {
		return "", err
	}
	var kept strings.Builder
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "Acquire::") && !strings.HasPrefix(line, "Acquire::IndexTargets") {
			kept.WriteString(line)
		}
	}
	kept.WriteString("Dir::Etc::netrc \"/etc/apt/auth.conf\";\nDir::Etc::netrcparts \"/etc/apt/auth.conf.d\";\n")
	return kept.String(), nil
}

// dependency is the package that a kernel meta package stands for.
var dependency = regexp.MustCompile(`(?m)^Depends: (linux-image-[a-z0-9.+-]+)`)

// Kernel fetches the kernel that the meta package meta (linux-image-amd64)
// stands for today into dir and unpacks it there, below "kernel". It returns
// the kernel's version as its modules' folder is named. Nothing is installed.
func (a *Apt) Kernel(ctx context.Context, meta, dir string) (root, version string, err error) {
	shown, err := a.output(ctx, "apt-cache", "show", "--no-all-versions", meta)
	if err != nil {
		return "", "", fmt.Errorf("find the kernel package: %w", err)
	}
	m := dependency.FindStringSubmatch(shown)
	if m == nil {
		return "", "", fmt.Errorf("find the kernel package: %s does not depend on one", meta)
	}
	fetch := a.command("apt-get", "download", "-q", m[1])
	fetch.Dir = dir
	if err := a.run.Run(ctx, fetch); err != nil {
		return "", "", fmt.Errorf("fetch %s: %w", m[1], err)
	}
	debs, err := filepath.Glob(filepath.Join(dir, "linux-image-*.deb"))
	if err != nil || len(debs) != 1 {
		return "", "", fmt.Errorf("fetch %s: apt left %d packages instead of one", m[1], len(debs))
	}
	root = filepath.Join(dir, "kernel")
	if err := a.run.Run(ctx, tool.Command{Name: "dpkg-deb", Args: []string{"-x", debs[0], root}}); err != nil {
		return "", "", fmt.Errorf("unpack %s: %w", m[1], err)
	}
	if err := os.Remove(debs[0]); err != nil {
		return "", "", err
	}
	return root, strings.TrimPrefix(m[1], "linux-image-"), nil
}
