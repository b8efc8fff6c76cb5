// Package guestimage builds, verifies and opens the guest image: the kernel,
// the initramfs, the root disk and the empty data disk that all VMs share.
//
// # Words
//
// A generation is one build of the image. It is a folder that is never
// changed after it was published; its name is the image id, which is made from
// the digests of all that is in it, so that the same content has the same
// name. The link "current" names the generation in use.
//
//	$WARREN_HOME/guest/
//	  lock                                        held by a build
//	  current -> <image id>
//	  <image id>/                                 0700, its files 0444
//	    warren-guest-linux-<arch>.raw             the root disk: squashfs, not compressed
//	    warren-guest-linux-<arch>.raw.manifest.json
//	    kernel                                    vmlinux
//	    initramfs                                 cpio: modules, then the agent
//	    data.raw                                  sparse 32 GiB ext4
//	    data.qcow2                                an empty overlay over data.raw
//	    build.json                                what it was built from
//	    stamp.json                                sizes, inodes and change times of verified files
//	    lock                                      held shared by whoever uses it (Hold)
//	  .build-*, .old-*                            left by a build that was killed
//
// The files can be read by anyone who can reach them, and only their owner can
// reach the folder: QEMU runs as another user and gets them by bind mount.
//
// # The life of a generation
//
// Build makes it in a folder of its own, flushes it to the disk, renames it to
// its name, and swaps the link. Killed before the swap, the old one stays in
// use; what the killed build left is removed by the next one. Two builds never
// run at once in one home: the second waits. A build then removes generations
// that are neither in use nor the one that was in use before, unless somebody
// holds them (Hold) or Options.Keep says that something refers to them.
//
// A generation can come from another machine: Carry gives its files, Install
// takes them, verifies each against the manifest, and publishes them. It does
// not take the place of the one in use, and no build takes anything over from
// it.
//
// Open trusts a generation whose files have the sizes, inodes and change times
// that were recorded when their digests were last computed: a change time
// cannot be set back without root. Otherwise it computes the digests, which
// takes a second or two.
//
// A build with the recipe of the generation in use and another agent takes its
// disks, its kernel and its modules over by hard link: less than two seconds.
// A build with the same agent too does nothing. New packages are taken when
// Options.Fresh is set, or the recipe changes.
//
// # What it does not do
//
// The manifest protects against accidents and against a mix-up of versions,
// not against its owner: whoever can write the home can write the manifest.
package guestimage
