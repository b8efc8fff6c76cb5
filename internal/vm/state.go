package vm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/klauspost/compress/s2"
	"golang.org/x/sys/unix"
)

// A state file, version 1: "WARRNDEV", the version and the length of QEMU's
// device state (both 32 bits, little-endian), and that state as one S2 block:
// it is mostly zeros, and packed a fiftieth of its size.
const (
	stateMagic   = "WARRNDEV"
	stateVersion = 1
	stateHeader  = len(stateMagic) + 8
	// maxState is far above what QEMU saves for our devices, 200 KB.
	maxState = 64 << 20
)

// ErrState is in the error for a state file that is damaged, or none.
var ErrState = errors.New("damaged, or no device state")

// lentState is a file in memory that QEMU was lent to save its devices in: the
// guest stands still for that.
type lentState struct {
	file *os.File
	path string // as QEMU opens it
}

// lendState lends QEMU a file. One that was lent before is done with. A caller
// who gives up is not listened to: QEMU would have the file, and write to it
// instead of the next one.
func (v *VM) lendState(ctx context.Context) (*lentState, error) {
	ctx = context.WithoutCancel(ctx)
	f, err := memoryFile()
	if err != nil {
		return nil, err
	}
	// QEMU wants to open it exactly for writing.
	w, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), os.O_WRONLY, 0)
	if err != nil {
		f.Close()
		return nil, err
	}
	defer w.Close()
	path, err := v.qmp.AddFD(ctx, stateSet, w)
	if err != nil {
		f.Close()
		return nil, err
	}
	return &lentState{f, path}, nil
}

// save has QEMU write the state of all devices, without the RAM.
func (l *lentState) save(ctx context.Context, v *VM) error {
	// live would let go of the disks of a paused VM.
	args := map[string]any{"filename": l.path, "live": false}
	return v.qmp.Do(ctx, "xen-save-devices-state", args, nil)
}

// take ends the loan and returns what was saved.
func (l *lentState) take(ctx context.Context, v *VM) ([]byte, error) {
	err := v.qmp.RemoveFD(context.WithoutCancel(ctx), stateSet) // as in lendState
	defer l.file.Close()
	if err != nil {
		return nil, err
	}
	state, err := io.ReadAll(io.NewSectionReader(l.file, 0, maxState+1))
	if err == nil && (len(state) == 0 || len(state) > maxState) {
		err = fmt.Errorf("QEMU saved %d bytes", len(state))
	}
	return state, err
}

// SaveDevices writes the state of all devices of a paused VM to f, a new file.
// Together with the file behind the RAM of a VM with SharedMemory it is all
// there is.
func (v *VM) SaveDevices(ctx context.Context, f *os.File) error {
	lent, err := v.lendState(ctx)
	if err != nil {
		return fmt.Errorf("save the devices: %w", err)
	}
	err = lent.save(ctx, v)
	state, taken := lent.take(ctx, v)
	if err = errors.Join(err, taken); err != nil {
		return fmt.Errorf("save the devices: %w", err)
	}
	return writeState(f, state)
}

// writeState writes a state file.
func writeState(w io.Writer, state []byte) error {
	b := binary.LittleEndian.AppendUint32([]byte(stateMagic), stateVersion)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(state)))
	_, err := w.Write(append(b, s2.EncodeBetter(nil, state)...))
	return err
}

// OpenState opens the device state in a state file for QEMU to read. The file
// is not trusted; what is wrong with it is an ErrState.
func OpenState(path string) (*os.File, error) {
	state, err := readState(path)
	if err != nil {
		return nil, fmt.Errorf("state %s: %w", path, err)
	}
	f, err := memoryFile()
	if err != nil {
		return nil, err
	}
	if _, err := f.WriteAt(state, 0); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func readState(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxState+int64(stateHeader)+1))
	if err != nil {
		return nil, err
	}
	if len(data) < stateHeader || string(data[:len(stateMagic)]) != stateMagic {
		return nil, fmt.Errorf("%w: it does not start with %s", ErrState, stateMagic)
	}
	le := binary.LittleEndian
	version, size, packed := le.Uint32(data[len(stateMagic):]), le.Uint32(data[len(stateMagic)+4:]), data[stateHeader:]
	if version != stateVersion {
		return nil, fmt.Errorf("%w: its format is %d, this Warren knows %d", ErrState, version, stateVersion)
	}
	if n, err := s2.DecodedLen(packed); err != nil || size == 0 || size > maxState || uint32(n) != size {
		return nil, fmt.Errorf("%w: it is not the %d bytes it says", ErrState, size)
	}
	state, err := s2.Decode(nil, packed)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrState, err)
	}
	return state, nil
}

// memoryFile is a file in memory alone.
func memoryFile() (*os.File, error) {
	fd, err := unix.MemfdCreate("warren-state", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	return os.NewFile(uintptr(fd), "state"), nil
}
