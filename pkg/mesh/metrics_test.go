package mesh_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"
)

// series are the mesh's own series as "name{label=value,...}" with their values.
func series(t *testing.T, registry *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]float64)
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "cosmicac_mesh_") {
			continue
		}
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			slices.Sort(labels)
			all[f.GetName()+"{"+strings.Join(labels, ",")+"}"] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return all
}

func TestMetricsCountAndDoNotGrowWithPeersAndMethods(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	registry := prometheus.NewRegistry()
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role, o.Metrics = meshv1.Role_ROLE_ORK, registry })
	app := l.start(l.app, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_APP_NODE })
	if err := errors.Join(ping(within(t), ork.Node, app.ID(), app.Addresses()...), ping(within(t), app.Node, ork.ID())); err != nil {
		t.Fatal(err)
	}
	defer ork.Keep(app.ID())()
	visit := func(i int) error {
		// Called: methods that nobody has, of a peer. Searched: peers that nobody knows.
		method := fmt.Sprintf("/cosmicac.mesh.v1.Node/Method%d", i)
		for _, c := range []grpc.ClientConnInterface{app.Client(ork.ID()), ork.Client(newKey(t).ID(), closedAddress)} {
			if err := c.Invoke(within(t), method, &emptypb.Empty{}, &emptypb.Empty{}); err == nil {
				return fmt.Errorf("%s was answered", method)
			}
		}
		if i%100 == 0 { // a stranger costs a node
			_, err := meshv1.NewNodeClient(app.Client(ork.ID())).GetMetrics(within(t), &meshv1.GetMetricsRequest{})
			if !fault.Is(err, fault.Denied) {
				return fmt.Errorf("metrics for app-node: %w", err)
			}
			stranger := l.start(newKey(t), func(o *mesh.Options) { o.DHT, o.Listen = mesh.DHTOff, nil })
			_ = ping(within(t), stranger.Node, ork.ID(), ork.Addresses()...)
		}
		return nil
	}
	for i := range 3 {
		if err := visit(i); err != nil {
			t.Fatal(err)
		}
	}
	before := series(t, registry)
	for _, want := range []string{
		"cosmicac_mesh_peers{class=member,path=direct,transport=tcp}",
		"cosmicac_mesh_dials_total{result=ok,transport=tcp}", "cosmicac_mesh_dials_total{result=refused,transport=tcp}",
		"cosmicac_mesh_searches_total{result=failed,way=address_book}",
		"cosmicac_mesh_admits_total{direction=out,kind=ok}", "cosmicac_mesh_admits_total{direction=in,kind=denied}",
		"cosmicac_mesh_calls_served_total{kind=ok,method=cosmicac.mesh.v1.Node/Ping}",
		"cosmicac_mesh_calls_served_total{kind=denied,method=cosmicac.mesh.v1.Node/GetMetrics}",
		"cosmicac_mesh_calls_made_total{kind=unreachable,method=other}",
		"cosmicac_mesh_kept_peers{path=direct}",
	} {
		if before[want] < 1 {
			t.Errorf("%s is %v in %v", want, before[want], before)
		}
	}
	var flooding sync.WaitGroup
	for worker := range 16 {
		flooding.Go(func() {
			for i := 3 + worker; i < 1003; i += 16 {
				if err := visit(i); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	flooding.Wait()
	after := series(t, registry)
	for name := range after {
		if strings.Contains(name, "12D3Koo") || strings.Contains(name, "Node/Method") {
			t.Errorf("a label is of a peer or of its making: %s", name)
		}
	}
	// What a quiet node adds by itself meanwhile is of closed lists and little.
	if len(after) > len(before)+30 {
		t.Errorf("%d series became %d: %v", len(before), len(after), after)
	}
}

// closedAddress refuses: nobody listens on the first port.
const closedAddress = "/ip4/127.0.0.1/tcp/1"

func TestARelayCountsWhatItCarries(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	registry := prometheus.NewRegistry()
	key := l.member("boot", meshv1.Role_ROLE_BOOTSTRAP)
	network := l.memory()
	b := l.start(key, func(o *mesh.Options) {
		o.Network, o.Role, o.Relay, o.Metrics = network, meshv1.Role_ROLE_BOOTSTRAP, true, registry
	})
	l.bootstrapAt(b.Node)
	held := prometheus.NewRegistry()
	w := l.start(l.member("worker", meshv1.Role_ROLE_WORKER), func(o *mesh.Options) {
		o.Role, o.Listen, o.Private, o.Metrics = meshv1.Role_ROLE_WORKER, nil, true, held
	})
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role, o.Listen = meshv1.Role_ROLE_ORK, nil }) // nobody dials it
	eventually(t, "called through the relay", func() bool { return ping(within(t), ork.Node, w.ID()) == nil })
	eventually(t, "counted", func() bool {
		at := series(t, registry)
		return at["cosmicac_mesh_relayed_bytes_total{}"] > 100 && at["cosmicac_mesh_relay_reservations{}"] == 1
	})
	eventually(t, "held", func() bool {
		at := series(t, held)
		return at["cosmicac_mesh_held_reservations{}"] == 1 && at["cosmicac_mesh_peers{class=member,path=relayed,transport=tcp}"] > 0
	})
	if err := w.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the reservation ends", func() bool { return series(t, registry)["cosmicac_mesh_relay_reservations{}"] == 0 })
}
