package house

// module is the path that every package of the repository starts with.
const module = "github.com/warren-vm/warren"

// order is the house from the roof down. A package imports only what stands
// below it. A package that is not in the list fails the test: decide where it
// belongs, then write it here.
var order = []string{
	"cmd/kosa8",
	"cmd/kosa8d",
	"cmd/abox",
	"cmd/aibox",
	"cmd/abox-vmm",
	"cmd/warren-guest",

	"scripts",
	"internal/house",

	"pkg/kosa8",
	"pkg/abox",

	"internal/doctor",
	"internal/cli",
	"internal/httpapi",
	"internal/sandbox",
	"internal/session",
	"internal/broker",
	"internal/unattended",
	"internal/gitbundle",
	"internal/policy",
	"internal/audit",
	"internal/bench",
	"internal/machine",
	"internal/image",
	"internal/guestimage",
	"internal/guestimage/rootdisk",
	"internal/guestimage/initramfs",
	"internal/guestimage/kernel",
	"internal/guestimage/debian",
	"internal/guestimage/tool",
	"internal/supervisor/server",
	"internal/supervisor",
	"internal/supervisor/control",
	"internal/store/snapshots",
	"internal/vm",
	"internal/vm/accel",
	"internal/vm/jail",
	"internal/vm/ram",
	"internal/vm/qmp",
	"internal/store", // its locks are held by the supervisor
	"internal/store/digest",
	"internal/netswitch",
	"internal/egress",
	"internal/share",
	"internal/guest/boot",
	"internal/guest",
	"internal/guest/hooks",
	"internal/guest/files",
	"internal/guest/proc",
	"internal/link",

	"pkg/task",
	"pkg/protocol",
	"internal/guestapi",
}

// anywhere lists the packages that hold types and pure functions alone. Any
// package may import them, and they import nothing of ours but each other.
var anywhere = []string{"pkg/task", "pkg/protocol", "internal/guestapi"}

// narrow is a rule for one package.
type narrow struct {
	pkg string
	// ours are the packages it may reach, with the rooms below them; its own
	// rooms it always may.
	ours []string
	// third says that it may import packages of other modules.
	third bool
	why   string
}

// only narrows what a package may import of ours, whatever the order says.
// The rule holds for everything reached through those imports too.
var only = []narrow{
	{"internal/guest", []string{"internal/link", "internal/guestapi", "pkg/task", "pkg/protocol"}, true,
		"what runs in the VM must not carry host code"},
	{"cmd/warren-guest", []string{"internal/guest", "internal/link", "internal/guestapi", "pkg/task", "pkg/protocol"}, true,
		"what runs in the VM must not carry host code"},
	{"internal/link", []string{"internal/guestapi"}, true,
		"host and guest both stand on the link"},
	{"internal/guestapi", nil, false, "types and pure functions alone"},
	{"pkg/protocol", []string{"internal/guestapi", "pkg/task"}, false, "types and pure functions alone"},
	{"pkg/task", []string{"internal/guestapi", "pkg/protocol"}, false, "types and pure functions alone"},
	{"pkg/kosa8", nil, false, "the SDK is the standard library alone"},
	{"internal/egress", []string{"internal/guestapi"}, false, "the decision is pure functions"},
}

// badNames say nothing about what a package is for.
var badNames = []string{"util", "utils", "common", "helper", "helpers", "misc", "shared", "base", "lib"}
