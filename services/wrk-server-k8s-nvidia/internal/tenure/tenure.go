// Package tenure makes sure that one process at a time works on a rack: the
// holder of the Lease cosmicac-rack-<id> in the rack's namespace.
//
// A holder renews every two seconds and stops by itself, by its own monotonic
// clock, well before another may take over; whoever waits judges a holder dead
// only after it has itself seen no renewal for the Lease's whole duration, so
// clocks of hosts are never compared. A process that was killed and starts
// again in the same place takes its own Lease back at once: its state folder's
// lock proves that the former one is gone.
//
// It does not stop a call that is already on its way: callers bound their calls
// to less than Duration minus Valid.
package tenure

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	leases "k8s.io/client-go/kubernetes/typed/coordination/v1"
)

// Times of a tenure.
const (
	// Duration is how long a Lease holds after its last renewal.
	Duration = 12 * time.Second
	// Valid is how long a holder goes on after its last renewal.
	Valid = 6 * time.Second

	period      = 2 * time.Second
	callTimeout = 3 * time.Second
)

// Holder says who holds a Lease. Its text form is what stands in the Lease.
type Holder struct {
	// Key is the worker's key, Place its host and state folder, Instance its start.
	Key, Place, Instance string
}

// String is key, place and instance, parted by spaces.
func (h Holder) String() string { return h.Key + " " + h.Place + " " + h.Instance }

func parse(s string) Holder {
	parts := strings.SplitN(s, " ", 3)
	for len(parts) < 3 {
		parts = append(parts, "")
	}
	return Holder{Key: parts[0], Place: parts[1], Instance: parts[2]}
}

// Options set up a Tenure.
type Options struct {
	Client leases.LeaseInterface
	// Name of the Lease.
	Name string
	Self Holder
	Log  hclog.Logger
	// Now is a monotonic clock; time.Now when nil.
	Now func() time.Time
	// Changed is called after a change of Held or Other. It must not block.
	Changed func()
}

// Tenure is one process's hold on a Lease. Safe for concurrent use.
type Tenure struct {
	o Options

	mu      sync.Mutex
	renewed time.Time             // when the last good renewal was sent
	ours    *coordinationv1.Lease // as that renewal left it
	held    bool
	other   Holder // who holds it, when not we
	seen    string // the other's record as last seen
	since   time.Time
}

// ErrTaken says that another process took a rack that this one held.
type ErrTaken struct{ By Holder }

func (e *ErrTaken) Error() string {
	return fmt.Sprintf("another process took over this rack: key %s on %s", e.By.Key, e.By.Place)
}

// New makes a tenure that holds nothing yet.
func New(o Options) *Tenure {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Changed == nil {
		o.Changed = func() {}
	}
	return &Tenure{o: o}
}

// Held says whether this process may act on the rack now.
func (t *Tenure) Held() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.held && t.o.Now().Sub(t.renewed) < Valid
}

// Other is who holds the rack instead, false when nobody else is known to.
func (t *Tenure) Other() (Holder, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.other, t.other != Holder{}
}

// Run takes the Lease when it is free and keeps it until ctx ends, then gives
// it up. It returns ErrTaken when another process took it away.
func (t *Tenure) Run(ctx context.Context) error {
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		if err := t.try(ctx); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			t.release()
			return nil
		case <-tick.C:
		}
	}
}

