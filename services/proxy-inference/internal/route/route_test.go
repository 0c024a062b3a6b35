package route

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type clock struct {
	mu sync.Mutex
	t  time.Time
}

func (c *clock) now() time.Time { c.mu.Lock(); defer c.mu.Unlock(); return c.t }
func (c *clock) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t = c.t.Add(d)
}

func newTable(change func(*Options)) (*Table, *clock) {
	c := &clock{t: time.Unix(1_800_000_000, 0)}
	o := Options{Hold: 20 * time.Millisecond, MaximumHeld: 2, MaximumInFlight: 2, Now: c.now, Random: rand.IntN}
	if change != nil {
		change(&o)
	}
	return New(o), c
}

func endpoint(id string, state orkv1.State, replicas ...*orkv1.EndpointReplica) *orkv1.Endpoint {
	return &orkv1.Endpoint{Id: id, JobId: "j-1", ProjectId: "p-1", ModelNames: []string{"m"}, JobState: state, Replicas: replicas,
		CreatedAt: timestamppb.New(time.Unix(1_700_000_000, 0))}
}

func replica(id string, state orkv1.State) *orkv1.EndpointReplica {
	return &orkv1.EndpointReplica{AttemptId: id, AgentKey: "key-" + id, State: state, Ready: state == orkv1.State_STATE_RUNNING}
}

const (
	running  = orkv1.State_STATE_RUNNING
	starting = orkv1.State_STATE_STARTING
)

func put(t *Table, endpoints ...*orkv1.Endpoint) {
	t.Replace(&orkv1.WatchEndpointsResponse{Endpoints: endpoints})
}

func TestAModelIsFoundInItsOwnProjectOnly(t *testing.T) {
	t.Parallel()
	tab, _ := newTable(nil)
	put(tab, endpoint("ep-1", running, replica("a-1", running)))
	if e, ok := tab.Resolve("p-1", "m"); !ok || e.ID != "ep-1" {
		t.Error("not found")
	}
	if _, ok := tab.Resolve("p-2", "m"); ok {
		t.Error("found from another project")
	}
	if len(tab.OfProject("p-2")) != 0 || len(tab.OfProject("p-1")) != 1 {
		t.Error("lists differ")
	}
}

func TestOfSeveralEndpointsTheOneThatServesIsTaken(t *testing.T) {
	t.Parallel()
	tab, _ := newTable(nil)
	old := endpoint("ep-old", orkv1.State_STATE_STOPPED)
	old.CreatedAt = timestamppb.New(time.Unix(1, 0))
	loading := endpoint("ep-loading", starting, replica("a-1", starting))
	loading.CreatedAt = timestamppb.New(time.Unix(2, 0))
	put(tab, endpoint("ep-ready", running, replica("a-2", running)), loading, old)
	if e, _ := tab.Resolve("p-1", "m"); e.ID != "ep-ready" {
		t.Errorf("took %s", e.ID)
	}
	put(tab, loading, old)
	if e, _ := tab.Resolve("p-1", "m"); e.ID != "ep-loading" {
		t.Errorf("took %s", e.ID)
	}
	put(tab, old)
	if e, _ := tab.Resolve("p-1", "m"); e.ID != "ep-old" {
		t.Errorf("took %s", e.ID)
	}
}

func TestEachWayOfNotServingHasItsReason(t *testing.T) {
	t.Parallel()
	draining := replica("a-1", running)
	draining.Draining = true
	lost := replica("a-1", running)
	lost.Ready = false
	for _, c := range []struct {
		endpoint *orkv1.Endpoint
		tried    []string
		want     Reason
	}{
		{endpoint("ep-1", orkv1.State_STATE_QUEUED), nil, Waiting},
		{endpoint("ep-1", starting, replica("a-1", starting)), nil, Loading},
		{endpoint("ep-1", running, lost), nil, None},
		{endpoint("ep-1", running, draining), nil, None},
		{endpoint("ep-1", orkv1.State_STATE_FAILED, replica("a-1", running)), nil, Ended},
		{endpoint("ep-1", running, replica("a-1", running)), []string{"a-1"}, Tried},
		{endpoint("ep-2", running, replica("a-1", running)), nil, Gone},
	} {
		tab, _ := newTable(nil)
		put(tab, c.endpoint)
		l, refusal := tab.Take(context.Background(), "ep-1", 0, c.tried)
		if l != nil || refusal.Reason != c.want {
			t.Errorf("%v: %+v %+v, want %s", c.endpoint, l, refusal, c.want)
		}
	}
}

