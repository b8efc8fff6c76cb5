package ram

import (
	"context"
	"errors"
	"os"
)

// Flattener is Flatten for differences that are named by their paths, oldest
// first, of a RAM of size bytes.
func Flattener(ctx context.Context, size int64) func(dst *os.File, base string, differences []string) error {
	return func(dst *os.File, base string, differences []string) (err error) {
		var open []*Difference
		defer func() {
			for _, d := range open {
				err = errors.Join(err, d.Close())
			}
		}()
		for _, path := range differences {
			d, err := OpenDifference(path, size)
			if err != nil {
				return err
			}
			open = append(open, d)
		}
		return Flatten(ctx, dst, base, open)
	}
}

// Size is how long the files are together, in bytes; one that is not there
// counts nothing.
func Size(paths []string) int64 {
	var total int64
	for _, path := range paths {
		if info, err := os.Stat(path); err == nil {
			total += info.Size()
		}
	}
	return total
}
