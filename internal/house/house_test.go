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

func TestEveryPackageHasItsPlace(t *testing.T) {
	for _, pkg := range slices.Sorted(maps.Keys(readHouse(t))) {
		if !slices.Contains(order, pkg) && !within(pkg, "examples") {
			t.Errorf("%s is not in the list of packages; decide where it stands and add it to internal/house/rules.go", pkg)
		}
		for name := range strings.SplitSeq(pkg, "/") {
			if slices.Contains(badNames, name) {
				t.Errorf("%s: the name %q says nothing about what the package is for", pkg, name)
			}
		}
	}
}

func TestImportsPointDown(t *testing.T) {
	house := readHouse(t)
	for pkg, imports := range house {
		from := slices.Index(order, pkg)
		for _, to := range imports.ours {
			if slices.Contains(anywhere, to) || from < 0 {
				continue
			}
			if at := slices.Index(order, to); at <= from {
				t.Errorf("%s imports %s, which does not stand below it in internal/house/rules.go", pkg, to)
			}
		}
	}
}

func TestNarrowPackagesStayNarrow(t *testing.T) {
	house := readHouse(t)
	for _, rule := range only {
		if _, ok := house[rule.pkg]; !ok {
			continue // a room that is not built yet
		}
		for pkg, path := range reach(house, rule.pkg) {
			if pkg != rule.pkg && !slices.Contains(rule.ours, pkg) {
				t.Errorf("%s reaches %s (%s): %s", rule.pkg, pkg, path, rule.why)
			}
			if third := house[pkg].third; !rule.third && len(third) > 0 {
				t.Errorf("%s reaches %s (%s): %s", rule.pkg, third[0], path, rule.why)
			}
		}
	}
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
			if to = strings.TrimPrefix(to, module+"/"); to != pkg {
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
