package agent

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

const (
	callTime = 15 * time.Second
	// drainDefault bounds a drain for which no deadline was given.
	drainDefault = 5 * time.Minute
	drainMost    = 24 * time.Hour
	// cardEvery is how often the card goes along with a report without news.
	cardEvery = 30 * time.Second
	slowest   = 30 * time.Second
)

// pause is the wait before try n (from 0), with jitter.
func pause(n int) time.Duration {
	d := min(250*time.Millisecond<<min(n, 10), slowest)
	return d*3/4 + rand.N(d/2)
}

// pauseAfter is the wait after so many failures in a row, none after none.
func pauseAfter(failed int) time.Duration {
	if failed == 0 {
		return 0
	}
	return pause(failed)
}

// sleep waits, false when the context ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// certificate is one as it was opened, with its envelope.
type certificate struct {
	*meshv1.JobCertificate
	envelope []byte
}

// ended tells whether its time is over by the agent's own clock. Others allow
// trust.Skew beyond that.
func (c *certificate) ended(now time.Time) bool { return now.After(c.GetNotAfter().AsTime()) }

// due is when it should be renewed: a third of its life has passed.
func (c *certificate) due() time.Time {
	from := c.GetNotBefore().AsTime()
	return from.Add(c.GetNotAfter().AsTime().Sub(from) / 3)
}

// credential is the kept certificate when it is this attempt's, else the seed's
// token.
func (a *Agent) credential() (mesh.Credential, *certificate) {
	token := a.o.Seed.GetJoinToken()
	envelope := a.state.read(certificateFile)
	if len(envelope) == 0 {
		return mesh.JoinToken(token, a.ork), nil
	}
	c, err := a.ownCertificate(envelope)
	if err != nil {
		a.log.Info("the kept certificate is not used", "reason", err)
		if err := a.state.remove(certificateFile); err != nil {
			a.log.Warn("remove the old certificate", "error", err)
		}
		return mesh.JoinToken(token, a.ork), nil
	}
	if c.ended(a.o.Now()) {
		return mesh.EndedCertificate(envelope, token, a.ork), c
	}
	return mesh.Certificate(envelope), c
}

// ownCertificate checks that an envelope is a certificate of this key for this
// attempt. Who may sign it, those judge to whom it is shown.
func (a *Agent) ownCertificate(envelope []byte) (*certificate, error) {
	c, err := trust.OpenCertificate(envelope)
	if err != nil {
		return nil, err
	}
	switch {
	case c.GetKey() != a.key.ID().String():
		return nil, fault.New(fault.Denied, "it is for the key %s", c.GetKey())
	case c.GetAttemptId() != a.o.Seed.GetAttemptId():
		return nil, fault.New(fault.Denied, "it is for attempt %s, this is %s", c.GetAttemptId(), a.o.Seed.GetAttemptId())
	case !slices.Equal(c.GetNetworkId(), a.o.Seed.GetNetworkId()):
		return nil, fault.New(fault.Denied, "it is for another network")
	}
	return &certificate{c, envelope}, nil
}

// enroll gets a certificate if there is none, then renews it and attends, until ctx ends.
func (a *Agent) enroll(ctx context.Context, held *certificate) {
	if held == nil {
		if held = a.redeem(ctx); held == nil {
			return
		}
	}
	var both sync.WaitGroup
	both.Go(func() { a.renew(ctx, held) })
	a.attend(ctx)
	both.Wait()
}

// redeem repeats until wrk-ork has answered with a certificate; nil when ctx ended.
func (a *Agent) redeem(ctx context.Context) *certificate {
	for n := 0; ; n++ {
		c, err := a.redeemOnce(ctx)
		if err == nil {
			a.log.Info("the join token was exchanged for a certificate", "good_until", c.GetNotAfter().AsTime().Format(time.RFC3339))
			return c
		}
		a.log.Warn("the join token could not be exchanged", "try", n+1, "error", err)
		wait := pause(n)
		switch fault.KindOf(err) {
		case fault.Denied, fault.Unauthenticated, fault.FailedPrecondition, fault.Invalid:
			// It was used by another key, or is too old. Only an operator changes that.
			wait = max(wait, 5*time.Second)
		}
		if !sleep(ctx, wait) {
			return nil
		}
	}
}

