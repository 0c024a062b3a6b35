// Package agents is the orchestrator's desk for agents: it makes and checks
// their one-time join tokens, signs their certificates and knows which are void,
// hears their reports, and passes orders and revocations down.
//
// Whatever an agent says is its tenant's claim: it is bounded, it decides about
// the tenant's own job alone, and its key is worth nothing beyond that job.
// Guarantees: a token is redeemed by one key; a second key fences the attempt,
// so that neither of the two is believed. A certificate is void from the moment
// at which its attempt is recorded as over, and so is one that is not known. The
// newest report counts; older ones and lost ones do not matter. An agent's
// silence is noticed and never judged.
//
// It does not decide states (package life), and reaches no agent by itself.
package agents

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/libp2p/go-libp2p/core/peer"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/life"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/notice"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
)

// Bounds of what agents may send.
const (
	reportBytes   = 64 << 10
	reportGPUs    = 64
	messageBytes  = 1024
	reportSpacing = 100 * time.Millisecond
)

// Options sets up a Desk.
type Options struct {
	Store *record.Store
	// Key signs certificates; the roster delegates that to it.
	Key     *identity.Key
	Network *trust.Network
	// CertificateLife is how long a certificate is good.
	CertificateLife time.Duration
	// TokenLife is how long after its VM came up a token may be redeemed.
	TokenLife time.Duration
	// Changed is told of jobs whose agents said something new. It must not block.
	Changed func(jobID string)
	// PutCard takes an agent's card that came with a report into the registry
	// of cards, and Card looks a key's newest card up there.
	PutCard func(caller mesh.Caller, envelope []byte) error
	Card    func(key string) (*meshv1.Card, []byte, bool)
	// Revet makes the mesh ask Vet about admitted peers again, after certificates
	// became void.
	Revet func()
	Hub   *notice.Hub
	Clock func() time.Time
	Log   hclog.Logger
}

// Desk answers agents. It is safe for concurrent use.
type Desk struct {
	orkv1.UnimplementedAgentsServer
	orkv1.UnimplementedRevocationsServer
	o        Options
	secret   []byte
	heard    presence
	standing standing
	changes  *notice.Subscription
}

// New makes a desk and reads which certificates are good; Run keeps that up.
func New(ctx context.Context, o Options) (*Desk, error) {
	raw, err := o.Key.Private().Raw()
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "derive the secret of join tokens")
	}
	mac := hmac.New(sha256.New, raw)
	mac.Write([]byte("cosmicac wrk-ork join tokens 1"))
	d := &Desk{o: o, secret: mac.Sum(nil), changes: o.Hub.Subscribe(), standing: standing{
		jobs: make(map[string]map[string]error), floorsRaised: make(chan struct{}), voided: make(chan struct{}),
	}}
	live, err := o.Store.Live(ctx)
	if err != nil {
		return nil, err
	}
	for _, j := range live {
		d.standing.load(j)
	}
	floors, err := o.Store.Floors(ctx)
	if err != nil {
		return nil, err
	}
	d.standing.raise(floors)
	return d, nil
}

// Sight is what is heard of an attempt's agents.
func (d *Desk) Sight(a *job.Attempt) life.Agent {
	out, card := d.heard.sight(a)
	if a.AgentKey == "" {
		return out
	}
	// A card comes with a report or by the registry; the newer one counts.
	if c, _, ok := d.o.Card(a.AgentKey); ok && c.AttemptId == a.ID && (card == nil || c.Sequence > card.Sequence) {
		card = c
	}
	if card != nil {
		adopt(&out, card)
	}
	return out
}

// Drain tells the attempt's agents, now or when they next attend, to finish
// what they have.
func (d *Desk) Drain(attemptID string, deadline time.Time) { d.heard.order(attemptID, deadline) }

// Forget drops what was heard of an attempt that is over.
func (d *Desk) Forget(attemptID string) { d.heard.forget(attemptID) }

