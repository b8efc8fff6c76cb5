package machine_test

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"

	"github.com/warren-vm/warren/internal/machine"
)

// draws is a program that was running before the fork and goes on drawing.
const draws = `
import os, time
n = 0
with open("/dev/shm/draws", "w", buffering=1) as f:
    while n < 200000:
        n += 1
        f.write("%d %s\n" % (n, os.urandom(16).hex()))
        time.sleep(0.01)
`

// hook is run in each copy before anything else.
const hook = `#!/bin/sh
wc -l < /dev/shm/draws > /run/hook-lines
head -c 16 /dev/urandom | od -An -tx1 > /run/hook-key
echo $WARREN_HOSTNAME > /run/hook-name
`

// private is everything that no two copies may share, one thing a line.
const private = `
cat /etc/machine-id /run/warren/generation /run/hook-key
uname -n
head -c 32 /dev/urandom | od -An -tx1 | tr -d '\n'; echo
python3 -c '
import os, uuid, random, secrets, tempfile
print(os.getrandom(16).hex()); print(uuid.uuid4()); print(random.random()); print(secrets.token_hex(16)); print(next(tempfile._get_candidate_names()))'
cat /proc/sys/kernel/random/uuid
`

func TestCopiesAreNoTwins(t *testing.T) {
	copies := 4
	if soak {
		copies = 100
	}
	m := create(t)
	tell(t, m, "mkdir -p /etc/warren/renew.d; cat > /etc/warren/renew.d/10-keys <<'END'\n"+hook+"END\nchmod 755 /etc/warren/renew.d/10-keys")
	python(t, m, draws)
	awaits(t, m, "test $(wc -l < /dev/shm/draws) -gt 20")
	info := save(t, m)

	told, drawn := make([][]string, copies), make([][]string, copies+1)
	var wg sync.WaitGroup
	places := make(chan struct{}, 4)
	for i := range copies {
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			o := options()
			o.Hostname = fmt.Sprintf("copy-%d", i)
			c, err := machine.Restore(testContext(t), info.ID, o)
			if err != nil {
				t.Errorf("copy %d: %v", i, err)
				return
			}
			defer closeMachine(t, c)
			wantRightClock(t, c)
			told[i] = strings.Split(tell(t, c, private), "\n")
			awaits(t, c, "test $(wc -l < /dev/shm/draws) -gt $(( $(cat /run/hook-lines) + 3 ))")
			drawn[i] = lines(t, c, "/dev/shm/draws")
			if got := tell(t, c, "cat /run/hook-name; uname -n"); got != o.Hostname+"\n"+o.Hostname {
				t.Errorf("copy %d is called %q", i, got)
			}
			if n := number(t, c, "cat /run/hook-lines"); n > len(drawn[i]) {
				t.Errorf("the hook saw %d lines of %d", n, len(drawn[i]))
			} else {
				told[i] = append(told[i], fmt.Sprintf("lines %d", n))
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	drawn[copies] = lines(t, m, "/dev/shm/draws")
	known := map[string]int{}
	for i, all := range told {
		for _, line := range all[:len(all)-1] {
			if other, twin := known[line]; twin {
				t.Errorf("copies %d and %d both say %q", other, i, line)
			}
			known[line] = i
		}
	}
	// All parted at the same draw, the original too: none drew one that
	// another had.
	parted := common(drawn[0], drawn[1])
	for i := range drawn {
		for j := range i {
			if got := common(drawn[i], drawn[j]); got != parted {
				t.Errorf("%d and %d part after %d draws, others after %d", i, j, got, parted)
			}
		}
	}
	for i, all := range told {
		// One line may have been drawn and not yet written.
		if line := all[len(all)-1]; line != fmt.Sprintf("lines %d", parted) && line != fmt.Sprintf("lines %d", parted-1) {
			t.Errorf("copies part after %d draws, the hook of copy %d saw %s: programs ran before it", parted, i, line)
		}
	}
	t.Logf("%d copies parted after %d draws", copies, parted)
}

// lines are those of a file, but for the last, which may not be whole.
func lines(t *testing.T, m *machine.Machine, path string) []string {
	t.Helper()
	r, err := m.ReadFile(context.Background(), path, 0, -1)
	if err != nil {
		t.Error(err)
		return nil
	}
	defer r.Close()
	data, err := io.ReadAll(r)
	if err != nil {
		t.Error(err)
	}
	all := strings.Split(string(data), "\n")
	return all[:len(all)-1]
}

// common is how many first lines two have in common.
func common(a, b []string) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}
