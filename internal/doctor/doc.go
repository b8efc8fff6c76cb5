// Package doctor looks at everything Warren needs of a host and says of each
// thing what it found, what follows from it and what to do about it.
//
// It tries what can be tried instead of reading what ought to be: namespaces
// are made, the accelerator is timed, the guest image is opened. It changes
// nothing, except that a measured accelerator is remembered and, when asked
// to repair, what dead VMs left and what no snapshot needs is removed.
package doctor
