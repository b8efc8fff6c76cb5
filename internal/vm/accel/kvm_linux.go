package accel

import "os"

type kvmProbe struct{}

func (kvmProbe) open() error {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return f.Close()
}
