package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/store/snapshots"
)

// checkIDs is the fault of the command line in what was given for ids.
func checkIDs(ctx context.Context, ids []string) error {
	var errs []error
	for _, id := range ids {
		if err := snapshots.CheckID(id); err != nil {
			errs = append(errs, orLabel(ctx, id, err))
		}
	}
	if len(errs) > 0 {
		return &cli.Exit{Code: cli.ExitUsage, Err: errors.Join(errs...)}
	}
	return nil
}

// orLabel is err of an id that is none, or that nothing has. When it is the
// label of snapshots it says which: labels are for people, and several may have
// the same.
func orLabel(ctx context.Context, id string, err error) error {
	sh, unread := readShelf(ctx)
	if unread != nil || id == "" {
		return err
	}
	var ids []string
	for _, m := range sh.all {
		if m.Label == id {
			ids = append(ids, m.ID)
		}
	}
	switch len(ids) {
	case 0:
		return err
	case 1:
		return cli.Advise(fmt.Errorf("%q is the label of a snapshot, not its id", id), "its id: "+ids[0])
	}
	return cli.Advise(fmt.Errorf("%q is the label of snapshots, not an id", id), "their ids, the oldest first: "+strings.Join(ids, ", "))
}

// named is err of a call about a snapshot, with orLabel for one that is not
// there.
func named(ctx context.Context, id string, err error) error {
	if errors.Is(err, snapshots.ErrNotFound) {
		return orLabel(ctx, id, err)
	}
	return err
}
