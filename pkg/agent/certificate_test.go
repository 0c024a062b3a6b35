package agent_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"github.com/cosmicac/cosmicac/pkg/agent/agenttest"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// ping asks the agent for a sign of life, which takes no more than being let in.
func ping(t *testing.T, from *mesh.Node, agent peer.ID, addresses ...string) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), agenttest.Patience)
	defer cancel()
	_, err := meshv1.NewNodeClient(from.Client(agent, addresses...)).Ping(ctx, &meshv1.PingRequest{})
	return err
}

// warns tells whether the agent shows the warning to a member who asks.
func warns(t *testing.T, lab *agenttest.Lab, proxy *mesh.Node, agent peer.ID, code health.Code) bool {
	t.Helper()
	info, err := meshv1.NewNodeClient(proxy.Client(agent, lab.Ork.Card().GetAddresses()...)).GetInfo(context.Background(), &meshv1.GetInfoRequest{})
	for _, w := range info.GetWarnings() {
		if w.GetCode() == string(code) && strings.Contains(w.GetText(), "could not be renewed") {
			return true
		}
	}
	if err != nil {
		t.Log(err)
	}
	return false
}

func renewals(lab *agenttest.Lab) int { _, n, _ := lab.Ork.Seen(); return n }

// stays fails when f does not hold for as long as an agent needs for ten looks
// at its clock.
func stays(t *testing.T, what string, f func() bool) {
	t.Helper()
	for range 10 {
		if time.Sleep(50 * time.Millisecond); !f() {
			t.Fatalf("does not stay: %s", what)
		}
	}
}

func TestCertificateOfADayIsRenewedAfterEightHours(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	run(t, lab, t.TempDir())
	eventually(t, "the agent attends", func() bool { return lab.Ork.Report() != nil })
	lab.Clock.Move(8*time.Hour - time.Minute)
	stays(t, "nothing is renewed before its time", func() bool { return renewals(lab) == 0 })
	for day := range 6 { // two days in all
		lab.Clock.Move(time.Duration(2-min(day, 1)) * time.Minute)
		eventually(t, "the certificate is renewed", func() bool { return renewals(lab) == day+1 })
		lab.Clock.Move(8*time.Hour - time.Minute)
	}
	before := lab.Ork.Report().GetSequence()
	eventually(t, "the agent still attends", func() bool { return lab.Ork.Report().GetSequence() > before })
	if redeemed, _, _ := lab.Ork.Seen(); redeemed != 1 {
		t.Errorf("the token was redeemed %d times", redeemed)
	}
}

func TestRenewalWaitsForWrkOrkAndSaysSo(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	a, _, _ := run(t, lab, t.TempDir())
	eventually(t, "the agent's card is known", func() bool { return lab.Ork.Card() != nil })
	proxy := lab.Proxy()
	lab.Ork.Down()
	lab.Clock.Move(9 * time.Hour)
	eventually(t, "the agent's health says that it is not renewed", func() bool {
		return warns(t, lab, proxy, a.ID(), health.CertificateNotRenewed)
	})
	client := lab.Client(a.ID(), 1, "shell")
	if err := ping(t, client, a.ID(), lab.Ork.Card().GetAddresses()...); err != nil {
		t.Errorf("a user, meanwhile: %v", err)
	}
	lab.Ork.Up()
	eventually(t, "it is renewed once wrk-ork is back", func() bool { return renewals(lab) > 0 })
	eventually(t, "the warning goes", func() bool { return !warns(t, lab, proxy, a.ID(), health.CertificateNotRenewed) })
}

func TestUsersReachAnAgentWhoseCertificateEndedAndItComesBack(t *testing.T) {
	t.Parallel()
	lab, dir := agenttest.New(t), t.TempDir()
	a, _, stop := run(t, lab, dir)
	eventually(t, "the agent's card is known", func() bool { return lab.Ork.Card() != nil })
	lab.Ork.Down()
	lab.Clock.Move(30 * time.Hour)
	at := lab.Ork.Card().GetAddresses()
	eventually(t, "a user with a grant of today gets in", func() bool { return ping(t, lab.Client(a.ID(), 1, "shell"), a.ID(), at...) == nil })
	// A restart of the VM in this state changes nothing.
	stop()
	a, _, _ = run(t, lab, dir)
	_, _, before := lab.Ork.Seen()
	lab.Ork.Up()
	eventually(t, "the agent attends again", func() bool { _, _, n := lab.Ork.Seen(); return n > before })
	if redeemed, _, _ := lab.Ork.Seen(); redeemed != 2 {
		t.Errorf("the token was redeemed %d times by its one key", redeemed)
	}
	eventually(t, "users get in", func() bool {
		return ping(t, lab.Client(a.ID(), 1, "shell"), a.ID(), lab.Ork.Card().GetAddresses()...) == nil
	})
}

