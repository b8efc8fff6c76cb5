package house

import (
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// pkgImports is what one package imports: ours without the module path, and
// those of other modules in full. The standard library is left out.
type pkgImports struct {
	ours, third []string
}

func TestTheHouseKeepsItsRules(t *testing.T) {
	for _, fault := range faults(readHouse(t)) {
		t.Error(fault)
	}
}

func TestTheRulesAreNotAsleep(t *testing.T) {
	tests := []struct {
		name  string
		house map[string]pkgImports
		want  string // part of the fault, or "" for none
	}{
		{"an import that points down", map[string]pkgImports{"internal/machine": {ours: []string{"internal/vm"}}}, ""},
		{"an import that points up", map[string]pkgImports{"internal/vm": {ours: []string{"internal/machine"}}}, "internal/vm imports internal/machine"},
		{"types may be imported from anywhere", map[string]pkgImports{"internal/vm": {ours: []string{"pkg/task"}}}, ""},
		{"a package nobody placed", map[string]pkgImports{"internal/attic": {}}, "internal/attic is not in the list"},
		{"a name that says nothing", map[string]pkgImports{"internal/cli/utils": {}}, `the name "utils"`},
		{"host code in the guest", map[string]pkgImports{"cmd/warren-guest": {ours: []string{"internal/store"}}}, "cmd/warren-guest reaches internal/store"},
		{"host code in the guest by a detour", map[string]pkgImports{
			"internal/guest":      {ours: []string{"internal/guest/boot"}},
			"internal/guest/boot": {ours: []string{"internal/store"}},
		}, "internal/guest → internal/guest/boot → internal/store"},
		{"another module in the SDK", map[string]pkgImports{"pkg/kosa8": {third: []string{"example.org/x"}}}, "pkg/kosa8 reaches example.org/x"},
		{"our own packages in the SDK", map[string]pkgImports{"pkg/kosa8": {ours: []string{"internal/cli"}}}, "pkg/kosa8 reaches internal/cli"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := strings.Join(faults(tt.house), "\n")
			if tt.want == "" && got != "" || !strings.Contains(got, tt.want) {
				t.Errorf("faults %q, want one about %q", got, tt.want)
			}
		})
	}
}

// faults is what is wrong with a house.
func faults(house map[string]pkgImports) []string {
	var all []string
	fault := func(format string, args ...any) {
		all = append(all, fmt.Sprintf(format, args...))
	}
	for _, pkg := range slices.Sorted(maps.Keys(house)) {
		from := slices.Index(order, pkg)
		if from < 0 && !within(pkg, "examples") {
			fault("%s is not in the list of packages; decide where it stands and add it to internal/house/rules.go", pkg)
		}
		for name := range strings.SplitSeq(pkg, "/") {
			if slices.Contains(badNames, name) {
				fault("%s: the name %q says nothing about what the package is for", pkg, name)
			}
		}
		for _, to := range house[pkg].ours {
			if from >= 0 && !slices.Contains(anywhere, to) && slices.Index(order, to) <= from {
				fault("%s imports %s, which does not stand below it in internal/house/rules.go", pkg, to)
			}
		}
	}
	for _, rule := range only {
		all = append(all, narrowFaults(house, rule)...)
	}
	return all
}

func narrowFaults(house map[string]pkgImports, rule narrow) []string {
	var all []string
	for pkg, way := range reach(house, rule.pkg) {
		if pkg != rule.pkg && !within(pkg, rule.pkg) && !slices.ContainsFunc(rule.ours, func(p string) bool { return within(pkg, p) }) {
			all = append(all, fmt.Sprintf("%s reaches %s (%s): %s", rule.pkg, pkg, way, rule.why))
		}
		if third := house[pkg].third; !rule.third && len(third) > 0 {
			all = append(all, fmt.Sprintf("%s reaches %s (%s): %s", rule.pkg, third[0], way, rule.why))
		}
	}
	return all
}

func TestRulesNameNothingTwice(t *testing.T) {
	seen := map[string]bool{}
	for _, pkg := range order {
		if seen[pkg] {
			t.Errorf("%s stands twice in the order", pkg)
		}
		seen[pkg] = true
	}
	for _, rule := range only {
		for _, pkg := range append([]string{rule.pkg}, rule.ours...) {
			if !seen[pkg] {
				t.Errorf("rule for %s names %s, which is not in the order", rule.pkg, pkg)
			}
		}
	}
}

// reach gives every package of ours that can be reached from pkg, with the
// way there.
func reach(house map[string]pkgImports, pkg string) map[string]string {
	found := map[string]string{pkg: pkg}
	for todo := []string{pkg}; len(todo) > 0; todo = todo[1:] {
		for _, to := range house[todo[0]].ours {
			if _, ok := found[to]; !ok {
				found[to] = found[todo[0]] + " → " + to
				todo = append(todo, to)
			}
		}
	}
	return found
}

// readHouse reads the import lines of every package, whatever its build
// constraints. Tests of a package in its own name count as the package;
// external tests ("package x_test") may look up the house and do not count.
func readHouse(t *testing.T) map[string]pkgImports {
	t.Helper()
	root := moduleRoot(t)
	house := map[string]pkgImports{}
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			name := d.Name()
			if file != root && (strings.HasPrefix(name, ".") || name == "testdata" || name == "bin") {
				return fs.SkipDir
			}
			return nil
		}
		if filepath.Ext(file) != ".go" {
			return nil
		}
		rel, err := filepath.Rel(root, filepath.Dir(file))
		if err != nil {
			return err
		}
		return addImports(house, filepath.ToSlash(rel), file)
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(house) < 2 {
		t.Fatalf("found %d packages under %s; the test looks in the wrong place", len(house), root)
	}
	return house
}

func addImports(house map[string]pkgImports, pkg, file string) error {
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
	if err != nil {
		return fmt.Errorf("read imports of %s: %w", file, err)
	}
	if strings.HasSuffix(file, "_test.go") && strings.HasSuffix(f.Name.Name, "_test") {
		return nil
	}
	imports := house[pkg]
	for _, spec := range f.Imports {
		to, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return err
		}
		switch {
		case within(to, module):
			if to = strings.TrimPrefix(to, module+"/"); to != pkg && !slices.Contains(imports.ours, to) {
				imports.ours = append(imports.ours, to)
			}
		case strings.Contains(strings.SplitN(to, "/", 2)[0], ".") && !strings.HasSuffix(file, "_test.go"):
			imports.third = append(imports.third, to)
		}
	}
	house[pkg] = imports
	return nil
}

func within(pkg, parent string) bool {
	return pkg == parent || strings.HasPrefix(pkg, parent+"/")
}

func moduleRoot(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for d := dir; ; d = path.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "go.mod")); err == nil {
			return d
		}
		if d == "/" {
			t.Fatalf("no go.mod above %s", dir)
		}
	}
}
