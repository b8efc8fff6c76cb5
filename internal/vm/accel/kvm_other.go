//go:build !linux

package accel

import "io/fs"

type kvmProbe struct{}

func (kvmProbe) open() error { return fs.ErrNotExist }