// Token is the join token for one node of one plan. It is derived, not stored:
// a repeated proposal carries the same one, and it is worth nothing for another
// plan or node.
func (d *Desk) Token(attemptID string, plan, node uint32) string {
	mac := hmac.New(sha256.New, d.secret)
	mac.Write([]byte(attemptID))
	var n [8]byte
	binary.BigEndian.PutUint32(n[:4], plan)
	binary.BigEndian.PutUint32(n[4:], node)
	mac.Write(n[:])
	return "cjt_" + base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// Hash is how a token is filed.
func Hash(token string) []byte {
	sum := sha256.Sum256([]byte(token))
	return sum[:]
}

// VerifyJoin is the mesh's question whether a token lets a key in to redeem
// it. It redeems nothing. A key that shows a token which another key redeemed
// is let in too: redeeming it is what fences the attempt.
func (d *Desk) VerifyJoin(ctx context.Context, _ peer.ID, token string) error {
	t, j, err := d.o.Store.Token(ctx, Hash(token))
	if err != nil {
		return err
	}
	_, a := j.Attempt(t.AttemptID)
	return d.usable(t, j, a)
}

// usable says whether a token may still be shown.
func (d *Desk) usable(t *record.Token, j *job.Job, a *job.Attempt) error {
	if a == nil || a.Plan != t.Plan || a.State == orkv1.State_STATE_QUEUED || int(t.NodeIndex) >= len(a.Nodes) {
		return fault.New(fault.Unauthenticated, "this join token is of an earlier plan; it is void")
	}
	vm := a.Nodes[t.NodeIndex].GetVmiUid()
	switch {
	case a.Fenced:
		return fault.New(fault.Denied, "attempt %s is fenced: its join token was redeemed by two keys", a.ID)
	case !j.Certified(a) || a.State == orkv1.State_STATE_STOPPING:
		return fault.New(fault.Denied, "attempt %s is over; its join token is void", a.ID)
	case vm == "":
		return fault.New(fault.Unavailable, "rack %s has not reported the VM of this join token yet; try again in a moment", a.RackID)
	case t.VMIUID != "" && t.VMIUID != vm:
		return fault.New(fault.Denied, "this join token was redeemed in the VM with uid %s, and the cluster runs another in its place; stop and start the job", t.VMIUID)
	case t.RedeemedBy != "":
		return nil
	case !a.UpAt.IsZero() && d.o.Clock().Sub(a.UpAt) > d.o.TokenLife:
		return fault.New(fault.Unauthenticated, "this join token is older than %s after the start of its VM; stop and start the job", d.o.TokenLife)
	}
	return nil
}

// Vet is the mesh's question about a caller that is about to be, or stays,
// admitted. It is quick: it reads memory alone.
func (d *Desk) Vet(c mesh.Caller) error {
	if c.Class != meshv1.Class_CLASS_AGENT || c.Certificate == nil {
		return nil
	}
	return d.standing.check(c.Certificate.JobId, c.Certificate.AttemptId)
}

// RedeemToken implements orkv1.AgentsServer.
func (d *Desk) RedeemToken(ctx context.Context, req *orkv1.RedeemTokenRequest) (*orkv1.RedeemTokenResponse, error) {
	caller, ok := mesh.CallerFrom(ctx)
	if !ok {
		return nil, fault.New(fault.Denied, "redeem a join token: the caller is not known")
	}
	if len(req.JoinToken) > 256 {
		return nil, fault.New(fault.Unauthenticated, "this join token is not known")
	}
	var fenced, attemptID string
	key := caller.ID.String()
	j, err := d.o.Store.Redeem(ctx, Hash(req.JoinToken), func(t *record.Token, j *job.Job) (*job.Job, []job.Event, error) {
		r, a := j.Attempt(t.AttemptID)
		if err := d.usable(t, j, a); err != nil {
			return nil, nil, err
		}
		attemptID = a.ID
		switch t.RedeemedBy {
		case key:
			return j, nil, nil
		case "":
			t.RedeemedBy, t.RedeemedAt, t.VMIUID = key, d.o.Clock(), a.Nodes[t.NodeIndex].GetVmiUid()
			if a.NodeKeys == nil {
				a.NodeKeys = make(map[uint32]string)
			}
			a.NodeKeys[t.NodeIndex] = key
			if t.NodeIndex == 0 {
				a.AgentKey = key
				if a.DefaultUser == "" {
					a.DefaultUser = j.Spec.GetImage().GetDefaultUser()
				}
			}
			return j, nil, nil
		}
		fenced = a.ID
		a.Fenced, a.AgentReady = true, false
		return j, []job.Event{{ReplicaID: r.ID, AttemptID: a.ID, State: a.State, Reason: orkv1.Reason_REASON_FENCED,
			Message: "a second key redeemed the join token", Actor: a.RackID}}, nil
	})
	if err != nil {
		return nil, err
	}
	// Before the answer: whoever has a certificate is known, and whoever lost it cut.
	if err := d.refresh(ctx, j.ID); err != nil {
		return nil, err
	}
	d.o.Changed(j.ID)
	if fenced != "" {
		d.o.Log.Error("a join token was redeemed by a second key; the attempt is fenced", "attempt", fenced, "job", j.ID, "key", key)
		return nil, fault.New(fault.Denied, "this join token was redeemed by another key before; attempt %s is fenced", fenced)
	}
	env, err := d.certify(j, attemptID, key)
	if err != nil {
		return nil, err
	}
	d.o.Log.Info("agent redeemed its token", "job", j.ID, "attempt", attemptID, "key", key)
	return &orkv1.RedeemTokenResponse{CertificateEnvelope: env}, nil
}

// certify signs a certificate for a key of a live attempt.
func (d *Desk) certify(j *job.Job, attemptID, key string) ([]byte, error) {
	r, a := j.Attempt(attemptID)
	now := d.o.Clock()
	id := d.o.Network.ID()
	env, err := trust.SealCertificate(d.o.Key, &meshv1.JobCertificate{
		NetworkId: id[:], Key: key, JobId: j.ID, ReplicaId: r.ID, AttemptId: a.ID, RackId: a.RackID,
		NotBefore: timestamppb.New(now), NotAfter: timestamppb.New(now.Add(d.o.CertificateLife)), Epoch: a.CertificateEpoch(),
	})
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "sign the certificate of attempt %s", a.ID)
	}
	return env, nil
}

