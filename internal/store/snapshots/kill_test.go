package snapshots

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/store"
)

const killHome = "WARREN_SNAPSHOTS_KILL_HOME"

func TestMain(m *testing.M) {
	if home := os.Getenv(killHome); home != "" {
		fmt.Println("ended", churn(In(store.Home(home))))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// churn makes and removes snapshots until it is killed, and says so. What it
// says it is going to remove may be there or not.
func churn(s *Store) error {
	ctx := context.Background()
	var mine []string // listed, newest last; forks are not among them
	for round := 0; ; round++ {
		kind, parent := KindSnapshot, ""
		if len(mine) > 0 && round%3 != 0 {
			parent = mine[len(mine)-1]
		}
		if round%4 == 3 {
			kind = KindFork
		}
		id := NewID()
		if kind == KindFork {
			fmt.Println("removing", id) // any Collect may
		}
		sn, err := churnPublish(ctx, s, id, plan(kind, parent, id))
		if err != nil {
			return err
		}
		fmt.Println("published", id)
		if _, err := sn.MakeFlat(ctx, buildFlat); err != nil {
			return err
		}
		if err := sn.Close(); err != nil {
			return err
		}
		if kind == KindSnapshot {
			mine = append(mine, id)
		}
		if len(mine) > 4 {
			last := mine[len(mine)-1]
			mine = mine[:len(mine)-1]
			fmt.Println("removing", last)
			if err := s.Delete(ctx, last); err != nil && !errors.Is(err, ErrNeeded) {
				return err
			}
		}
		if round%5 == 4 {
			if _, err := s.Collect(ctx, nil); err != nil {
				return err
			}
		}
	}
}

func churnPublish(ctx context.Context, s *Store, id string, m Manifest) (*Snapshot, error) {
	d, err := s.Draft(ctx, id)
	if err != nil {
		return nil, err
	}
	if err := fillFiles(d, m); err != nil {
		return nil, err
	}
	return d.Publish(ctx, m)
}

// kill runs two churns at once, kills them, and returns what they said.
func kill(t *testing.T, home store.Home) (said [][]string) {
	t.Helper()
	after := time.Duration(20+rand.IntN(400)) * time.Millisecond
	var outs []*strings.Builder
	var children []*exec.Cmd
	for range 2 {
		out := &strings.Builder{}
		c := exec.Command(os.Args[0])
		c.Env = append(os.Environ(), killHome+"="+home.Dir())
		c.Stdout, c.Stderr = out, out
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		outs, children = append(outs, out), append(children, c)
	}
	time.Sleep(after)
	for i, c := range children {
		_ = c.Process.Kill()
		_ = c.Wait()
		var lines []string
		for scan := bufio.NewScanner(strings.NewReader(outs[i].String())); scan.Scan(); {
			lines = append(lines, scan.Text())
		}
		said = append(said, lines)
	}
	return said
}

func TestAKilledProcessLosesNothingItPublishedAndLeavesNothing(t *testing.T) {
	rounds := 20
	if os.Getenv("WARREN_SOAK") != "" {
		rounds = 500
	}
	total := 0
	for range rounds {
		home := homeOf(t)
		s := In(home)
		published, removing := map[string]bool{}, map[string]bool{}
		for _, lines := range kill(t, home) {
			for _, line := range lines {
				word, id, _ := strings.Cut(line, " ")
				switch word {
				case "published":
					published[id] = true
				case "removing":
					removing[id] = true
				default:
					t.Fatal(lines)
				}
			}
		}
		total += len(published)
		unreported := 0
		for _, id := range listed(t, s) {
			if !published[id] && !removing[id] {
				unreported++
			}
			if err := s.Verify(t.Context(), id, nil); err != nil {
				t.Error(err)
			}
		}
		if unreported > 2 { // at most one in flight for each
			t.Errorf("%d snapshots that nobody reported", unreported)
		}
		for id := range published {
			if removing[id] {
				continue
			}
			sn, err := s.Open(t.Context(), id)
			if err != nil {
				t.Error(err)
				continue
			}
			sn.Close()
		}
		done := collect(t, s, nil)
		if left := append(leftoversIn(t, s), freshIn(s)...); len(left) > 0 {
			t.Error("left after a collection:", left, done)
		}
		if all := listed(t, s); slices.ContainsFunc(all, func(id string) bool { return s.Verify(t.Context(), id, nil) != nil }) {
			t.Error("damaged after a collection")
		}
	}
	t.Logf("%d snapshots in %d rounds", total, rounds)
	if total < rounds {
		t.Errorf("only %d snapshots in %d rounds prove little", total, rounds)
	}
}

// freshIn are half made files in the cache.
func freshIn(s *Store) []string {
	dir, _ := s.cacheDir(ramCache)
	entries, _ := os.ReadDir(dir)
	var names []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), newPrefix) {
			names = append(names, e.Name())
		}
	}
	return names
}
