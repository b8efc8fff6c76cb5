package vm

import (
	"context"

	"github.com/warren-vm/warren/internal/vm/accel"
)

// Accel runs a guest's instructions; the type and its values are package
// accel's.
type Accel = accel.Accel

// The accelerators.
const (
	KVM = accel.KVM
	TCG = accel.TCG
)

// AccelChoice is the decision and why it was made.
type AccelChoice = accel.Choice

// ChooseAccel decides between KVM and TCG by measuring, in under two seconds,
// and remembers the figure in cacheDir for this boot of the host. A caller
// whose user has named an accelerator does not call it.
func ChooseAccel(ctx context.Context, cacheDir string) (AccelChoice, error) {
	return accel.Choose(ctx, cacheDir)
}
