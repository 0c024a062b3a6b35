package mesh_test

import (
	"context"
	"net"
	"strings"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// closedPort is a TCP address where nobody listens.
func closedPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return "/ip4/127.0.0.1/tcp/" + port
}

// silentPort is a UDP address where somebody listens and never answers.
func silentPort(t *testing.T) string {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_, port, _ := net.SplitHostPort(c.LocalAddr().String())
	return "/ip4/127.0.0.1/udp/" + port + "/quic-v1"
}

func wayOf(t *testing.T, trace *meshv1.PeerTrace, name string) *meshv1.TraceWay {
	t.Helper()
	for _, w := range trace.GetWays() {
		if w.GetName() == name {
			return w
		}
	}
	t.Fatalf("no way %q in %v", name, trace)
	return nil
}

func addressOf(t *testing.T, w *meshv1.TraceWay, address string) *meshv1.TraceAddress {
	t.Helper()
	for _, a := range w.GetAddresses() {
		if a.GetAddress() == address {
			return a
		}
	}
	t.Fatalf("no address %s in %v", address, w)
	return nil
}

func TestATraceTellsWhyNoWayWorked(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	gone := l.member("gone", meshv1.Role_ROLE_WORKER).ID()
	l.bootstrap()
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	other := l.start(l.app, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_APP_NODE })
	refusing, silent, strange := closedPort(t), silentPort(t), other.Addresses()[0]
	strange = strings.Split(strange, "/p2p/")[0]

	err := ping(within(t), ork.Node, gone, refusing, silent, strange)
	trace := ork.Trace(within(t), gone)
	if trace.GetPath() != nil || trace.GetReused() || trace.GetFaultKind() != string(fault.Unreachable) || trace.GetName() != "gone" {
		t.Errorf("%v", trace)
	}
	book := wayOf(t, trace, "address book")
	if book.GetResult() != "failed" || book.GetTookMicroseconds() == 0 {
		t.Errorf("%v", book)
	}
	for address, reason := range map[string]string{refusing: "refused", silent: "no answer in ", strange: "another key answers there, " + other.ID().String()} {
		if a := addressOf(t, book, address); a.GetResult() != "failed" || !strings.HasPrefix(a.GetReason(), reason) || a.GetTookMicroseconds() == 0 {
			t.Errorf("%s: %v", address, a)
		}
	}
	if a := addressOf(t, book, silent); a.GetTransport() != "quic" {
		t.Errorf("%v", a)
	}
	if w := wayOf(t, trace, "cards"); w.GetResult() != "failed" || w.GetReason() != "no bootstrap holds its card" {
		t.Errorf("%v", w)
	}
	if w := wayOf(t, trace, "dht"); w.GetResult() != "failed" || w.GetReason() == "" {
		t.Errorf("%v", w)
	}
	relays := wayOf(t, trace, "relays")
	relayed := false
	for _, a := range relays.GetAddresses() {
		relayed = relayed || a.GetTransport() == "relay" && a.GetResult() == "failed" && a.GetReason() == "the peer holds no reservation there" && a.GetTookMicroseconds() > 0
	}
	if !relayed {
		t.Errorf("%v", relays)
	}

	// The error of a call says the same, a line each way, and where to see more.
	wantKind(t, err, fault.Unreachable, "(gone)", "cosmicac mesh trace gone --from ork", "\n  address book: ", refusing[len("/ip4/127.0.0.1/tcp/"):]+" (refused)", "\n  relays: ")
	for _, line := range strings.Split(err.Error(), "\n") {
		if len(line) > 400 || strings.Contains(line, "failed to dial") {
			t.Errorf("an unreadable line: %s", line)
		}
	}
}

func TestATraceTellsWhichAddressWonAndWhatFailedBefore(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role, o.Listen = meshv1.Role_ROLE_ORK, transports["quic"] })
	app := l.start(l.app, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_APP_NODE })
	refusing := closedPort(t)
	if err := ping(within(t), app.Node, ork.ID(), append(ork.Addresses(), refusing)...); err != nil {
		t.Fatal(err)
	}
	good := strings.Split(ork.Addresses()[0], "/p2p/")[0]
	trace := app.Trace(within(t), ork.ID())
	book := wayOf(t, trace, "address book")
	if a := addressOf(t, book, good); book.GetResult() != "won" || a.GetResult() != "won" || a.GetTransport() != "quic" {
		t.Errorf("%v", trace)
	}
	if a := addressOf(t, book, refusing); a.GetResult() != "failed" || a.GetReason() != "refused" {
		t.Errorf("%v", a)
	}
	if w := wayOf(t, trace, "cards"); w.GetResult() != "not needed" {
		t.Errorf("%v", w)
	}
	path := trace.GetPath()
	if !trace.GetReused() || path.GetRelayed() || path.GetTransport() != "quic" || path.GetRoundTripMicroseconds() <= 0 || path.GetInbound() {
		t.Errorf("%v", path)
	}
	// The other side searched for nothing: it was dialed.
	back := ork.Trace(within(t), app.ID())
	if !back.GetReused() || len(back.GetWays()) != 0 || !back.GetPath().GetInbound() || back.GetFaultKind() != "" {
		t.Errorf("%v", back)
	}
}

