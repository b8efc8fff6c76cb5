// Package ram keeps the memory of VMs in files.
//
// The words. A flat file holds every page of a RAM at its place. QEMU maps one
// privately, so what the guest changes becomes anonymous pages of QEMU's own
// and the file stays as it is. A difference holds the pages by which a RAM
// differs from the one it was before; a flat file and a chain of differences
// are the RAM of a snapshot.
//
// The life of a snapshot: Attach finds the mapping in the running QEMU, and
// Tracker.Prepare takes memory while the VM still runs. While it is stopped,
// Tracker.Capture finds QEMU's own pages, tells by a digest per page which are
// not what the last snapshot holds, and copies those; this alone is what the
// guest waits for. The VM goes on, Capture.Finish writes the difference, and
// when it is safe on the disk Tracker.Commit makes it what the next capture is
// compared with. To restore, QEMU maps the flat file again and Process.Inject
// writes the differences into it, or Flatten makes one flat file out of all of
// them for QEMU to map; then Tracker.Settle looks once.
//
// The package stops no VM and syncs no file: whoever calls it does both. It
// does not know what is in the memory, and does not check that a flat file
// and a difference belong together; the snapshot's manifest says so.
//
// QEMU is not trusted here either. Everything is read through the kernel at
// the addresses that Attach found, so a guest that has broken out can spoil
// its own snapshots and no more. It can also hold up who reads its memory
// (with userfaultfd), until it is killed: run these calls where that can be
// done.
//
// # RAM difference, version 1
//
// Numbers are little-endian, a page is 4096 bytes, and a page's number is its
// place in the RAM divided by 4096. The file has three parts and not a byte
// more.
//
// The header, 4096 bytes:
//
//	 0  8  "WARRNRAM"
//	 8  4  version: 1
//	12  4  page size: 4096
//	16  8  pages of the RAM, 1 to 4294967295
//	24  8  data pages in this file
//	32  8  entries of the table
//	40  8  where the table starts: 4096 + the length of the data
//	48  8  length of the data if it is packed; else 0, and it is 4096 × data pages
//	56  4  CRC-32C of the table
//	60  4  CRC-32C of bytes 0 to 59
//	64     zero
//
// The data pages, in ascending order of their numbers; if they are at most
// 512, and shrink, packed together as one S2 block (Snappy's format with
// longer matches), which must unpack to exactly their length. They have no checksum:
// the snapshot's manifest carries a SHA-256 of the whole file. They come
// before the table so that they can be written before the table is known.
//
// The table, 16 bytes per entry:
//
//	 0  8  number of the first page
//	 8  4  count of pages, at least 1
//	12  4  kind: 0 the pages are among the data, 1 the pages are all zero
//
// Entries ascend, do not overlap and lie within the RAM. Two that touch are of
// different kinds, so a difference can be written in one way only. The counts
// of kind 0 add up to the data pages of the header.
package ram
