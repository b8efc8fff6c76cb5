package cli

import "runtime/debug"

// Version is the release all of Warren's programs belong to.
const Version = "0.1.0-dev"

// Build names the very build of the running program, as the Go tool stamped
// it. Programs of one build have the same.
func Build() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(unknown)"
}