func TestClocksTenMinutesApartChangeNothing(t *testing.T) {
	t.Parallel()
	for name, off := range map[string]time.Duration{"behind": -10 * time.Minute, "ahead": 10 * time.Minute} {
		t.Run("the agent's is "+name, func(t *testing.T) {
			t.Parallel()
			lab, dir := agenttest.New(t), t.TempDir()
			clock := &agenttest.Clock{}
			clock.Move(off)
			a, _, stop := runAt(t, lab, dir, clock)
			eventually(t, "the agent's card is known", func() bool { return lab.Ork.Card() != nil })
			if err := ping(t, lab.Client(a.ID(), 1, "shell"), a.ID(), lab.Ork.Card().GetAddresses()...); err != nil {
				t.Errorf("a grant that begins now: %v", err)
			}
			// A certificate that nears its end on one clock and is past it on the other.
			lab.Ork.Down()
			pass := func(d time.Duration) { lab.Clock.Move(d); clock.Move(d) }
			pass(24*time.Hour - 5*time.Minute)
			stop()
			a, _, _ = runAt(t, lab, dir, clock)
			lab.Ork.Up()
			_, _, before := lab.Ork.Seen()
			eventually(t, "the agent attends again", func() bool { _, _, n := lab.Ork.Seen(); return n > before })
			if err := ping(t, lab.Client(a.ID(), 1, "shell"), a.ID(), lab.Ork.Card().GetAddresses()...); err != nil {
				t.Errorf("a user, a day later: %v", err)
			}
		})
	}
}

func TestRevokedUserIsCutAndOthersAreNot(t *testing.T) {
	t.Parallel()
	lab, dir := agenttest.New(t), t.TempDir()
	a, _, stop := run(t, lab, dir)
	eventually(t, "the agent's card is known", func() bool { return lab.Ork.Card() != nil })
	at := lab.Ork.Card().GetAddresses()
	mine, other := lab.Client(a.ID(), 4, "shell"), lab.ClientOf("u-other", a.ID(), 4, "shell")
	for _, c := range []*mesh.Node{mine, other} {
		if err := ping(t, c, a.ID(), at...); err != nil {
			t.Fatal(err)
		}
	}
	floor := func(epoch uint64) *orkv1.AttendResponse {
		return &orkv1.AttendResponse{Revocations: &agentv1.Revocations{Grants: []*agentv1.GrantFloor{{UserId: agenttest.UserID, MinimumEpoch: epoch}}}}
	}
	lab.Ork.Order(floor(5))
	eventually(t, "the user's open connection ends", func() bool { return !mine.Connected(a.ID()) })
	refused := func(c *mesh.Node, at []string) {
		t.Helper()
		if err := ping(t, c, a.ID(), at...); fault.KindOf(err) != fault.Denied || !strings.Contains(err.Error(), "grant was revoked") {
			t.Errorf("a revoked grant: %v", err)
		}
	}
	eventually(t, "it is refused in words", func() bool { return fault.Is(ping(t, mine, a.ID(), at...), fault.Denied) })
	refused(mine, at)
	if !other.Connected(a.ID()) {
		t.Error("another user was cut too")
	}
	if err := ping(t, lab.Client(a.ID(), 5, "shell"), a.ID(), at...); err != nil {
		t.Errorf("a newer grant of the user: %v", err)
	}
	// An older word that comes late changes nothing, and a restart without
	// wrk-ork forgets nothing.
	lab.Ork.Order(floor(2))
	lab.Ork.Down()
	stop()
	a, _, _ = run(t, lab, dir)
	var now []string
	eventually(t, "the agent is up again", func() bool {
		c, _, ok := lab.Cards[0].Get(a.ID().String())
		now = c.GetAddresses()
		return ok
	})
	refused(lab.Client(a.ID(), 4, "shell"), now)
	if err := ping(t, lab.ClientOf("u-other", a.ID(), 4, "shell"), a.ID(), now...); err != nil {
		t.Errorf("the other user, after the restart: %v", err)
	}
}

func TestAgentsOfEarlierAttemptsAreNoPeers(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	a, _, _ := run(t, lab, t.TempDir())
	eventually(t, "the agent's card is known", func() bool { return lab.Ork.Card() != nil })
	at := lab.Ork.Card().GetAddresses()
	earlier, same := lab.Sibling(1), lab.Sibling(2)
	for _, s := range []*mesh.Node{earlier, same} {
		if err := ping(t, s, a.ID(), at...); err != nil {
			t.Fatal(err)
		}
	}
	lab.Ork.Order(&orkv1.AttendResponse{Revocations: &agentv1.Revocations{Certificates: map[string]uint64{agenttest.ReplicaID: 2}}})
	eventually(t, "the earlier attempt's agent is cut", func() bool { return !earlier.Connected(a.ID()) })
	eventually(t, "and refused", func() bool { return fault.Is(ping(t, earlier, a.ID()), fault.Denied) })
	if err := ping(t, same, a.ID()); err != nil {
		t.Errorf("a peer of the same attempt: %v", err)
	}
}

func TestShellsEndWithTheirAttempt(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	a, _, _ := run(t, lab, t.TempDir())
	eventually(t, "the agent's card is known", func() bool { return lab.Ork.Card() != nil })
	at := lab.Ork.Card().GetAddresses()
	client, proxy := lab.Client(a.ID(), 1, "shell"), lab.Proxy()
	for _, n := range []*mesh.Node{client, proxy} {
		if err := ping(t, n, a.ID(), at...); err != nil {
			t.Fatal(err)
		}
	}
	lab.Ork.End()
	eventually(t, "the user's open connection ends", func() bool { return !client.Connected(a.ID()) })
	eventually(t, "and the user is told why", func() bool {
		err := ping(t, client, a.ID(), at...)
		return fault.Is(err, fault.Denied) && strings.Contains(err.Error(), "attempt of the job is over")
	})
	if err := ping(t, proxy, a.ID(), at...); err != nil {
		t.Errorf("a member, who reads the last lines: %v", err)
	}
}
