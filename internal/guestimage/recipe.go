package guestimage

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"

	"github.com/warren-vm/warren/internal/guestimage/debian"
)

// recipeVersion changes whenever the code that builds an image would build
// another one from the same packages. Images of older recipes are built anew.
const recipeVersion = 3

// packages are in the root disk, with all they depend on, Debian's essential
// ones and apt.
var packages = []string{
	// what every program and every user expects
	"bash", "ca-certificates", "curl", "iproute2", "less", "mount", "netbase", "openssl", "patch", "procps", "python3",
	// what an agent's tools run
	"git", "ripgrep",
	// what runs containers
	"crun",
}

// bootModules are in the initramfs: they lead from the kernel to the disks,
// the link and the host's randomness. Up to squashfs they are for the root
// disk, which the agent begins to read while it loads the others.
var bootModules = []string{
	"virtio_pci", "virtio_blk", "squashfs", "virtio_console", "virtio_rng", "overlay",
	// ext4's checksums: it asks for an alias that any of the two provides. The
	// second is the fast one and refuses to load on processors without it.
	"crc32c_generic", "?crc32c_intel", "ext4",
}

// diskModules are on the root disk, for whoever needs them later: network,
// containers, host folders, images as disks. A leading ? is for modules that
// some kernels have built in or gave up.
var diskModules = []string{
	"virtio_net", "9p", "9pnet_fd", "fuse", "erofs", "loop", "veth", "bridge", "tun", "?dummy",
	"nf_tables", "nft_ct", "nft_chain_nat", "nft_masq", "nft_compat", "?xt_MASQUERADE", "?xt_addrtype", "?xt_conntrack",
}

// dataOptions are how the data disk is made. They are part of the recipe.
//
//   - Everything random or dated is fixed, so that the disk is the same bytes
//     each time. The UUID is the same in every VM, which matters to nobody: no
//     guest sees another's disk.
//   - assume_storage_prezeroed: a new sparse file is zero. Without it the first
//     mount starts a thread that writes half a gigabyte of zeros into the
//     overlay of every VM.
//   - A small journal: what passes through it stays in the overlay, and so in
//     every snapshot.
//   - No reserved blocks: the guest's root is its only user that matters.
var dataOptions = []string{
	"-q", "-F", "-t", "ext4", "-L", "data", "-m", "0", "-J", "size=32",
	"-U", "5b6d2c1e-7a38-4f0a-9c54-3d1f0e8a6b72",
	"-E", "hash_seed=0c9e4a57-1f6b-4d83-8a2e-b7c5d4e3f291,assume_storage_prezeroed=1,root_owner=0:0,nodiscard",
}

// overlayOptions are how the empty overlay is made. With subclusters a write
// of 4 KiB, ext4's block, takes 4 KiB; without, the first write to any 64 KiB
// copies all of it out of the base.
const overlayOptions = "extended_l2=on,cluster_size=128k"

// recipe is all that decides what is built, but for the packages' versions and
// the agent.
func recipe(rel debian.Release) string {
	data, err := json.Marshal([]any{
		recipeVersion, rel.Codename, rel.Arch, packages, bootModules, diskModules,
		int64(DataSize), dataOptions, dataFolders, overlayOptions,
	})
	if err != nil {
		panic(fmt.Sprintf("recipe: %v", err)) // strings and numbers alone
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// dataFolders makes what the agent puts over the root disk. It would make them
// itself, at 20 to 30 ms for an emulated guest's first writes to a new disk.
const dataFolders = `set_current_time 20010909014640
mkdir upper
mkdir work
`
