// Package bench measures every figure the project states, each beside its
// floor: plain QEMU, or the guest alone, doing the same work in the same run.
//
// # Words
//
// The subject is what a user gets from Warren; the floor is the least the
// same work costs without Warren on this machine. A sample is one measurement
// of either. The ratio is the subject's median over the floor's, for every
// benchmark: under a time it wants to be small (1 is free), under a throughput
// it wants to be large (1 is free). A bar is a ratio, or a figure, that the
// project promises to keep.
//
// # How a figure comes about
//
// Subject and floor are measured by turns (A B A B …), so that a machine that
// grows slower or faster during the run does so for both. One turn of each
// goes before and is not counted: it pays for caches that a second run has.
// p50 and p99 are nearest-rank percentiles: always a sample that was really
// measured. They count from the best sample to the worst, so p99 is the value
// that 99 of 100 samples reach or better it, for times and throughputs alike.
//
// # What is measured
//
//   - boot: from starting the process `kosa8 run base -- echo …` to the first
//     byte on its standard output, which is what a user waits for. Floor:
//     from starting QEMU as its manual would have it, with the same
//     accelerator, number of processors, memory, kernel and initramfs, but no
//     disks, no confinement and no supervisor, to the line "warren: init" on
//     its console. Processor flags and kernel parameters that make a guest
//     quicker are Warren's own and not in the floor.
//
//   - exec: one run of `true` through client, supervisor and link, to its
//     exit status. Floor: the time the agent itself needs, inside the same
//     guest, to start `true` and wait for it.
//
//   - stdio: bytes through standard input of `cat` in the guest and back
//     through its standard output, compared by digest, in MiB/s of what went
//     in. Floor: the same bytes through `cat` on a bare virtio-serial port of
//     a plain QEMU, with neither supervisor, link nor agent on their way. The
//     phase supervisor_peak_mib is the most memory the supervisor ever held.
//
//   - create, restore, rewind: a machine from its template, from a snapshot, and
//     in place of another, until `true` has run in it. Floor of the first two:
//     plain QEMU with the same devices, files and state, unconfined and without
//     supervisor or monitor, from the start of the process to one answer of the
//     agent over the virtio-serial port. That guest gets no identity and starts
//     no program. Floor of rewind: create.
//
//   - fork10, fork100: so many copies of one running machine, from the call
//     until each has run `true`. Floor: as many plain restores, each until it
//     has answered; both sides start four at a time on two processors.
//
//   - snapshot-pause-4mib, snapshot-nochange: how long a snapshot keeps the
//     guest's processors from running, after 4 MiB of its memory were written,
//     and after nothing was done. Floor: what QEMU's own commands (stop, save
//     the devices, go on) took of it. The phases have the rest of the call.
//
//   - memory-idle, memory-touched-64mib: memory of one of ten copies, supervisor
//     included, by its proportional share. Floor: one of ten plain restores.
//
//   - disk-per-snapshot: what a snapshot takes on the disk, against the pages
//     that changed.
//
//   - chain-1, chain-50: restore from the first and from the fiftieth of fifty
//     snapshots in a row, memory and disk changed before each.
//
// The package starts processes and ends them: whatever way Run returns, none
// of them is left. It keeps no files.
package bench