func TestATraceSaysThatThePeerRefuses(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	stranger := l.start(newKey(t), func(o *mesh.Options) { o.DHT = mesh.DHTOff })
	if err := ping(within(t), stranger.Node, ork.ID(), ork.Addresses()...); !fault.Is(err, fault.Denied) {
		t.Fatal(err)
	}
	trace := stranger.Trace(within(t), ork.ID())
	if w := wayOf(t, trace, "address book"); w.GetResult() != "denied" || trace.GetFaultKind() != string(fault.Denied) || !strings.Contains(w.GetReason(), "refused this node") {
		t.Errorf("%v", trace)
	}
	if r := ork.Refusals(); r.Count == 0 || r.Key != stranger.ID() || r.Reason == "" {
		t.Errorf("the refusing side counts %+v", r)
	}
}

func TestATraceOfARelayedPeerTellsWhyThereIsNoDirectWay(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	b := l.bootstrap()
	worker := l.member("worker", meshv1.Role_ROLE_WORKER)
	w := l.start(worker, func(o *mesh.Options) { o.Role, o.Listen, o.Private = meshv1.Role_ROLE_WORKER, nil, true })
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role, o.Listen = meshv1.Role_ROLE_ORK, nil }) // nobody dials it
	refusing := closedPort(t)
	eventually(t, "called through the relay", func() bool { return ping(within(t), ork.Node, w.ID(), refusing) == nil })
	trace := ork.Trace(within(t), w.ID())
	if p := trace.GetPath(); !p.GetRelayed() || trace.GetReused() || trace.GetFaultKind() != "" || !strings.Contains(p.GetAddress(), b.ID().String()) {
		t.Fatalf("%v", trace)
	}
	if a := addressOf(t, wayOf(t, trace, "address book"), refusing); a.GetReason() != "refused" {
		t.Errorf("%v", trace)
	}
	for _, way := range trace.GetWays() {
		if way.GetName() == "relays" {
			t.Errorf("relays were searched although the peer is relayed: %v", way)
		}
	}
	eventually(t, "its reservation is seen", func() bool {
		check := w.CheckNetwork(within(t))
		return len(check.GetReservations()) == 1 && check.GetReservations()[0].GetRelayKey() == b.ID().String() && check.GetPrivate()
	})
}

func TestATraceTellsThatTheDiskKnewTheWay(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	dir := t.TempDir()
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	set := func(o *mesh.Options) { o.Role, o.StateDirectory = meshv1.Role_ROLE_APP_NODE, dir }
	app := l.start(l.app, set)
	if err := ping(within(t), app.Node, ork.ID(), ork.Addresses()...); err != nil {
		t.Fatal(err)
	}
	if err := app.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	again := l.start(l.app, set)
	trace := again.Trace(within(t), ork.ID())
	if w := wayOf(t, trace, "disk"); w.GetResult() != "won" || len(w.GetAddresses()) != 1 || trace.GetReused() {
		t.Errorf("%v", trace)
	}
	if w := wayOf(t, trace, "address book"); w.GetResult() != "nothing" {
		t.Errorf("%v", w)
	}
}

func TestATraceThatIsCutShortTellsHowFarItCame(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	gone := l.member("gone", meshv1.Role_ROLE_WORKER).ID()
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	silent := silentPort(t)
	ork.Client(gone, silent)
	ctx, cancel := context.WithCancel(context.Background())
	result := make(chan *meshv1.PeerTrace, 1)
	go func() { result <- ork.Trace(ctx, gone) }()
	eventually(t, "it dials", func() bool {
		half, stop := context.WithCancel(context.Background())
		stop()
		trace := ork.Trace(half, gone)
		return trace.GetFaultKind() == string(fault.Canceled) && len(trace.GetWays()) > 0 && len(trace.GetWays()[0].GetAddresses()) == 1 &&
			trace.GetWays()[0].GetAddresses()[0].GetResult() == "given up"
	})
	cancel()
	<-result
}
