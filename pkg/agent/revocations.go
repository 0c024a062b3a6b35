package agent

import (
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

const (
	revocationsFile = "revocations.bin"
	// floorsKept bounds the floors of users. One more, and a single floor for
	// everybody takes the place of all: too much is void then, never too little.
	floorsKept = 4096
	// replicasKept is beyond what a job can have.
	replicasKept = 4096
)

// revocations is what the agent refuses although its signature is good. Floors
// only rise. They are on disk, so that they hold when wrk-ork is away at the
// next start.
type revocations struct {
	mu           sync.Mutex
	grants       map[string]*agentv1.GrantFloor // by user, "" for everybody
	certificates map[string]uint64              // by replica of this job
	over         bool                           // wrk-ork says that the attempt is over
	raised       []func()                       // told after grants rose
}

// check is the mesh's last word on a caller.
func (r *revocations) check(c mesh.Caller) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case c.Class == meshv1.Class_CLASS_CLIENT && r.over:
		return fault.New(fault.Denied, "this attempt of the job is over; its VM is being taken down")
	case c.Grant != nil:
		return r.void(c.Grant.GetUserId(), c.Grant.GetEpoch())
	case c.Certificate != nil:
		if minimum := r.certificates[c.Certificate.GetReplicaId()]; c.Certificate.GetEpoch() < minimum {
			return fault.New(fault.Denied, "attempt %s is over; its certificate is void", c.Certificate.GetAttemptId())
		}
	}
	return nil
}

// void says why a user's right of an epoch counts no more. The caller holds mu.
func (r *revocations) void(userID string, epoch uint64) error {
	for _, user := range []string{"", userID} {
		if minimum := r.grants[user].GetMinimumEpoch(); epoch < minimum {
			return fault.New(fault.Denied, "the grant was revoked (epoch %d, at least %d is needed); ask for a new one", epoch, minimum)
		}
	}
	return nil
}

// take merges what was told and says whether anything was news. What has run
// out by itself at now is forgotten.
func (r *revocations) take(told *agentv1.Revocations, now time.Time) (news bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.grants == nil {
		r.grants, r.certificates = make(map[string]*agentv1.GrantFloor), make(map[string]uint64)
	}
	raise := func(f *agentv1.GrantFloor) {
		have := r.grants[f.GetUserId()]
		if f.GetMinimumEpoch() <= have.GetMinimumEpoch() {
			return
		}
		if f.GetUntil() != nil && have.GetUntil().AsTime().After(f.GetUntil().AsTime()) {
			f = &agentv1.GrantFloor{UserId: f.GetUserId(), MinimumEpoch: f.GetMinimumEpoch(), Until: have.GetUntil()}
		}
		r.grants[f.GetUserId()] = f
		news = true
	}
	for _, f := range told.GetGrants() {
		raise(f)
	}
	for replica, epoch := range told.GetCertificates() {
		if _, known := r.certificates[replica]; epoch > r.certificates[replica] && (known || len(r.certificates) < replicasKept) {
			r.certificates[replica] = epoch
			news = true
		}
	}
	var all agentv1.GrantFloor
	for user, f := range r.grants {
		if f.GetUntil() != nil && now.After(f.GetUntil().AsTime().Add(trust.Skew)) {
			delete(r.grants, user)
			continue
		}
		all.MinimumEpoch = max(all.MinimumEpoch, f.GetMinimumEpoch())
	}
	if len(r.grants) > floorsKept {
		r.grants = map[string]*agentv1.GrantFloor{"": &all}
	}
	return news
}

// record is what goes to disk.
func (r *revocations) record() ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := &agentv1.Revocations{Certificates: r.certificates}
	for _, f := range r.grants {
		m.Grants = append(m.Grants, f)
	}
	return proto.Marshal(m)
}

// setOver notes whether the attempt is over, and says whether that was news.
func (r *revocations) setOver(over bool) (news bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	news = r.over != over
	r.over = over
	return news
}

// loadRevocations reads what earlier starts were told.
func (a *Agent) loadRevocations() {
	var kept agentv1.Revocations
	if err := proto.Unmarshal(a.state.read(revocationsFile), &kept); err != nil {
		a.log.Error("the kept revocations cannot be read; wrk-ork tells them again at the first contact", "error", err)
		return
	}
	a.revoked.take(&kept, a.o.Now())
}

// revoke takes what wrk-ork told: who is refused from now on is cut at once.
func (a *Agent) revoke(told *agentv1.Revocations) {
	if !a.revoked.take(told, a.o.Now()) {
		return
	}
	a.node.Revet()
	a.revoked.mu.Lock()
	raised := a.revoked.raised
	a.revoked.mu.Unlock()
	for _, f := range raised {
		f()
	}
	raw, err := a.revoked.record()
	if err == nil {
		err = a.state.write(revocationsFile, raw)
	}
	if err != nil {
		a.log.Error("revocations could not be kept for the next start", "error", err)
	}
}

// Void says why a right that a user was given under an epoch counts no more, nil while
// it does. Floors are forgotten once every grant below them has run out by itself, so
// whoever keeps rights for longer asks at each OnRevoke and drops what is void.
func (a *Agent) Void(userID string, epoch uint64) error {
	a.revoked.mu.Lock()
	defer a.revoked.mu.Unlock()
	return a.revoked.void(userID, epoch)
}

// OnRevoke has f called after each revocation, by the goroutine that hears wrk-ork,
// which waits for it. What was revoked before is not told: ask Void once after this.
func (a *Agent) OnRevoke(f func()) {
	a.revoked.mu.Lock()
	defer a.revoked.mu.Unlock()
	a.revoked.raised = append(a.revoked.raised, f)
}

// heed looks at how a call to wrk-ork ended. An attempt that is over serves no
// client any more; wrk-ork may yet take it back, from an older record of its own.
func (a *Agent) heed(err error) {
	over := fault.Is(err, fault.FailedPrecondition)
	if err != nil && !over || !a.revoked.setOver(over) {
		return
	}
	if over {
		a.log.Warn("wrk-ork says that this attempt is over; clients are refused", "error", err)
	}
	a.node.Revet()
}
