// Package notice tells interested parts of the orchestrator which jobs changed.
//
// Guarantees: after Publish(id) returns, every subscription that existed before
// will find id in a later Take. Several publications of one id before a Take
// are one. There is no order between ids, and nothing says what changed: the
// reader looks at the store. Publish never blocks. It keeps no history: who
// subscribes late reads the store first.
package notice

import (
	"slices"
	"sync"
)

// Hub hands ids to its subscriptions. The zero value is ready.
type Hub struct {
	mu   sync.Mutex
	subs map[*Subscription]struct{}            // of every id
	only map[string]map[*Subscription]struct{} // of one
}

// Subscription collects ids for one reader.
type Subscription struct {
	hub   *Hub
	only  string // empty for every id
	ready chan struct{}

	mu  sync.Mutex
	ids map[string]struct{}
}

// Publish marks ids as changed.
func (h *Hub) Publish(ids ...string) {
	if len(ids) == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for s := range h.subs {
		s.add(ids)
	}
	for i, id := range ids {
		for s := range h.only[id] {
			s.add(ids[i : i+1])
		}
	}
}

// Subscribe starts to collect every id; the caller closes it.
func (h *Hub) Subscribe() *Subscription { return h.subscribe("") }

// SubscribeTo starts to collect one id, all when it is empty. Others do not wake its reader, so there may
// be one for each of many jobs.
func (h *Hub) SubscribeTo(id string) *Subscription { return h.subscribe(id) }

func (h *Hub) subscribe(only string) *Subscription {
	s := &Subscription{hub: h, only: only, ready: make(chan struct{}, 1), ids: make(map[string]struct{})}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.subs == nil {
		h.subs, h.only = make(map[*Subscription]struct{}), make(map[string]map[*Subscription]struct{})
	}
	of := h.subs
	if only != "" {
		if of = h.only[only]; of == nil {
			of = make(map[*Subscription]struct{})
			h.only[only] = of
		}
	}
	of[s] = struct{}{}
	return s
}

// Close ends the subscription; it may be called twice.
func (s *Subscription) Close() {
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	if s.only == "" {
		delete(s.hub.subs, s)
		return
	}
	of := s.hub.only[s.only]
	if delete(of, s); len(of) == 0 {
		delete(s.hub.only, s.only)
	}
}

// Ready is readable when Take would return something.
func (s *Subscription) Ready() <-chan struct{} { return s.ready }

// Take returns the ids collected so far, sorted, and forgets them.
func (s *Subscription) Take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := make([]string, 0, len(s.ids))
	for id := range s.ids {
		ids = append(ids, id)
	}
	clear(s.ids)
	slices.Sort(ids)
	return ids
}

func (s *Subscription) add(ids []string) {
	s.mu.Lock()
	for _, id := range ids {
		s.ids[id] = struct{}{}
	}
	s.mu.Unlock()
	select {
	case s.ready <- struct{}{}:
	default:
	}
}
