package guestapi

import "time"

// Protocol is the version of this package's calls. Host and guest image must
// agree on it exactly; the image's manifest carries it.
const Protocol = 6

// Call names one request with a JSON document in both directions.
type Call[Req, Resp any] struct {
	// Path is the HTTP path; the method is always POST.
	Path string
	// MaxRequest and MaxResponse bound the documents, in bytes.
	MaxRequest, MaxResponse int64
	// Deadline is how long the host waits for the answer. A call whose
	// length the user decides has none of its own here.
	Deadline time.Duration
}

const kib = 1 << 10

// The calls. An answer without content is Empty.
var (
	// Hello asks the agent who it is. It needs no preparation and changes
	// nothing; it is also how the host asks whether a guest still answers.
	Hello = Call[Empty, HelloInfo]{"/v1/hello", 4 * kib, 64 * kib, 5 * time.Second}

	// Prepare gives a booted or restored guest its identity and its disk.
	// Until it has succeeded every call that runs something or touches files
	// is refused with CodeNotPrepared.
	Prepare = Call[PrepareRequest, PrepareInfo]{"/v1/prepare", 64 * kib, 64 * kib, 20 * time.Second}

	// Freeze stops every program before the host captures the guest, Thaw lets
	// them run on, and Renew makes a restored copy one of its own before it
	// does so; snapshot.go tells the story. All three need a prepared guest.
	Freeze = Call[Empty, FreezeInfo]{"/v1/freeze", 4 * kib, 4 * kib, 5 * time.Second}
	Thaw   = Call[ThawRequest, Empty]{"/v1/thaw", 4 * kib, 4 * kib, 5 * time.Second}
	Renew  = Call[RenewRequest, RenewInfo]{"/v1/renew", 64 * kib, 64 * kib, 20 * time.Second}

	// SetClock sets the wall clock.
	SetClock = Call[SetClockRequest, Empty]{"/v1/clock", 4 * kib, 4 * kib, 5 * time.Second}

	// Signal sends a signal to the process group of a running Exec.
	Signal = Call[SignalRequest, Empty]{"/v1/exec/signal", 4 * kib, 4 * kib, 5 * time.Second}

	// Resize sets the window size of a running Exec that has a terminal.
	Resize = Call[ResizeRequest, Empty]{"/v1/exec/resize", 4 * kib, 4 * kib, 5 * time.Second}

	// Stat, List and Remove look at and remove files in the guest.
	Stat   = Call[StatRequest, FileInfo]{"/v1/file/stat", 16 * kib, 64 * kib, 10 * time.Second}
	List   = Call[ListRequest, ListInfo]{"/v1/file/list", 16 * kib, 16 << 20, 30 * time.Second}
	Remove = Call[RemoveRequest, Empty]{"/v1/file/remove", 16 * kib, 4 * kib, 2 * time.Minute}

	// Figures tells what memory, disk and processes are in use.
	Figures = Call[Empty, FiguresInfo]{"/v1/figures", 4 * kib, 64 * kib, 5 * time.Second}

	// SpawnTime measures, inside the guest, how long the agent takes to start
	// a program and wait for its end: the floor under every Exec. It is for
	// benchmarks.
	SpawnTime = Call[SpawnTimeRequest, SpawnTimeInfo]{"/v1/exec/floor", 16 * kib, 1 << 20, 2 * time.Minute}

	// Shutdown stops every process, syncs and powers off. The answer comes
	// before the machine goes down.
	Shutdown = Call[Empty, Empty]{"/v1/shutdown", 4 * kib, 4 * kib, 5 * time.Second}
)

// Paths of what is not a Call.
const (
	// ExecPath takes an ExecRequest by POST with "Upgrade: warren-exec".
	ExecPath    = "/v1/exec"
	ExecUpgrade = "warren-exec"

	// FilePath reads a file with GET (query: path, offset, limit) and writes
	// one with PUT (query: path, mode in octal, user). A write is whole or not
	// at all: it goes to a temporary name beside the target and is renamed.
	FilePath = "/v1/file"

	// TarPath packs a tree with GET (query: path) and unpacks one with PUT
	// (query: path, user). Entries that would leave the target are refused.
	TarPath = "/v1/tar"

	// ErrorTrailer carries the Error (JSON) of a transfer that went wrong
	// after its body had begun.
	ErrorTrailer = "X-Warren-Error"
)

// Limits that both sides keep.
const (
	// MaxFrame bounds the payload of one exec frame.
	MaxFrame = 64 * kib
	// MaxExecRequest bounds an ExecRequest: Linux itself refuses arguments
	// and environment of more than a quarter of the stack (2 MiB).
	MaxExecRequest = 4 << 20
	// MaxStreams is how many streams the host has open at once.
	MaxStreams = 256
)

// Empty is a document without content.
type Empty struct{}

// HelloInfo is the agent's answer to Hello.
type HelloInfo struct {
	Protocol int `json:"protocol"`
	// ImageID is the id of the guest image the agent was built into.
	ImageID string `json:"image_id"`
	Kernel  string `json:"kernel"`
	// Prepared is true once Prepare succeeded in this life of the guest, and
	// false again for ever when a Renew failed.
	Prepared bool `json:"prepared"`
	// Frozen is true between Freeze and Thaw or Renew. A copy of a frozen guest
	// is frozen. Left out when false, so that a host of an older protocol
	// reads far enough to see which one this is.
	Frozen bool `json:"frozen,omitempty"`
	// UptimeMS is the time since the kernel started.
	UptimeMS int64 `json:"uptime_ms"`
}