// known reads the caller's attempt and checks that it is live and that the
// caller's key is one of its keys.
func (d *Desk) known(ctx context.Context) (caller mesh.Caller, j *job.Job, a *job.Attempt, node uint32, err error) {
	caller, ok := mesh.CallerFrom(ctx)
	if !ok || caller.Certificate == nil {
		return caller, nil, nil, 0, fault.New(fault.Denied, "only an agent with a certificate may call this")
	}
	j, err = d.o.Store.Job(ctx, caller.Certificate.JobId)
	if err != nil {
		return caller, nil, nil, 0, err
	}
	_, a = j.Attempt(caller.Certificate.AttemptId)
	if a == nil {
		return caller, nil, nil, 0, over(caller.Certificate.AttemptId)
	}
	if err := verdict(j, a); err != nil {
		return caller, nil, nil, 0, err
	}
	for index, key := range a.NodeKeys {
		if key == caller.ID.String() {
			return caller, j, a, index, nil
		}
	}
	return caller, nil, nil, 0, fault.New(fault.Denied, "this key is not the agent of attempt %s", a.ID)
}

// RenewCertificate implements orkv1.AgentsServer.
func (d *Desk) RenewCertificate(ctx context.Context, _ *orkv1.RenewCertificateRequest) (*orkv1.RenewCertificateResponse, error) {
	caller, j, a, _, err := d.known(ctx)
	if err != nil {
		return nil, err
	}
	env, err := d.certify(j, a.ID, caller.ID.String())
	if err != nil {
		return nil, err
	}
	return &orkv1.RenewCertificateResponse{CertificateEnvelope: env}, nil
}

