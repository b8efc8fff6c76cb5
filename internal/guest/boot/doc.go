// Package boot is the agent as PID 1 of a VM.
//
// Main's walk: say `warren: init`; mount what every program expects; load the
// modules named in /modules/order; mount the root disk read-only; serve the
// link, start the processors that the kernel did not, and say `warren: idle`.
// In this state a template is frozen: no name, no disk, no program has run,
// and nothing in memory is one VM's own.
//
// Prepare then gives the machine its randomness, clock, name and disk, and
// makes the overlay of root disk and data disk the root of everything. PID 1
// stays the program from the initramfs; only its root changes.
//
// A prepared machine can be frozen and thawed as a whole, and a copy of a
// frozen one renewed. The freezer holds the group of all programs; the agent
// and the hooks of internal/guest/hooks are beside it.
//
// The kernel never chooses PID 1 to be killed for want of memory, so no
// oom_score_adj is needed, which children would inherit.
package boot
