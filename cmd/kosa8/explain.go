package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/machine"
)

// explain turns the error of a program that could not be run, or not to its
// end, into one with the right exit code and a hint.
func explain(ctx context.Context, m *machine.Machine, o runOptions, err error) error {
	var refused *guestapi.Error
	if !errors.As(err, &refused) {
		return because(ctx, err)
	}
	switch refused.Code {
	case guestapi.CodeNotExecutable:
		return &cli.Exit{Code: cli.ExitNotExecutable, Err: refused}
	case guestapi.CodeBadRequest:
		return &cli.Exit{Code: cli.ExitUsage, Err: refused}
	case guestapi.CodeNotFound:
		// The folder of -w or the user of -u can be missing too; the guest
		// says which.
		if !strings.Contains(refused.Message, "no such program") {
			return &cli.Exit{Code: cli.ExitNotFound, Err: refused}
		}
		return &cli.Exit{Code: cli.ExitNotFound, Err: notFound(ctx, m, o.exec.Argv[0])}
	default:
		return refused
	}
}

// notFound says what the image has instead.
func notFound(ctx context.Context, m *machine.Machine, program string) error {
	err := fmt.Errorf("cannot run %q: no such program in image %s", program, baseImage)
	if strings.Contains(program, " ") {
		return cli.Advise(err, fmt.Sprintf("no shell is involved; for one: kosa8 run %s -- sh -c %q", baseImage, program))
	}
	// Only a hint: a guest that is slow to answer gets no more time than a
	// user would wait for it.
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	folder := "/usr/bin"
	if path.IsAbs(program) {
		folder = path.Dir(program)
	}
	list, listErr := m.List(ctx, guestapi.ListRequest{Path: folder})
	if listErr != nil {
		return err
	}
	var names []string
	for _, e := range list.Entries {
		names = append(names, e.Name)
	}
	near := nearest(path.Base(program), names, 3)
	if len(near) == 0 {
		return cli.Advise(err, fmt.Sprintf("see what it has: kosa8 run %s -- ls %s", baseImage, folder))
	}
	return cli.Advise(err, fmt.Sprintf("the image has: %s (kosa8 run %s -- ls %s)", strings.Join(near, ", "), baseImage, folder))
}

// nearest gives up to limit names that someone who typed word may have meant,
// the likeliest first: a letter or two off, or what word begins.
func nearest(word string, names []string, limit int) []string {
	type candidate struct {
		name string
		off  int
	}
	var found []candidate
	for _, name := range names {
		off := distance(word, name)
		if off > max(1, len(word)/3) && (len(word) < 2 || !strings.HasPrefix(name, word)) {
			continue
		}
		found = append(found, candidate{name, off})
	}
	slices.SortFunc(found, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.off, b.off), cmp.Compare(a.name, b.name))
	})
	var out []string
	for _, c := range found[:min(limit, len(found))] {
		out = append(out, c.name)
	}
	return out
}

// distance counts the letters to add, drop or change to get from a to b. It
// gives up on names so long that nobody mistypes them: they come from a guest.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			diagonal, row[j] = row[j], min(row[j]+1, row[j-1]+1, diagonal+cost)
		}
	}
	return row[len(b)]
}