// try looks at the Lease once and takes or renews it. While it is held the look is
// left out: it is written over what our last renewal left, which the cluster refuses
// when somebody else has written since. One request instead of two keeps a rack on a
// cluster that answers slowly.
func (t *Tenure) try(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	sent := t.o.Now()
	self := t.o.Self.String()
	t.mu.Lock()
	ours := t.ours
	t.mu.Unlock()
	if ours != nil && t.Held() {
		lease := ours.DeepCopy()
		t.fill(lease, self)
		after, err := t.o.Client.Update(ctx, lease, metav1.UpdateOptions{})
		if err == nil {
			t.won(sent, after)
			return nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			t.o.Log.Debug("cannot write the Lease", "name", t.o.Name, "error", err)
			return nil
		}
	}
	lease, err := t.o.Client.Get(ctx, t.o.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		fresh := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: t.o.Name}}
		t.fill(fresh, self)
		if after, err := t.o.Client.Create(ctx, fresh, metav1.CreateOptions{}); err == nil {
			t.won(sent, after)
		}
		return nil
	case err != nil:
		t.o.Log.Debug("cannot read the Lease", "name", t.o.Name, "error", err)
		return nil
	}
	holder := ""
	if lease.Spec.HolderIdentity != nil {
		holder = *lease.Spec.HolderIdentity
	}
	who := parse(holder)
	mine := who.Key == t.o.Self.Key && who.Place == t.o.Self.Place
	if holder != "" && !mine && !t.expired(holder, lease) {
		return t.lost(who)
	}
	transitions := int32(0)
	if lease.Spec.LeaseTransitions != nil {
		transitions = *lease.Spec.LeaseTransitions
	}
	if holder != self {
		transitions++
		now := metav1.NewMicroTime(time.Now())
		lease.Spec.AcquireTime, lease.Spec.LeaseTransitions = &now, &transitions
	}
	t.fill(lease, self)
	after, err := t.o.Client.Update(ctx, lease, metav1.UpdateOptions{})
	if err != nil {
		t.o.Log.Debug("cannot write the Lease", "name", t.o.Name, "error", err)
		return nil
	}
	t.won(sent, after)
	return nil
}

func (t *Tenure) fill(lease *coordinationv1.Lease, self string) {
	seconds := int32(Duration / time.Second)
	now := metav1.NewMicroTime(time.Now())
	lease.Spec.HolderIdentity, lease.Spec.LeaseDurationSeconds, lease.Spec.RenewTime = &self, &seconds, &now
}

// expired says that this process has watched the same record for the whole
// duration of the Lease.
func (t *Tenure) expired(holder string, lease *coordinationv1.Lease) bool {
	record := holder + " " + lease.ResourceVersion
	if lease.Spec.RenewTime != nil {
		record += " " + lease.Spec.RenewTime.String()
	}
	duration := Duration
	if s := lease.Spec.LeaseDurationSeconds; s != nil && *s > 0 {
		duration = time.Duration(*s) * time.Second
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.o.Now()
	if t.seen != record {
		t.seen, t.since = record, now
	}
	return now.Sub(t.since) > duration
}

func (t *Tenure) won(sent time.Time, lease *coordinationv1.Lease) {
	t.mu.Lock()
	first := !t.held
	t.held, t.renewed, t.ours, t.other, t.seen = true, sent, lease, Holder{}, ""
	t.mu.Unlock()
	if first {
		t.o.Log.Info("this process works on the rack", "lease", t.o.Name)
		t.o.Changed()
	}
}

func (t *Tenure) lost(to Holder) error {
	t.mu.Lock()
	was, changed := t.held, t.other != to
	t.held, t.other = false, to
	t.mu.Unlock()
	if was {
		return &ErrTaken{By: to}
	}
	if changed {
		t.o.Log.Warn("another process works on this rack, waiting for it to end", "lease", t.o.Name, "key", to.Key, "place", to.Place)
		t.o.Changed()
	}
	return nil
}

// release gives the Lease up so that the next process need not wait.
func (t *Tenure) release() {
	t.mu.Lock()
	held := t.held
	t.held = false
	t.mu.Unlock()
	if !held {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	lease, err := t.o.Client.Get(ctx, t.o.Name, metav1.GetOptions{})
	if err != nil || lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity != t.o.Self.String() {
		return
	}
	nobody := ""
	lease.Spec.HolderIdentity = &nobody
	if _, err := t.o.Client.Update(ctx, lease, metav1.UpdateOptions{}); err != nil {
		t.o.Log.Debug("cannot give the Lease up", "error", err)
	}
}
