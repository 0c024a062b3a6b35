package tenure

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.uber.org/goleak"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	leases "k8s.io/client-go/kubernetes/typed/coordination/v1"
	ktesting "k8s.io/client-go/testing"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"))
}

// hand is a clock that is moved by hand.
type hand struct {
	mu  sync.Mutex
	now time.Time
}

func (h *hand) Now() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.now
}

func (h *hand) move(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.now = h.now.Add(d)
}

func newTenure(client leases.LeaseInterface, clock *hand, key, place, instance string) *Tenure {
	return New(Options{Client: client, Name: "cosmicac-rack-rk", Self: Holder{key, place, instance}, Log: hclog.NewNullLogger(), Now: clock.Now})
}

func TestOneHolderAtATime(t *testing.T) {
	t.Parallel()
	set := fake.NewSimpleClientset()
	client := set.CoordinationV1().Leases("cosmicac")
	clock := &hand{now: time.Unix(1e9, 0)}
	ctx := context.Background()
	first, second := newTenure(client, clock, "k1", "host-a:/s", "1"), newTenure(client, clock, "k2", "host-b:/s", "1")
	if err := first.try(ctx); err != nil || !first.Held() {
		t.Fatalf("a free Lease: %v, held %v", err, first.Held())
	}
	for range 5 {
		if err := second.try(ctx); err != nil || second.Held() {
			t.Fatalf("a held Lease: %v, held %v", err, second.Held())
		}
		clock.move(2 * time.Second)
		if err := first.try(ctx); err != nil || !first.Held() {
			t.Fatalf("the holder: %v, held %v", err, first.Held())
		}
	}
	if who, ok := second.Other(); !ok || who.Place != "host-a:/s" || who.Key != "k1" {
		t.Fatalf("holder %+v", who)
	}

	// The holder falls silent: it stops by itself before the other begins.
	_ = second.try(ctx)
	clock.move(Valid)
	if first.Held() {
		t.Fatal("a silent holder goes on")
	}
	_ = second.try(ctx)
	if second.Held() {
		t.Fatal("taken over too early")
	}
	clock.move(Duration - Valid + time.Second)
	if err := second.try(ctx); err != nil || !second.Held() {
		t.Fatalf("after the Lease ran out: %v, held %v", err, second.Held())
	}
	var taken *ErrTaken
	if err := first.try(ctx); !errors.As(err, &taken) || taken.By.Place != "host-b:/s" {
		t.Fatalf("the former holder: %v", err)
	}
}

func TestARestartInTheSamePlaceNeedNotWait(t *testing.T) {
	t.Parallel()
	client := fake.NewSimpleClientset().CoordinationV1().Leases("cosmicac")
	clock := &hand{now: time.Unix(1e9, 0)}
	before, after := newTenure(client, clock, "k1", "host-a:/s", "1"), newTenure(client, clock, "k1", "host-a:/s", "2")
	_ = before.try(context.Background())
	if err := after.try(context.Background()); err != nil || !after.Held() {
		t.Fatalf("%v, held %v", err, after.Held())
	}
	elsewhere := newTenure(client, clock, "k1", "host-b:/s", "1")
	if err := elsewhere.try(context.Background()); err != nil || elsewhere.Held() {
		t.Fatalf("the same key elsewhere: %v, held %v", err, elsewhere.Held())
	}
}

func TestAClusterThatDoesNotAnswerTakesNothingAway(t *testing.T) {
	t.Parallel()
	set := fake.NewSimpleClientset()
	clock := &hand{now: time.Unix(1e9, 0)}
	x := newTenure(set.CoordinationV1().Leases("cosmicac"), clock, "k1", "host-a:/s", "1")
	_ = x.try(context.Background())
	fail := true
	set.PrependReactor("*", "leases", func(ktesting.Action) (bool, runtime.Object, error) { return fail, nil, errors.New("no route") })
	for range 20 {
		clock.move(2 * time.Second)
		if err := x.try(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	if _, ok := x.Other(); x.Held() || ok {
		t.Fatalf("held %v, other %v", x.Held(), ok)
	}
	fail = false
	if err := x.try(context.Background()); err != nil || !x.Held() {
		t.Fatalf("%v, held %v", err, x.Held())
	}
}

func TestAnOrderlyEndFreesTheLease(t *testing.T) {
	t.Parallel()
	client := fake.NewSimpleClientset().CoordinationV1().Leases("cosmicac")
	x := New(Options{Client: client, Name: "l", Self: Holder{"k1", "a", "1"}, Log: hclog.NewNullLogger()})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- x.Run(ctx) }()
	for !x.Held() {
		time.Sleep(time.Millisecond)
	}
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	y := New(Options{Client: client, Name: "l", Self: Holder{"k2", "b", "1"}, Log: hclog.NewNullLogger()})
	if err := y.try(context.Background()); err != nil || !y.Held() {
		t.Fatalf("%v, held %v", err, y.Held())
	}
}

func TestAHolderRenewsWithOneRequestAndLooksAgainAfterAConflict(t *testing.T) {
	t.Parallel()
	set := fake.NewSimpleClientset()
	clock := &hand{now: time.Unix(1e9, 0)}
	x := newTenure(set.CoordinationV1().Leases("cosmicac"), clock, "k1", "host-a:/s", "1")
	if err := x.try(t.Context()); err != nil || !x.Held() {
		t.Fatalf("a free Lease: %v, held %v", err, x.Held())
	}
	set.ClearActions()
	clock.move(2 * time.Second)
	if err := x.try(t.Context()); err != nil || !x.Held() {
		t.Fatalf("a renewal: %v, held %v", err, x.Held())
	}
	if all := set.Actions(); len(all) != 1 || all[0].GetVerb() != "update" {
		t.Fatalf("a renewal sent %v", all)
	}

	// Somebody wrote in between: what the Lease says counts, not what we remember.
	other := newTenure(set.CoordinationV1().Leases("cosmicac"), clock, "k2", "host-b:/s", "1")
	lease, err := set.CoordinationV1().Leases("cosmicac").Get(t.Context(), "cosmicac-rack-rk", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	other.fill(lease, other.o.Self.String())
	if _, err := set.CoordinationV1().Leases("cosmicac").Update(t.Context(), lease, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	set.PrependReactor("update", "leases", func(ktesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewConflict(coordinationv1.Resource("leases"), "cosmicac-rack-rk", errors.New("the object has been modified"))
	})
	var taken *ErrTaken
	if err := x.try(t.Context()); !errors.As(err, &taken) || taken.By.Key != "k2" || x.Held() {
		t.Fatalf("a Lease that another one took: %v, held %v", err, x.Held())
	}
}