func (a *Agent) redeemOnce(ctx context.Context) (*certificate, error) {
	call, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	answer, err := a.agents().RedeemToken(call, &orkv1.RedeemTokenRequest{JoinToken: a.o.Seed.GetJoinToken()})
	if err != nil {
		return nil, fault.FromGRPC(err)
	}
	return a.take(answer.GetCertificateEnvelope())
}

// take keeps a certificate and shows it from now on. One that cannot be kept is
// used all the same: after a restart the same key may redeem again.
func (a *Agent) take(envelope []byte) (*certificate, error) {
	c, err := a.ownCertificate(envelope)
	if err == nil && c.ended(a.o.Now().Add(-trust.Skew)) {
		err = fault.New(fault.Denied, "it ended at %s, and the clock here says %s", c.GetNotAfter().AsTime().Format(time.RFC3339), a.o.Now().UTC().Format(time.RFC3339))
	}
	if err != nil {
		return nil, fault.Wrap(fault.KindOf(err), err, "the certificate from wrk-ork is not usable: %v", err)
	}
	if err := a.state.write(certificateFile, envelope); err != nil {
		a.log.Error("the certificate could not be kept", "error", err)
	}
	a.node.SetCredential(mesh.Certificate(envelope))
	return c, nil
}

// renew asks for a fresh certificate when a third of the life has passed, and
// again until wrk-ork gives one. When the life is over meanwhile, it asks with
// the join token, which is good for the key that redeemed it.
func (a *Agent) renew(ctx context.Context, c *certificate) {
	shown := c.ended(a.o.Now()) // the join token is, to wrk-ork
	for failed := 0; ; {
		// A clock that is wrong by hours must not make a busy loop.
		if wait := min(time.Second, a.o.ReportEvery); !sleep(ctx, max(wait, pauseAfter(failed))) {
			return
		}
		// The clock is looked at again and again: a VM that slept wakes late.
		for wait := c.due().Sub(a.o.Now()); wait > 0; wait = c.due().Sub(a.o.Now()) {
			if !sleep(ctx, min(wait, a.o.ReportEvery)) {
				return
			}
		}
		ended := c.ended(a.o.Now())
		if ended && !shown {
			a.log.Warn("the certificate has ended; wrk-ork is shown the join token again", "ended_at", c.GetNotAfter().AsTime().Format(time.RFC3339))
			a.node.SetCredential(mesh.EndedCertificate(c.envelope, a.o.Seed.GetJoinToken(), a.ork))
			shown = true
		}
		fresh, err := a.freshCertificate(ctx, ended)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			failed++
			until := c.GetNotAfter().AsTime().Format(time.RFC3339)
			a.health.Raise(health.CertificateNotRenewed, until, err)
			a.log.Warn("the certificate could not be renewed", "try", failed, "good_until", until, "error", err)
			continue
		}
		failed, shown, c = 0, false, fresh
		a.health.Clear(health.CertificateNotRenewed)
		a.log.Info("the certificate was renewed", "good_until", c.GetNotAfter().AsTime().Format(time.RFC3339))
	}
}

func (a *Agent) freshCertificate(ctx context.Context, ended bool) (*certificate, error) {
	if ended {
		return a.redeemOnce(ctx)
	}
	call, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	answer, err := a.agents().RenewCertificate(call, &orkv1.RenewCertificateRequest{})
	if err != nil {
		return nil, fault.FromGRPC(err)
	}
	return a.take(answer.GetCertificateEnvelope())
}

// attend keeps a standing stream to wrk-ork.
func (a *Agent) attend(ctx context.Context) {
	for n := 0; ; n++ {
		heard, err := a.attendOnce(ctx)
		if ctx.Err() != nil {
			return
		}
		a.heed(err)
		if heard {
			n = 0
		}
		a.log.Info("not attending at wrk-ork", "try", n+1, "error", err)
		if !sleep(ctx, pause(n)) {
			return
		}
	}
}

