package cluster

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// Times of a mirror.
const (
	listTimeout = 60 * time.Second
	listPage    = 500
	backoffMin  = 500 * time.Millisecond
	backoffMax  = 15 * time.Second
)

// page is one answer to a list.
type page[T metav1.Object] struct {
	items           []T
	resourceVersion string
	more            string
}

// source is how one kind of object is listed and watched.
type source[T metav1.Object] struct {
	kind  string
	list  func(ctx context.Context, o metav1.ListOptions) (page[T], error)
	watch func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error)
	// selectors of both
	labels, fields string
	// strip cuts an object down to what is needed, to save memory.
	strip func(T) T
}

// mirror holds the objects of one source. The list is the truth: it is taken
// at the start, whenever a watch ends for any reason, and at least once per
// relist period; the watch in between is a hint that may be late. An object is
// removed only by a list without it or by a DELETED event.
type mirror[T metav1.Object] struct {
	source[T]
	relist  time.Duration
	log     hclog.Logger
	changed func(T) // called without locks held, for new, changed and removed ones
	hurry   chan struct{}

	mu     sync.RWMutex
	items  map[string]T
	synced bool
	words  string // of the last failure, empty when the last list went well
}

func newMirror[T metav1.Object](s source[T], relist time.Duration, log hclog.Logger, changed func(T)) *mirror[T] {
	return &mirror[T]{source: s, relist: relist, log: log, changed: changed, items: map[string]T{}, hurry: make(chan struct{}, 1)}
}

func key(o metav1.Object) string { return o.GetNamespace() + "/" + o.GetName() }

// run lists and watches until ctx ends.
func (m *mirror[T]) run(ctx context.Context) {
	wait := backoffMin
	for ctx.Err() == nil {
		version, err := m.takeList(ctx)
		if err == nil {
			wait = backoffMin
			var lasted time.Duration
			lasted, err = m.follow(ctx, version)
			if err == nil && lasted > backoffMin {
				continue
			}
		}
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			m.mu.Lock()
			first := m.words == ""
			m.words = Words(err)
			m.mu.Unlock()
			if first {
				m.log.Warn("cannot list or watch", "kind", m.kind, "error", Words(err))
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-m.hurry:
			wait = backoffMin
			continue
		case <-time.After(wait/2 + rand.N(wait)):
		}
		wait = min(2*wait, backoffMax)
	}
}

// takeList replaces everything by a consistent list.
func (m *mirror[T]) takeList(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	fresh := map[string]T{}
	o := metav1.ListOptions{LabelSelector: m.labels, FieldSelector: m.fields, Limit: listPage}
	var version string
	for {
		p, err := m.list(ctx, o)
		if err != nil {
			return "", err
		}
		for _, item := range p.items {
			fresh[key(item)] = m.strip(item)
		}
		version = p.resourceVersion
		if p.more == "" {
			break
		}
		o.Continue = p.more
	}
	var touched []T
	m.mu.Lock()
	for k, was := range m.items {
		if _, stays := fresh[k]; !stays {
			touched = append(touched, was)
		}
	}
	for k, is := range fresh {
		if was, had := m.items[k]; !had || was.GetResourceVersion() != is.GetResourceVersion() || was.GetUID() != is.GetUID() {
			touched = append(touched, is)
		}
	}
	again := m.words != ""
	m.items, m.synced, m.words = fresh, true, ""
	m.mu.Unlock()
	if again {
		m.log.Info("listed again", "kind", m.kind, "objects", len(fresh))
	}
	for _, t := range touched {
		m.changed(t)
	}
	return version, nil
}

// follow applies a watch until it ends, at the latest after the relist period.
func (m *mirror[T]) follow(ctx context.Context, version string) (time.Duration, error) {
	start := time.Now()
	period := m.relist - rand.N(m.relist/10+1)
	ctx, cancel := context.WithTimeout(ctx, period+listTimeout/4)
	defer cancel()
	seconds := int64(max(1, period/time.Second))
	w, err := m.watch(ctx, metav1.ListOptions{
		LabelSelector: m.labels, FieldSelector: m.fields, ResourceVersion: version, TimeoutSeconds: &seconds,
	})
	if err != nil {
		return 0, err
	}
	defer w.Stop()
	for {
		select {
		case <-ctx.Done():
			return time.Since(start), nil
		case event, ok := <-w.ResultChan():
			if !ok || event.Type == watch.Error {
				return time.Since(start), nil // the list that follows says what is true
			}
			item, ok := event.Object.(T)
			if !ok {
				continue
			}
			item = m.strip(item)
			m.mu.Lock()
			switch event.Type {
			case watch.Added, watch.Modified:
				m.items[key(item)] = item
			case watch.Deleted:
				delete(m.items, key(item))
			}
			m.mu.Unlock()
			m.changed(item)
		}
	}
}

// kick ends a pause between two tries.
func (m *mirror[T]) kick() {
	select {
	case m.hurry <- struct{}{}:
	default:
	}
}

func (m *mirror[T]) hasSynced() bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.synced
}

func (m *mirror[T]) get(namespace, name string) (T, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	item, ok := m.items[namespace+"/"+name]
	return item, ok
}

func (m *mirror[T]) all() []T {
	m.mu.RLock()
	defer m.mu.RUnlock()
	out := make([]T, 0, len(m.items))
	for _, item := range m.items {
		out = append(out, item)
	}
	return out
}