func TestALoadingReplicaIsWaitedFor(t *testing.T) {
	t.Parallel()
	tab, _ := newTable(func(o *Options) { o.Hold = 20 * time.Second })
	put(tab, endpoint("ep-1", starting, replica("a-1", starting)))
	got := make(chan *Lease)
	go func() {
		l, _ := tab.Take(context.Background(), "ep-1", 0, nil)
		got <- l
	}()
	for held := 0; held == 0; {
		tab.mu.Lock()
		held = tab.held
		tab.mu.Unlock()
	}
	put(tab, endpoint("ep-1", starting, replica("a-1", starting))) // a change that does not help
	put(tab, endpoint("ep-1", running, replica("a-1", running)))
	l := <-got
	if l == nil {
		t.Fatal("refused though it got ready")
	}
	l.Release()

	// A client that leaves ends the wait.
	put(tab, endpoint("ep-1", starting, replica("a-1", starting)))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, refusal := tab.Take(ctx, "ep-1", 0, nil); refusal == nil || tab.held != 0 {
		t.Error("still held")
	}
}

func TestFullReplicasAreBusyUntilOneIsReleased(t *testing.T) {
	t.Parallel()
	tab, _ := newTable(nil)
	put(tab, endpoint("ep-1", running, replica("a-1", running), replica("a-2", running)))
	var leases []*Lease
	count := map[string]int{}
	for range 4 {
		l, refusal := tab.Take(context.Background(), "ep-1", 7, nil)
		if l == nil {
			t.Fatal(refusal)
		}
		count[l.AttemptID]++
		leases = append(leases, l)
	}
	if count["a-1"] != 2 || count["a-2"] != 2 {
		t.Errorf("uneven: %v", count)
	}
	if _, refusal := tab.Take(context.Background(), "ep-1", 7, nil); refusal == nil || refusal.Reason != Busy {
		t.Errorf("refusal %+v", refusal)
	}
	leases[0].Release()
	leases[0].Release()
	if l, _ := tab.Take(context.Background(), "ep-1", 7, nil); l == nil || l.AttemptID != leases[0].AttemptID {
		t.Error("the freed place was not given")
	}
	if l, _ := tab.Take(context.Background(), "ep-1", 7, nil); l != nil {
		t.Error("a double release freed two places")
	}
}

func TestAFaultyReplicaRestsAndComesBackByItself(t *testing.T) {
	t.Parallel()
	tab, c := newTable(func(o *Options) { o.MaximumInFlight = 1000 })
	put(tab, endpoint("ep-1", running, replica("a-1", running), replica("a-2", running)))
	l, _ := tab.Take(context.Background(), "ep-1", 0, []string{"a-2"})
	l.Faulted()
	l.Release()
	share := func() (n int) {
		for range 200 {
			l, _ := tab.Take(context.Background(), "ep-1", 0, nil)
			if l.AttemptID == "a-1" {
				n++
			}
			l.Release()
		}
		return n
	}
	if n := share(); n != 0 {
		t.Errorf("%d of 200 went to the resting replica", n)
	}
	// With nothing else it is tried all the same.
	if l, _ := tab.Take(context.Background(), "ep-1", 0, []string{"a-2"}); l == nil {
		t.Error("the only replica left was not tried")
	} else {
		l.Release()
	}
	c.pass(time.Second)
	if n := share(); n == 0 {
		t.Error("it did not come back")
	}
}

