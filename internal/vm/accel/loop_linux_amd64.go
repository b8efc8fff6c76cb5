package accel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From the kernel's API (Documentation/virt/kvm/api.rst), which is stable.
const (
	kvmGetAPIVersion       = 0xAE00
	kvmCreateVM            = 0xAE01
	kvmGetVCPUMmapSize     = 0xAE04
	kvmCreateVCPU          = 0xAE41
	kvmSetUserMemoryRegion = 0x4020AE46
	kvmSetTSSAddr          = 0xAE47
	kvmRun                 = 0xAE80
	kvmGetRegs             = 0x8090AE81
	kvmSetRegs             = 0x4090AE82
	kvmGetSregs            = 0x8138AE83
	kvmSetSregs            = 0x4138AE84

	kvmAPIVersion = 12

	exitHLT  = 5
	exitIntr = 10

	immediateExit = 1 // offset in struct kvm_run, one byte
	exitReason    = 8 // offset in struct kvm_run, u32

	regRCX    = 2 // index in kvmRegs
	regRIP    = 16
	regRFLAGS = 17

	codeAt = 0x1000 // guest address of the one page
)

type kvmMemoryRegion struct {
	Slot, Flags             uint32
	GuestAddr, Size, OurVMA uint64
}

type (
	kvmRegs  [18]uint64 // rax … r15, rip, rflags
	kvmSregs [312]byte  // begins with the 24 bytes of CS
)

// machine is a VM with one page and one processor, which counts rcx down to 0
// in real mode and halts.
type machine struct {
	kvm, vm, cpu int
	page, run    []byte
}

// measure runs the loop. When ctx ends it stops the machine and reports how
// far it got.
func (kvmProbe) measure(ctx context.Context) (measurement, error) {
	m, err := newMachine()
	defer m.close()
	if err != nil {
		return measurement{}, err
	}
	return m.count(ctx, loopSteps)
}

func newMachine() (*machine, error) {
	m := &machine{kvm: -1, vm: -1, cpu: -1}
	var err error
	if m.kvm, err = unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return m, fmt.Errorf("open /dev/kvm: %w", err)
	}
	if v, err := ioctl(m.kvm, kvmGetAPIVersion, 0); err != nil || v != kvmAPIVersion {
		return m, fmt.Errorf("kvm api version %d, %v", v, err)
	}
	if m.vm, err = ioctl(m.kvm, kvmCreateVM, 0); err != nil {
		return m, fmt.Errorf("create vm: %w", err)
	}
	if m.page, err = unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS); err != nil {
		return m, fmt.Errorf("map a page: %w", err)
	}
	// unsafe: the kernel wants the address of our memory, and takes its
	// parameters by address. The page is not Go memory and stays where it is.
	region := kvmMemoryRegion{GuestAddr: codeAt, Size: uint64(len(m.page)), OurVMA: uint64(uintptr(unsafe.Pointer(&m.page[0])))}
	if err := ioctlPtr(m.vm, kvmSetUserMemoryRegion, unsafe.Pointer(&region)); err != nil {
		return m, fmt.Errorf("set memory: %w", err)
	}
	// Older Intel processors run real mode with the help of three pages that
	// must be somewhere; below 4 GiB, away from ours, is where QEMU puts them.
	if _, err := ioctl(m.vm, kvmSetTSSAddr, 0xfffbd000); err != nil && !errors.Is(err, unix.ENOTTY) {
		return m, fmt.Errorf("set tss address: %w", err)
	}
	if m.cpu, err = ioctl(m.vm, kvmCreateVCPU, 0); err != nil {
		return m, fmt.Errorf("create processor: %w", err)
	}
	size, err := ioctl(m.kvm, kvmGetVCPUMmapSize, 0)
	if err != nil {
		return m, fmt.Errorf("size of kvm_run: %w", err)
	}
	if m.run, err = unix.Mmap(m.cpu, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return m, fmt.Errorf("map kvm_run: %w", err)
	}
	return m, nil
}

func (m *machine) close() {
	for _, b := range [][]byte{m.run, m.page} {
		if b != nil {
			unix.Munmap(b)
		}
	}
	for _, fd := range []int{m.cpu, m.vm, m.kvm} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

func (m *machine) load(steps int64) error {
	copy(m.page, []byte{
		0x66, 0x49, // again: dec ecx
		0x75, 0xfc, //        jnz again
		0xf4, //              hlt
	})
	var sregs kvmSregs
	if err := ioctlPtr(m.cpu, kvmGetSregs, unsafe.Pointer(&sregs)); err != nil {
		return fmt.Errorf("get segments: %w", err)
	}
	binary.LittleEndian.PutUint64(sregs[0:], 0)  // CS base
	binary.LittleEndian.PutUint16(sregs[12:], 0) // CS selector
	if err := ioctlPtr(m.cpu, kvmSetSregs, unsafe.Pointer(&sregs)); err != nil {
		return fmt.Errorf("set segments: %w", err)
	}
	var regs kvmRegs
	regs[regRCX], regs[regRIP], regs[regRFLAGS] = uint64(steps), codeAt, 2
	if err := ioctlPtr(m.cpu, kvmSetRegs, unsafe.Pointer(&regs)); err != nil {
		return fmt.Errorf("set registers: %w", err)
	}
	return nil
}

// count lets the machine count steps down until it halts or ctx ends.
func (m *machine) count(ctx context.Context, steps int64) (measurement, error) {
	// The thread is the one that KVM_RUN is interrupted on.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := m.load(steps); err != nil {
		return measurement{}, err
	}
	defer m.interruptAt(ctx, unix.Gettid())()
	begin := time.Now()
	for {
		_, err := ioctl(m.cpu, kvmRun, 0)
		reason := binary.LittleEndian.Uint32(m.run[exitReason:])
		interrupted := errors.Is(err, unix.EINTR) || err == nil && reason == exitIntr
		switch {
		case interrupted && ctx.Err() == nil:
			continue // a signal that was not ours
		case err != nil && !interrupted:
			return measurement{}, fmt.Errorf("run: %w", err)
		case !interrupted && reason != exitHLT:
			return measurement{}, fmt.Errorf("the loop ended with KVM exit %d", reason)
		}
		took := time.Since(begin)
		var regs kvmRegs
		if err := ioctlPtr(m.cpu, kvmGetRegs, unsafe.Pointer(&regs)); err != nil {
			return measurement{}, fmt.Errorf("get registers: %w", err)
		}
		left := int64(uint32(regs[regRCX]))
		return measurement{Steps: steps - left, Took: took, Finished: !interrupted && left == 0}, nil
	}
}

// interruptAt makes the thread leave KVM_RUN when ctx ends. The function
// returned ends that and waits, so that m may be closed.
func (m *machine) interruptAt(ctx context.Context, thread int) (stop func()) {
	over := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case <-over:
			return
		case <-ctx.Done():
		}
		// The flag catches a thread that is just about to enter, the signal
		// one that is inside. SIGURG has a handler in every Go program and is
		// otherwise ignored. Repeated, because one may come between the two.
		flag := (*uint32)(unsafe.Pointer(&m.run[0])) // unsafe: the kernel reads this byte while we write it
		for {
			atomic.OrUint32(flag, 1<<(8*immediateExit))
			unix.Tgkill(unix.Getpid(), thread, unix.SIGURG)
			select {
			case <-over:
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	}()
	return func() { close(over); <-ended }
}

func ioctl(fd int, request, arg uintptr) (int, error) {
	n, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, arg)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

func ioctlPtr(fd int, request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}
