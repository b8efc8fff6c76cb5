package machine_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/warren-vm/warren/internal/machine"
)

// load is a guest that works in several processes. What they keep holds
// together at every instant: each step is written down before it is taken and
// after, in memory that all share, so that a checker can tell whether it sees
// all of one instant.
const load = `
import hashlib, mmap, os, time

MB = 16
os.makedirs("/root/load", exist_ok=True)
shared = mmap.mmap(os.open("/dev/shm/shared", os.O_RDWR | os.O_CREAT), 4096) if os.path.exists("/dev/shm/shared") else None
if shared is None:
    fd = os.open("/dev/shm/shared", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 4096)
    shared = mmap.mmap(fd, 4096)
# Numbers are written in one store: struct.pack_into clears the place first.
numbers = memoryview(shared).cast("Q")
def put(i, n): numbers[i] = n

def pattern(gen, block):
    return hashlib.sha256(b"%d %d" % (gen, block)).digest() * 2048  # 64 KiB

def memory():
    # generation g fills block after block; slot 0 is the generation, slot 1
    # the blocks of it that are whole, slot 2 the one being written + 1.
    fd = os.open("/dev/shm/pattern", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, MB << 20)
    m = mmap.mmap(fd, MB << 20)
    for b in range(MB * 16): m[b << 16:(b + 1) << 16] = pattern(0, b)
    put(3, 1)
    g = 0
    while True:
        g += 1
        put(1, 0); put(0, g)
        for b in range(MB * 16):
            put(2, b + 1)
            m[b << 16:(b + 1) << 16] = pattern(g, b)
            put(1, b + 1)
            time.sleep(0.0005)

def files():
    n = 0
    while True:
        n += 1
        put(8, n)                      # begun
        data = hashlib.sha256(b"file %d" % n).digest() * (1 + n * 37 % 2000)
        path = "/root/load/%d" % (n % 40)
        with open(path + ".new", "wb") as f:
            f.write(hashlib.sha256(data).digest() + data)
            f.flush(); os.fsync(f.fileno())
        os.rename(path + ".new", path)
        put(9, n)                      # done
        time.sleep(0.002)

def counters():
    # 16 and 17 are never more than one apart, the first being ahead.
    n = 0
    while True:
        n += 1
        put(16, n)
        hashlib.sha256(b"x" * 5000).digest()
        put(17, n)
        if n % 50 == 0: time.sleep(0.002)

for work in (memory, files, counters):
    if os.fork() == 0:
        work()
os.wait()
`

// check looks at all of it while the load is stopped.
const check = `
import hashlib, os, struct
shared = open("/dev/shm/shared", "rb").read()
get = lambda i: struct.unpack_from("<Q", shared, 8 * i)[0]
def pattern(gen, block):
    return hashlib.sha256(b"%d %d" % (gen, block)).digest() * 2048
m = open("/dev/shm/pattern", "rb").read()
g, done, at = get(0), get(1), get(2)
bad = []
for b in range(len(m) >> 16):
    block = m[b << 16:(b + 1) << 16]
    if block not in ([pattern(g, b)] if b < done else [pattern(g - 1, b), pattern(g, b)] if b + 1 in (at, done + 1) else [pattern(max(g - 1, 0), b)]):
        # the one that is being written may be half of each
        if b + 1 == at and done < at: continue
        bad.append("block %d of generation %d, %d are done, at %d" % (b, g, done, at))
begun, ended = get(8), get(9)
if not ended <= begun <= ended + 1: bad.append("files begun %d, done %d" % (begun, ended))
for name in os.listdir("/root/load"):
    if name.endswith(".new"): continue
    data = open("/root/load/" + name, "rb").read()
    if hashlib.sha256(data[32:]).digest() != data[:32]: bad.append("file %s does not hold its sum" % name)
    want = [hashlib.sha256(b"file %d" % n).digest() * (1 + n * 37 % 2000) for n in range(max(1, ended - 40), begun + 1) if n % 40 == int(name)]
    if data[32:] not in want: bad.append("file %s is none of those that were written there" % name)
a, b = get(16), get(17)
if not b <= a <= b + 1: bad.append("counters %d and %d" % (a, b))
print(g * 1000 + done, ended, a, "; ".join(bad[:5]))
`

// look is what check says: how far each of the three is, and what is wrong.
func look(t *testing.T, m *machine.Machine) (at [3]int, bad string) {
	t.Helper()
	status, out, errs := output(t, m, sh("pkill -STOP -f 'MB = [1]6' && python3 -c '"+check+"' && pkill -CONT -f 'MB = [1]6'"))
	if status.ExitCode() != 0 {
		t.Fatalf("the check ended with %d: %s", status.ExitCode(), errs)
	}
	fields := strings.SplitN(strings.TrimSpace(out), " ", 4)
	for i := range at {
		fmt.Sscan(fields[i], &at[i])
	}
	if len(fields) > 3 {
		bad = fields[3]
	}
	return at, bad
}

func TestSnapshotsUnderLoadAreOfOneInstant(t *testing.T) {
	rounds := 3
	if soak {
		rounds = 200
	}
	m := create(t)
	python(t, m, load)
	awaits(t, m, `test "$(od -An -tu8 -j24 -N8 /dev/shm/shared | tr -d ' ')" = 1`)
	var before [3]int
	for i := range rounds {
		time.Sleep(time.Duration(rand.IntN(400)) * time.Millisecond)
		info := save(t, m)
		after, bad := look(t, m)
		if bad != "" {
			t.Fatalf("round %d, the original: %s", i, bad)
		}
		if err := m.Pause(testContext(t)); err != nil { // two of them are slow on a small host
			t.Fatal(err)
		}
		c := restore(t, info.ID)
		at, bad := look(t, c)
		if bad != "" {
			t.Fatalf("round %d, the copy: %s", i, bad)
		}
		for k := range at {
			if at[k] < before[k] {
				t.Errorf("round %d: counter %d is at %d in the copy and was at %d before the snapshot", i, k, at[k], before[k])
			}
		}
		if soak || i == 0 {
			if later, bad := look(t, c); bad != "" || later[2] <= at[2] {
				t.Errorf("round %d, the copy later: %v after %v, %s", i, later, at, bad)
			}
		}
		before = after
		closeMachine(t, c)
		if err := m.Resume(testContext(t)); err != nil {
			t.Fatal(err)
		}
		t.Logf("round %d: %d pages, paused %d µs, at %v", i, info.DataPages, info.PauseUS, at)
	}
}
