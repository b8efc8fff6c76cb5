package debian

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

func TestReleaseIsReadFromOSRelease(t *testing.T) {
	r, err := parseRelease("PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nVERSION_CODENAME=bookworm\nID=debian\n")
	if err != nil || r.Codename != "bookworm" {
		t.Fatalf("got %+v, %v", r, err)
	}
	for text, says := range map[string]string{
		"ID=fedora\n": `/etc/os-release says "fedora"; build the guest image on Debian 12 or newer`,
		"ID=debian\n": "has no VERSION_CODENAME",
	} {
		if _, err := parseRelease(text); !errors.Is(err, ErrNotDebian) || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestOnlyDebiansOwnPackagesOfThisReleaseAreUsed(t *testing.T) {
	targets := strings.Join([]string{
		// address, suite as configured, component, origin, codename, index, architecture
		"http://mirror.test/debian/\tstable\tmain\tDebian\tbookworm\tPackages\tamd64",
		"http://mirror.test/debian/\tstable\tmain\tDebian\tbookworm\tContents-deb\tamd64",
		"http://mirror.test/debian/\tstable\tmain\tDebian\tbookworm\tPackages\tamd64",
		"http://mirror.test/debian/\tstable\tnon-free\tDebian\tbookworm\tPackages\tamd64",
		"http://mirror.test/debian/\tstable\tmain\tDebian\tbookworm\tPackages\ti386",
		"http://mirror.test/debian/\tstable-updates\tmain\tDebian\tbookworm-updates\tPackages\tamd64",
		"http://mirror.test/debian/\tbookworm-backports\tmain\tDebian Backports\tbookworm-backports\tPackages\tamd64",
		"http://mirror.test/debian/\ttrixie\tmain\tDebian\ttrixie\tPackages\tamd64",
		"http://mirror.test/security/\tstable-security\tmain\tDebian\tbookworm-security\tPackages\tamd64",
		"http://other.test/\tnodistro\tmain\tSomebody\tnodistro\tPackages\tamd64",
		"garbage",
	}, "\n")
	got := parseTargets(targets, Release{Codename: "bookworm", Arch: "amd64"})
	want := []string{
		"deb http://mirror.test/debian/ stable main",
		"deb http://mirror.test/debian/ stable-updates main",
		"deb http://mirror.test/security/ stable-security main",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}