// attendOnce reports until the stream breaks. heard tells whether wrk-ork took it.
func (a *Agent) attendOnce(ctx context.Context) (heard bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	var listening sync.WaitGroup
	defer listening.Wait()
	defer cancel()
	stream, err := a.agents().Attend(ctx)
	if err != nil {
		return false, fault.FromGRPC(err)
	}
	broke := make(chan error, 1)
	first := make(chan struct{})
	listening.Go(func() {
		once := sync.OnceFunc(func() { close(first) })
		for {
			order, err := stream.Recv()
			if err != nil {
				broke <- fault.FromGRPC(err)
				return
			}
			once()
			a.heed(nil)
			a.obey(order)
		}
	})
	tick := time.NewTicker(a.o.ReportEvery)
	defer tick.Stop()
	var shown string // addresses of the last card that went along
	var shownAt time.Time
	long := time.NewTimer(slowest)
	defer long.Stop()
	for {
		request := &orkv1.AttendRequest{Report: a.Report()}
		if now := strings.Join(a.node.Addresses(), " "); shownAt.IsZero() || now != shown || time.Since(shownAt) > cardEvery {
			if _, envelope, err := a.node.Card(); err == nil {
				request.CardEnvelope, shown, shownAt = envelope, now, time.Now()
			}
		}
		if err := stream.Send(request); err != nil {
			select {
			case err := <-broke: // says why; Send only says EOF
				return heard, err
			case <-ctx.Done():
				return heard, ctx.Err()
			}
		}
		select {
		case <-tick.C:
		case <-a.news:
		case <-first:
			heard, first = true, nil
		case <-long.C:
			heard = true // wrk-ork has no orders, and keeps the stream
		case err := <-broke:
			return heard, err
		case <-ctx.Done():
			return heard, ctx.Err()
		}
	}
}

func (a *Agent) obey(order *orkv1.AttendResponse) {
	a.revoke(order.GetRevocations())
	if order.GetMinimumEpoch() > 0 {
		a.revoke(&agentv1.Revocations{Grants: []*agentv1.GrantFloor{{MinimumEpoch: order.GetMinimumEpoch()}}})
	}
	if order.GetDrain() {
		a.orderDrain(order.GetDrainDeadline())
	}
}

// orderDrain takes one order to drain; the agent lives on and says so.
func (a *Agent) orderDrain(deadline *timestamppb.Timestamp) {
	limit := drainDefault
	if deadline != nil {
		limit = min(max(deadline.AsTime().Sub(a.o.Now()), 0), drainMost)
	}
	a.mu.Lock()
	again := a.draining
	a.draining = true
	a.mu.Unlock()
	if again {
		return
	}
	a.log.Info("told to drain", "within", limit.Round(time.Second))
	a.Changed()
	a.drainWithin <- limit // holds one, and there is only one
}

// drainOnOrder waits for that order and carries it out.
func (a *Agent) drainOnOrder(ctx context.Context) {
	select {
	case limit := <-a.drainWithin:
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		a.work.Drain(ctx)
	case <-ctx.Done():
	}
}

// orders is the service that wrk-ork calls.
type orders struct {
	agentv1.UnimplementedAgentServer
	agent *Agent
}

// Drain starts draining and answers at once.
func (o *orders) Drain(_ context.Context, r *agentv1.DrainRequest) (*agentv1.DrainResponse, error) {
	o.agent.orderDrain(r.GetDeadline())
	return &agentv1.DrainResponse{}, nil
}

// GetReport returns the newest report.
func (o *orders) GetReport(context.Context, *agentv1.GetReportRequest) (*agentv1.GetReportResponse, error) {
	return &agentv1.GetReportResponse{Report: o.agent.Report()}, nil
}

func timestamp(t time.Time) *timestamppb.Timestamp { return timestamppb.New(t) }

func phaseName(p agentv1.Phase) string {
	return strings.ToLower(strings.TrimPrefix(p.String(), "PHASE_"))
}

// cutLine makes one line of at most n bytes.
func cutLine(text string, n int) string {
	text = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, "?"))
	if len(text) > n {
		text = strings.ToValidUTF8(text[:n], "") + "..."
	}
	return text
}