// SetClockRequest sets the wall clock.
type SetClockRequest struct {
	UnixNano int64 `json:"unix_nano"`
}

// ExecRequest starts a program in the guest.
type ExecRequest struct {
	// ID names the run for Signal and Resize: 1 to 64 of [a-z0-9-], chosen
	// by the host, not in use.
	ID string `json:"id"`
	// Argv is the program and its arguments, no shell. A program without a
	// slash is looked up in PATH.
	Argv []string `json:"argv"`
	// Env is K=V, laid over the user's default environment.
	Env []string `json:"env,omitempty"`
	// Dir is the working folder; empty is the user's home.
	Dir string `json:"dir,omitempty"`
	// User is a name or "uid" or "uid:gid"; empty is root.
	User string `json:"user,omitempty"`
	// TTY gives the program a terminal of Rows × Cols; output then comes as
	// stdout alone.
	TTY  bool   `json:"tty,omitempty"`
	Rows uint16 `json:"rows,omitempty"`
	Cols uint16 `json:"cols,omitempty"`
	// Stdin says that Stdin frames follow; without it the program reads
	// an empty input.
	Stdin bool `json:"stdin,omitempty"`
	// TimeoutMS stops the whole process group after that long: SIGTERM, and
	// SIGKILL two seconds later. 0 is no limit.
	TimeoutMS int64 `json:"timeout_ms,omitempty"`
}

// ExitStatus is how a program ended.
type ExitStatus struct {
	// Code is the exit code when Signal is 0.
	Code int `json:"code"`
	// Signal is the signal that ended the program, or 0.
	Signal int `json:"signal,omitempty"`
	// TimedOut is true when the agent stopped it after TimeoutMS.
	TimedOut bool `json:"timed_out,omitempty"`
	// OOMKilled is true when the kernel ended it for want of memory.
	OOMKilled bool `json:"oom_killed,omitempty"`
}

// ExitCode is the status as a shell reports it: the code, 128 + the signal,
// or 124 after a timeout.
func (s ExitStatus) ExitCode() int {
	switch {
	case s.TimedOut:
		return 124
	case s.Signal != 0:
		return 128 + s.Signal
	default:
		return s.Code
	}
}

// SignalRequest sends Signal to the process group of Exec ID.
type SignalRequest struct {
	ID     string `json:"id"`
	Signal int    `json:"signal"`
}

// ResizeRequest sets the window of Exec ID.
type ResizeRequest struct {
	ID   string `json:"id"`
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// StatRequest asks about one path; links are not followed.
type StatRequest struct {
	Path string `json:"path"`
}

// FileInfo describes one file.
type FileInfo struct {
	Name string `json:"name"`
	Size int64  `json:"size"`
	// Mode is the permission bits; Type one of "file", "dir", "symlink",
	// "device", "pipe", "socket".
	Mode  uint32 `json:"mode"`
	Type  string `json:"type"`
	UID   uint32 `json:"uid"`
	GID   uint32 `json:"gid"`
	MTime int64  `json:"mtime"` // Unix seconds
	Link  string `json:"link,omitempty"`
}

// ListRequest lists a folder; at most Limit entries (0: 10,000), sorted.
type ListRequest struct {
	Path  string `json:"path"`
	Limit int    `json:"limit,omitempty"`
}

// ListInfo is a folder's content; Truncated says that Limit cut it.
type ListInfo struct {
	Entries   []FileInfo `json:"entries"`
	Truncated bool       `json:"truncated,omitempty"`
}

// RemoveRequest removes a path; with Recursive a folder and what is in it.
type RemoveRequest struct {
	Path      string `json:"path"`
	Recursive bool   `json:"recursive,omitempty"`
}

// FiguresInfo is what is in use in the guest. Sizes are bytes.
type FiguresInfo struct {
	MemTotal     int64 `json:"mem_total"`
	MemAvailable int64 `json:"mem_available"`
	DiskTotal    int64 `json:"disk_total"`
	DiskFree     int64 `json:"disk_free"`
	Processes    int   `json:"processes"`
	// What follows is the agent's own. AgentHeap is what it holds: the heap
	// right after a collection, so that two figures can be compared.
	// AgentMemory is that with stacks and the runtime's own, after the same
	// collection gave back what was free. The resident size would say less: the
	// guest's kernel merges pages into huge ones, 2 MiB at a time, used or not.
	AgentHeap       int64 `json:"agent_heap"`
	AgentMemory     int64 `json:"agent_memory"`
	AgentFDs        int   `json:"agent_fds"`
	AgentGoroutines int   `json:"agent_goroutines"`
	Execs           int   `json:"execs"` // running now
}

// SpawnTimeRequest runs Argv Count times (1 to 1,000).
type SpawnTimeRequest struct {
	Argv  []string `json:"argv"`
	Count int      `json:"count"`
}

// SpawnTimeInfo holds one figure per run.
type SpawnTimeInfo struct {
	Microseconds []int64 `json:"microseconds"`
}
