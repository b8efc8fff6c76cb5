package server

import (
	"context"
	"sync"
)

// stillness is whether the guest's programs are frozen. The agent refuses to
// start any meanwhile, and whoever wanted one must not be told: a snapshot is
// nobody's fault.
type stillness struct {
	mu    sync.Mutex
	count int           // of times they were frozen
	over  chan struct{} // closed when they are thawed; nil when they run
}

func (t *stillness) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.count++
	if t.over == nil {
		t.over = make(chan struct{})
	}
}

func (t *stillness) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over != nil {
		close(t.over)
		t.over = nil
	}
}

// await waits until the programs run or ctx ends, and says how often they were
// frozen before.
func (t *stillness) await(ctx context.Context) (count int, err error) {
	for {
		t.mu.Lock()
		over, count := t.over, t.count
		t.mu.Unlock()
		if over == nil {
			return count, nil
		}
		select {
		case <-over:
		case <-ctx.Done():
			return count, context.Cause(ctx)
		}
	}
}

// since says whether they were frozen after await had counted.
func (t *stillness) since(count int) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.count != count
}
