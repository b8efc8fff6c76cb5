package bench

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// measureOne opens a benchmark, measures it and closes it again.
func (b Benchmark) measureOne(ctx context.Context, bed *bed, n int, step func(done int)) (r Result, err error) {
	p, err := b.open(ctx, bed)
	if err != nil {
		return r, fmt.Errorf("benchmark %s: %w", b.Name, reason(ctx, err))
	}
	defer func() {
		if cerr := p.close(); cerr != nil && err == nil {
			err = fmt.Errorf("benchmark %s: end: %w", b.Name, cerr)
		}
	}()
	m, err := alternate(ctx, p, n, b.Batch, step)
	if err != nil {
		return r, fmt.Errorf("benchmark %s: %w", b.Name, err)
	}
	return summarize(b, m), nil
}

var _ = errors.New
var _ = time.Now