// Attend implements orkv1.AgentsServer.
func (d *Desk) Attend(stream orkv1.Agents_AttendServer) error {
	ctx := stream.Context()
	caller, j, a, node, err := d.known(ctx)
	if err != nil {
		return err
	}
	sub := d.o.Hub.SubscribeTo(j.ID)
	defer sub.Close()
	d.heard.enter(a.ID, node, d.o.Clock())
	d.o.Changed(j.ID)
	defer func() {
		d.heard.leave(a.ID, node, d.o.Clock())
		d.o.Changed(j.ID)
	}()

	// The receiver ends when the handler returns, since that ends the stream;
	// it keeps nothing, so nobody waits for it beyond the stream's own end.
	received := make(chan error, 1)
	go func() { received <- d.listen(stream, caller, j.ID, a.ID, node) }()

	var sent told
	certificates := j.CertificateFloors()
	for {
		drain, wake := d.heard.standing(a.ID)
		floors, raised := d.standing.of(j.Owner.GetProjectId())
		if order := sent.news(drain, floors, certificates); order != nil {
			if err := stream.Send(order); err != nil {
				return err
			}
		}
		select {
		case err := <-received:
			return err
		case <-wake:
		case <-raised:
		case <-sub.Ready():
			if len(sub.Take()) == 0 {
				continue // taken with a wake before
			}
			_, now, _, _, err := d.known(ctx)
			switch k := fault.KindOf(err); {
			case err == nil:
				certificates = now.CertificateFloors()
			case k == fault.Unavailable || k == fault.Canceled || k == fault.Timeout:
				// The record cannot be read now: nothing is concluded.
			default:
				return err
			}
		}
	}
}

// listen hears one agent until its stream ends. Reports that come faster than
// the spacing are slowed down by not being read.
func (d *Desk) listen(stream orkv1.Agents_AttendServer, caller mesh.Caller, jobID, attemptID string, node uint32) error {
	ctx := stream.Context()
	for {
		req, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if proto.Size(req) > reportBytes {
			return fault.New(fault.TooLarge, "a report has %d bytes; at most %d are taken", proto.Size(req), reportBytes)
		}
		var card *meshv1.Card
		if len(req.CardEnvelope) > 0 {
			if card, err = d.card(req.CardEnvelope, caller); err != nil {
				d.o.Log.Warn("agent's card refused", "attempt", attemptID, "error", err)
			}
		}
		bound(req.Report)
		if d.heard.hear(attemptID, node, req.Report, card, d.o.Clock()) {
			d.o.Changed(jobID)
		}
		timer := time.NewTimer(reportSpacing)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		}
	}
}

// card opens an agent's card: signed by the key at the other end, for its job.
func (d *Desk) card(envelope []byte, caller mesh.Caller) (*meshv1.Card, error) {
	c, err := d.o.Network.CheckCard(envelope, d.o.Clock())
	if err != nil {
		return nil, err
	}
	if c.Key != caller.ID.String() {
		return nil, fault.New(fault.Denied, "the card is of key %.64s", c.Key)
	}
	if c.AttemptId != "" && c.AttemptId != caller.Certificate.AttemptId {
		return nil, fault.New(fault.Denied, "the card names attempt %.64s", c.AttemptId)
	}
	if err := d.o.PutCard(caller, envelope); err != nil {
		d.o.Log.Debug("the registry did not take an agent's card", "key", c.Key, "error", err)
	}
	return c, nil
}

// mostAddresses bounds what is kept of a card.
const mostAddresses = 16

// adopt takes what a card says of where and how an attempt's agent is reached.
func adopt(out *life.Agent, c *meshv1.Card) {
	out.Addresses = c.Addresses[:min(len(c.Addresses), mostAddresses)]
	if key := strings.TrimSpace(c.SshHostKey); !strings.ContainsAny(key, "\n\r\x00") {
		out.SSHHostKey = key
	}
	out.DefaultUser = c.DefaultUser
}

func bound(r *agentv1.Report) {
	if r == nil {
		return
	}
	if len(r.Gpus) > reportGPUs {
		r.Gpus = r.Gpus[:reportGPUs]
	}
	if len(r.Message) > messageBytes {
		r.Message = strings.ToValidUTF8(r.Message[:messageBytes], "")
	}
}