func TestASilentLinkIsAvoidedAndItsWaitersAreTold(t *testing.T) {
	t.Parallel()
	tab, _ := newTable(nil)
	put(tab, endpoint("ep-1", running, replica("a-1", running), replica("a-2", running)))
	l, _ := tab.Take(context.Background(), "ep-1", 0, []string{"a-2"})
	told := 0
	l.OnSilent(func() { told++ })
	if !tab.Others("ep-1", []string{"a-1"}) {
		t.Error("the other replica is not offered")
	}
	tab.Silent(map[string]bool{"key-a-1": true})
	tab.Silent(map[string]bool{"key-a-1": true})
	if told != 1 {
		t.Errorf("told %d times", told)
	}
	l.Release()
	for range 50 {
		l, _ := tab.Take(context.Background(), "ep-1", 0, nil)
		if l.AttemptID == "a-1" {
			t.Fatal("a request went to the silent one")
		}
		l.Release()
	}
	tab.Silent(nil)
	if tab.load("a-1").silent {
		t.Error("still silent")
	}
}

func TestPickTakesAnAllowedCandidate(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 12).Draw(t, "n")
		cs := make([]Candidate, n)
		total := 0
		for i := range cs {
			cs[i] = Candidate{ID: fmt.Sprintf("a-%d", i), InFlight: rapid.IntRange(0, 50).Draw(t, "load")}
			total += cs[i].InFlight
		}
		affinity := rapid.Uint64().Draw(t, "affinity")
		got := Pick(cs, affinity, rand.IntN)
		if got < 0 || got >= n {
			t.Fatalf("index %d of %d", got, n)
		}
		if affinity != 0 && float64(cs[got].InFlight) > spread*float64(total)/float64(n)+1 {
			t.Fatalf("took load %d where the mean is %d/%d", cs[got].InFlight, total, n)
		}
	})
}

func TestOnePrefixStaysOnTwoHomesAndIsSharedEvenly(t *testing.T) {
	t.Parallel()
	cs := make([]Candidate, 8)
	for i := range cs {
		cs[i] = Candidate{ID: fmt.Sprintf("a-%d", i)}
	}
	affinity := Affinity("p", "m", []byte("a system prompt"))
	homes := map[int]int{}
	for range 4 {
		i := Pick(cs, affinity, rand.IntN)
		homes[i]++
		cs[i].InFlight++
	}
	if len(homes) > 2 {
		t.Errorf("homes %v", homes)
	}
	// Under much load it spills, and nobody is far above the mean.
	for range 400 {
		cs[Pick(cs, affinity, rand.IntN)].InFlight++
	}
	for i, c := range cs {
		if c.InFlight > 70 {
			t.Errorf("replica %d holds %d of 404", i, c.InFlight)
		}
	}
}

func TestAReplicaThatLeavesMovesOnlyItsOwnPrefixes(t *testing.T) {
	t.Parallel()
	cs := make([]Candidate, 8)
	for i := range cs {
		cs[i] = Candidate{ID: fmt.Sprintf("a-%d", i)}
	}
	moved := 0
	for k := range 1000 {
		affinity := Affinity("p", "m", []byte(fmt.Sprint(k)))
		before := Pick(cs, affinity, rand.IntN)
		after := Pick(cs[:7], affinity, rand.IntN)
		if before != after {
			moved++
			if before != 7 {
				t.Fatalf("prefix %d moved from %d to %d", k, before, after)
			}
		}
	}
	if moved == 0 || moved > 250 {
		t.Errorf("%d of 1000 moved", moved)
	}
}

func TestTenantsDoNotShareAffinity(t *testing.T) {
	t.Parallel()
	if Affinity("p-1", "m", []byte("x")) == Affinity("p-2", "m", []byte("x")) || Affinity("a", "bc", nil) == Affinity("ab", "c", nil) {
		t.Error("the same hash")
	}
}
