// Package store is Warren's state on disk: where things lie under
// $WARREN_HOME, who may touch them when, and how what a killed process left
// is found and removed.
//
// The layout:
//
//	$WARREN_HOME            ~/.local/share/warren unless set; 0700
//	  guest/                guest images; see package guestimage
//	  snapshots/            what VMs were at one instant; see package snapshots
//	  cache/                what can be measured or made again
//	  vms/
//	    .lock               flock: creators share it, a sweep has it alone
//	    .new-<id>-<random>  a VM folder being created
//	    .dead-<id>-<random> a VM folder being removed
//	    <id>/
//	      lock              flock, held for as long as the VM has an owner
//	      vm.json           Record: who runs the VM
//	      control.sock      the supervisor's socket
//	      console.log       the guest's serial console, bounded
//	      vmm.log           the supervisor's own log
//	      data.qcow2        the VM's data disk
//
// The life of a VM folder: CreateVM makes it under a temporary name, takes
// its lock and renames it. The lock then passes to the supervisor as an open
// file, so that there is no moment without a holder, and the kernel drops it
// when the supervisor ends however it ends. The lock alone says whether a VM
// lives; the pids in the record only say whom to kill when it does not.
// Sweep removes every folder whose lock is free.
package store
