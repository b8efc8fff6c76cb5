package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
)

// collectEvery is how often a home's snapshots are collected at most.
const collectEvery = time.Minute

// sweep removes beside a command what others left in the home.
type sweep struct {
	home   store.Home
	ctx    context.Context
	cancel context.CancelFunc
	vms    sync.WaitGroup
}

// sweepAside removes what dead VMs left, and then what no snapshot needs,
// while the command does its work. What it could not remove `kosa8 doctor`
// names; it is no reason to disturb the command.
func sweepAside(home store.Home) (finish func()) {
	s := beginSweep(home)
	s.collect()
	return s.finish
}

// beginSweep is sweepAside without the collection, for a command that restores
// a snapshot first: the collection has the store's gate for a moment.
func beginSweep(home store.Home) *sweep {
	s := &sweep{home: home}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.vms.Go(func() { home.Sweep(s.ctx) })
	return s
}

// collect removes what no snapshot needs, if that was not done just now.
func (s *sweep) collect() {
	go func() {
		s.vms.Wait()
		if s.ctx.Err() == nil && dueForCollection(s.home, time.Now()) {
			snapshots.In(s.home).Collect(s.ctx, machine.KeepTemplate(s.ctx, s.home))
		}
	}()
}

// dueForCollection says whether it is time, and notes that it was done. It
// creates nothing in a home that has no snapshots.
func dueForCollection(home store.Home, now time.Time) bool {
	if _, err := os.Stat(home.SnapshotsDir()); err != nil {
		return false
	}
	stamp := filepath.Join(home.Cache(), "collected")
	info, err := os.Stat(stamp)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return false
	}
	// A time to come is that of a clock that was put back.
	if err == nil && now.Sub(info.ModTime()).Abs() < collectEvery {
		return false
	}
	f, err := os.OpenFile(stamp, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return false
	}
	f.Close()
	return os.Chtimes(stamp, now, now) == nil
}

// finish waits for the end of the sweep, for a moment: one that takes long is
// the next command's to finish. It does not wait for the collection, which may
// end with the process at any point.
func (s *sweep) finish() {
	timer := time.AfterFunc(5*time.Second, s.cancel)
	s.vms.Wait()
	timer.Stop()
	s.cancel()
}
