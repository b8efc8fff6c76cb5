//go:build ignore

// Undo shows what snapshots are for: a machine is checkpointed, damaged,
// rewound and forked three ways, with the time that each step took.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"github.com/warren-vm/warren/internal/cli"
	"github.com/warren-vm/warren/internal/guestapi"
	"github.com/warren-vm/warren/internal/machine"
	"github.com/warren-vm/warren/internal/store"
	"github.com/warren-vm/warren/internal/store/snapshots"
	"github.com/warren-vm/warren/internal/vm"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := show(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "undo:", err)
		os.Exit(1)
	}
}

// tour is the machine that is shown, and how long each step took.
type tour struct {
	m     *machine.Machine
	id    string // of the checkpoint
	times []cli.Phase
}

func show(ctx context.Context) (err error) {
	vmm, err := filepath.Abs("bin/abox-vmm")
	if err != nil {
		return err
	}
	o := machine.Options{VMM: vmm, Hostname: "parent", Label: "make run"}
	if _, err := machine.Template(ctx, o); err != nil {
		return err
	}
	t := &tour{}
	err = t.step("create", func() (err error) { t.m, err = machine.Create(ctx, o); return err })
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.end(context.WithoutCancel(ctx))) }()
	fmt.Println("a machine, with a file and a program that counts:")
	if err := run(ctx, t.m, os.Stdout, "echo precious > /root/file; (i=0; while :; do i=$((i+1)); echo $i > /run/count; sleep 0.1; done) & sleep 0.5; cat /root/file"); err != nil {
		return err
	}
	if err := t.checkpointAndDamage(ctx); err != nil {
		return err
	}
	if err := t.forkThree(ctx); err != nil {
		return err
	}
	fmt.Println()
	return cli.WriteChart(os.Stdout, t.times)
}

// end leaves nothing. The checkpoint goes last: the machine stands on it.
func (t *tour) end(ctx context.Context) error {
	err := t.m.Close(ctx)
	home, homeErr := store.DefaultHome()
	if err = errors.Join(err, homeErr); err != nil || t.id == "" {
		return err
	}
	st := snapshots.In(home, snapshots.WithOwner(vm.Own))
	if _, err := st.Collect(ctx, nil); err != nil { // the fork's capture
		return err
	}
	return st.Delete(ctx, t.id)
}

func (t *tour) step(name string, do func() error) error {
	began := time.Now()
	if err := do(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	t.times = append(t.times, cli.Phase{Name: name, Took: time.Since(began)})
	return nil
}

func (t *tour) checkpointAndDamage(ctx context.Context) error {
	err := t.step("checkpoint", func() error {
		info, err := t.m.Save(ctx, "make run")
		if err == nil {
			t.id = info.ID
			fmt.Printf("checkpoint %s: the machine stood still for %s, %.1f MiB had changed\n",
				t.id, cli.Short(time.Duration(info.PauseUS)*time.Microsecond), float64(info.DataPages)/256)
		}
		return err
	})
	if err != nil {
		return err
	}
	err = t.step("damage", func() error {
		return run(ctx, t.m, os.Stdout, "rm -rf /root/file /etc")
	})
	if err != nil {
		return err
	}
	fmt.Println("damaged: the file and /etc are gone")
	err = t.step("rewind", func() error {
		next, err := t.m.Rewind(ctx, t.id)
		if err == nil {
			t.m = next
		}
		return err
	})
	if err != nil {
		return err
	}
	fmt.Println("rewound; the file is back, and the program goes on counting:")
	return run(ctx, t.m, os.Stdout, "cat /root/file; cat /run/count; sleep 0.5; cat /run/count")
}

func (t *tour) forkThree(ctx context.Context) error {
	var forks machine.Forks
	err := t.step("fork 3", func() (err error) {
		forks, err = t.m.Fork(ctx, 3, machine.Options{Label: "make run"}, machine.ForkHooks{
			Name: func(i int) string { return fmt.Sprintf("copy-%d", i+1) },
		})
		return err
	})
	if err != nil {
		return err
	}
	fmt.Printf("forked three ways; the machine stood still for %s. Each copy is its own:\n",
		cli.Short(time.Duration(forks.Capture.PauseUS)*time.Microsecond))
	for _, c := range forks.Copies {
		if c.Err != nil {
			err = errors.Join(err, c.Err)
			continue
		}
		var out strings.Builder
		err = errors.Join(err, run(ctx, c.Machine, &out, "echo $(uname -n), machine $(cut -c 1-8 /etc/machine-id), random $(head -c 4 /dev/urandom | od -An -tx4), file $(cat /root/file)"))
		fmt.Print("  ", out.String())
		err = errors.Join(err, c.Machine.Close(ctx))
	}
	return err
}

func run(ctx context.Context, m *machine.Machine, out io.Writer, script string) error {
	p, err := m.Exec(ctx, guestapi.ExecRequest{ID: "tour", Argv: []string{"sh", "-c", script}}, out, os.Stderr)
	if err != nil {
		return err
	}
	status, err := p.Wait()
	if err == nil && status.ExitCode() != 0 {
		err = fmt.Errorf("%q ended with code %d", script, status.ExitCode())
	}
	return err
}
