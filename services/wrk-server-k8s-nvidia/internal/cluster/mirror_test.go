package cluster

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"),
		goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"))
}

// shelf is a server of ConfigMaps whose watches and lists can be told to fail.
type shelf struct {
	mu      sync.Mutex
	version int
	items   map[string]*corev1.ConfigMap
	lists   int
	refuse  error
	watches []*watch.FakeWatcher
}

func (s *shelf) put(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	s.items[name] = &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: fmt.Sprint(s.version)}}
}

func (s *shelf) source() source[*corev1.ConfigMap] {
	return source[*corev1.ConfigMap]{
		kind: "ConfigMap", strip: stripped[*corev1.ConfigMap],
		list: func(_ context.Context, o metav1.ListOptions) (page[*corev1.ConfigMap], error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.refuse != nil {
				return page[*corev1.ConfigMap]{}, s.refuse
			}
			// Two pages, so that continuing is met.
			var names []string
			for n := range s.items {
				names = append(names, n)
			}
			if o.Continue == "" {
				s.lists++
			}
			p := page[*corev1.ConfigMap]{resourceVersion: fmt.Sprint(s.version)}
			for _, n := range names {
				if second := n > "m"; second == (o.Continue != "") {
					p.items = append(p.items, s.items[n].DeepCopy())
				}
			}
			if o.Continue == "" {
				p.more = "second"
			}
			return p, nil
		},
		watch: func(context.Context, metav1.ListOptions) (watch.Interface, error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.refuse != nil {
				return nil, s.refuse
			}
			w := watch.NewFakeWithOptions(watch.FakeOptions{ChannelSize: 10})
			s.watches = append(s.watches, w)
			return w, nil
		},
	}
}

func (s *shelf) last() *watch.FakeWatcher {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.watches) == 0 {
		return nil
	}
	return s.watches[len(s.watches)-1]
}

func wait(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited for: %s", what)
		}
	}
}

func run(t *testing.T, s *shelf, relist time.Duration) *mirror[*corev1.ConfigMap] {
	t.Helper()
	m := newMirror(s.source(), relist, hclog.NewNullLogger(), func(*corev1.ConfigMap) {})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); m.run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return m
}

func TestTheListIsTheTruthAfterABrokenWatch(t *testing.T) {
	t.Parallel()
	s := &shelf{items: map[string]*corev1.ConfigMap{}}
	s.put("a")
	s.put("z")
	m := run(t, s, time.Minute)
	wait(t, "the first list", m.hasSynced)
	if len(m.all()) != 2 {
		t.Fatalf("%d objects", len(m.all()))
	}
	// Something happens that no event tells of, and the watch breaks.
	wait(t, "a watch", func() bool { return s.last() != nil })
	s.mu.Lock()
	delete(s.items, "a")
	s.mu.Unlock()
	s.put("b")
	broken := s.last()
	broken.Error(&metav1.Status{Reason: metav1.StatusReasonExpired, Code: 410})
	wait(t, "what no event told", func() bool {
		_, a := m.get("", "a")
		_, b := m.get("", "b")
		return !a && b
	})
	// Events of the new watch are taken.
	wait(t, "another watch", func() bool { return s.last() != broken })
	s.last().Add(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c", ResourceVersion: "99"}})
	wait(t, "an event", func() bool { _, ok := m.get("", "c"); return ok })
}

func TestTheListIsTakenAgainWhileTheWatchIsSilent(t *testing.T) {
	t.Parallel()
	s := &shelf{items: map[string]*corev1.ConfigMap{}}
	// The watch would go on for ever; the client's own clock ends it.
	m := newMirror(s.source(), 50*time.Millisecond, hclog.NewNullLogger(), func(*corev1.ConfigMap) {})
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	lasted, err := m.follow(ctx, "1")
	if err != nil || lasted > 20*time.Second {
		t.Fatalf("followed for %s, %v", lasted, err)
	}
}

func TestNothingIsAbsentBecauseAListFailed(t *testing.T) {
	t.Parallel()
	s := &shelf{items: map[string]*corev1.ConfigMap{}}
	s.put("a")
	m := run(t, s, time.Minute)
	wait(t, "the first list", m.hasSynced)
	wait(t, "a watch", func() bool { return s.last() != nil })
	s.mu.Lock()
	s.refuse = apierrors.NewUnauthorized("no")
	delete(s.items, "a")
	s.mu.Unlock()
	s.last().Stop()
	wait(t, "a failed try", func() bool { m.mu.RLock(); defer m.mu.RUnlock(); return m.words != "" })
	if _, ok := m.get("", "a"); !ok {
		t.Fatal("it is gone without a list that says so")
	}
	s.mu.Lock()
	s.refuse = nil
	s.mu.Unlock()
	m.kick()
	wait(t, "the list that says so", func() bool { _, ok := m.get("", "a"); return !ok })
}
