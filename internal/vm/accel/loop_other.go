//go:build !(linux && amd64)

package accel

import "context"

// measure takes KVM on trust: no host other than amd64 is known that has
// the device and then emulates.
func (kvmProbe) measure(context.Context) (measurement, error) {
	return measurement{Steps: loopSteps, Took: 1, Finished: true}, nil
}
