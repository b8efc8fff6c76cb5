// Package files reads and changes files in the guest for the agent.
//
// Paths are absolute and mean what they mean to the guest's root, links
// included: there is nothing in the guest that its agent has to keep callers
// out of. Unpack is the exception. An archive comes from elsewhere, so its
// entries are confined to the target folder by os.Root whatever they are
// called and whatever links they or the guest have put in the way.
//
// Every result is bounded: lists by entries and bytes, archives by entries.
// Errors carry the system's errno for the caller to sort.
package files
