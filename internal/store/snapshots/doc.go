// Package snapshots keeps what VMs were at one instant on disk: where it
// lies, who may touch it when, how it is known to be unchanged, and how what
// nobody needs goes away. It knows nothing of QEMU or of what is in the files.
//
// The layout:
//
//	$WARREN_HOME/snapshots/
//	  .lock                 the gate: shared by who publishes or opens, alone
//	                        by who renames a snapshot away
//	  .template-<key>.lock  held while the template of that key is being made
//	  .new-<id>-<random>    a draft
//	  .dead-<id>-<random>   a snapshot being removed
//	  <id>/
//	    lock                shared by everybody who needs the snapshot, alone
//	                        by its maker and by who removes it
//	    manifest.json       what it is, with digests; never changed
//	    stamp.json          sizes, inodes and times when last verified
//	    state               the devices
//	    memory              all memory, sparse, or its difference to a parent
//	    disk.qcow2          the overlay it froze, if the disk had changed
//	$WARREN_HOME/cache/ram/<host boot>/
//	  <id>                  all memory of a snapshot that holds a difference
//	  <id>.stamp            what it was when made; its time says when last used
//	  <id>.lock             held by who makes or removes it
//
// The words: a snapshot needs its parent (its memory is a difference to the
// parent's) and the snapshots whose overlays make up its disk. What it needs,
// and what that needs, is its closure. A fork is a snapshot that was made on
// the way to another VM and stays only while something needs it; a template
// stays while its caller wants it; any other stays until it is deleted.
//
// The life of a snapshot: Draft makes a folder under a temporary name and
// holds its lock alone. The caller writes the files. Publish computes the
// digests, syncs everything, and renames; the rename is the instant from
// which the snapshot exists. The maker's lock becomes a shared one behind the
// closed gate, so there is no moment without a holder. Open takes the lock of
// the snapshot and of its closure, shared, and looks whether the files are as
// they were when their digests were last computed. Delete and Collect take
// the lock alone, rename, and then remove the files, so a removal cut short
// leaves nothing under a snapshot's name.
//
// Why nothing is removed that is needed: whoever removes has the gate alone
// from reading all manifests to the rename. A publisher has the gate shared
// from finding its closure to its own rename, and an opener from finding the
// closure to having all locks. The kernel drops the locks of a process that
// ends, however it ends. What a killed process left, a draft or a half removed
// snapshot, is known by its name and its free lock, and Collect removes it.
//
// What is in the cache may go any time. Base, Flat and MakeFlat take a shared
// lock of the file itself, for as long as the Snapshot is open: Collect leaves
// such a file alone.
//
// Damage is found, not repaired: a manifest holds its own digest, and a file
// whose size, inode or times changed is read again before anything uses it.
package snapshots
