package qmp

import (
	"slices"
	"sync/atomic"
)

// eventQueue is how many events wait for a subscriber. A guest can cause
// events, so a flood of them must cost neither memory nor the connection.
const eventQueue = 64

// Subscription follows the events of some names.
type Subscription struct {
	client *Client
	names  []string
	events chan Event
	lost   atomic.Uint64
}

// Subscribe follows the events with these names, from now on. The caller
// calls Close when it is done with it.
func (c *Client) Subscribe(names ...string) *Subscription {
	s := &Subscription{client: c, names: slices.Clone(names), events: make(chan Event, eventQueue)}
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.done:
		close(s.events)
	default:
		c.subs[s] = struct{}{}
	}
	return s
}

// Events brings them in order. It is closed when the connection has ended and
// by Close. Who does not read in time loses the newest: see Lost.
func (s *Subscription) Events() <-chan Event { return s.events }

// Lost is how many events found the queue full.
func (s *Subscription) Lost() uint64 { return s.lost.Load() }

// Close ends the subscription; it may be called any number of times.
func (s *Subscription) Close() {
	s.client.mu.Lock()
	defer s.client.mu.Unlock()
	if _, ok := s.client.subs[s]; ok {
		delete(s.client.subs, s)
		close(s.events)
	}
}

func (c *Client) publish(e Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for s := range c.subs {
		if !slices.Contains(s.names, e.Name) {
			continue
		}
		select {
		case s.events <- e:
		default:
			s.lost.Add(1)
		}
	}
}
