package doctor

import (
	"context"
	"sync"
	"time"

	"github.com/warren-vm/warren/internal/store"
)

// State is how a check went.
type State string

// The states.
const (
	OK   State = "ok"
	Warn State = "warn" // VMs run, but something is not as it should be
	Fail State = "fail" // no VM can run
)

// Check is one thing the host has or lacks. The field names are a promise to
// scripts that read the JSON.
type Check struct {
	// Name is stable: "qemu", "accelerator", ….
	Name  string `json:"name"`
	State State  `json:"state"`
	// Found says what is there, with the evidence.
	Found string `json:"found"`
	// Consequence and Remedy are empty when State is OK.
	Consequence string `json:"consequence,omitempty"`
	Remedy      string `json:"remedy,omitempty"`
}

// Report is the outcome of Examine.
type Report struct {
	// OK is true when no check failed: `kosa8 run` can do its work.
	OK     bool    `json:"ok"`
	Checks []Check `json:"checks"`
}

// Options say what to look at.
type Options struct {
	Home store.Home
	// Build is our own, which the supervisor must share.
	Build string
	// Repair removes what dead VMs left and what no snapshot needs.
	Repair bool
}

// examinations are in the order they are shown. They run side by side, but
// for the last two: others start programs, and a child between fork and exec
// holds the locks by which left-overs are told from what is in use.
var examinations = []struct {
	name string
	look func(context.Context, Options) Check
}{
	{"qemu", lookQEMU},
	{"accelerator", lookAccelerator},
	{"confinement", lookConfinement},
	{"supervisor", lookSupervisor},
	{"guest image", lookImage},
	{"template", lookTemplate},
	{"build tools", lookBuildTools},
	{"home", lookHome},
	{"disk space", lookDisk},
	{"memory", lookMemory},
	{"left-overs", lookLeftOvers},
	{"snapshots", lookSnapshots},
}

const alone = 2

// deadline bounds one examination. The slowest, a new digest of the guest
// image on a slow disk, takes seconds.
const deadline = time.Minute

// Examine looks at everything. It always reports on every check; one that
// does not come back in a minute fails.
func Examine(ctx context.Context, o Options) Report {
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	r := Report{OK: true, Checks: make([]Check, len(examinations))}
	var wg sync.WaitGroup
	beside := len(examinations) - alone
	for i, e := range examinations[:beside] {
		wg.Go(func() { r.Checks[i] = e.look(ctx, o) })
	}
	wg.Wait()
	for i, e := range examinations[beside:] {
		r.Checks[beside+i] = e.look(ctx, o)
	}
	for i := range r.Checks {
		r.Checks[i].Name = examinations[i].name
		if r.Checks[i].State == Fail {
			r.OK = false
		}
	}
	return r
}

func ok(found string) Check {
	return Check{State: OK, Found: found}
}

func warn(found, consequence, remedy string) Check {
	return Check{State: Warn, Found: found, Consequence: consequence, Remedy: remedy}
}

func fail(found, consequence, remedy string) Check {
	return Check{State: Fail, Found: found, Consequence: consequence, Remedy: remedy}
}
