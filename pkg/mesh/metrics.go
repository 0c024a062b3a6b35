package mesh

import (
	"context"
	"net"
	"slices"
	"strings"
	"sync"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh/rpc"
	"github.com/libp2p/go-libp2p/p2p/protocol/circuitv2/relay"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
)

// metrics counts what the node does. Labels come from closed lists and from the
// methods of the wire, never from a peer: a flood makes no series.
type metrics struct {
	dials    *prometheus.CounterVec // by transport and result
	ways     *prometheus.CounterVec // by way and result
	admits   *prometheus.CounterVec // by direction and kind
	served   *prometheus.CounterVec // by method and kind
	made     *prometheus.CounterVec // by method and kind
	relayed  prometheus.Counter
	reserved prometheus.Gauge

	good sync.Map // method -> prometheus.Counter of made with kind ok
}

const kindOK = "ok"

func newMetrics() *metrics {
	vector := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "cosmicac_mesh_" + name, Help: help}, labels)
	}
	return &metrics{
		dials:  vector("dials_total", "Dials of single addresses by transport and how they ended.", "transport", "result"),
		ways:   vector("searches_total", "Ways of finding a peer that were tried, and what became of them.", "way", "result"),
		admits: vector("admits_total", "Admit dialogues by direction and kind of failure.", "direction", "kind"),
		served: vector("calls_served_total", "Calls that this node answered, by method and kind of failure.", "method", "kind"),
		made:   vector("calls_made_total", "Calls that this node made, by method and kind of failure; of streams the opening counts.", "method", "kind"),
		relayed: prometheus.NewCounter(prometheus.CounterOpts{Name: "cosmicac_mesh_relayed_bytes_total",
			Help: "Bytes that this node carried as a relay."}),
		reserved: prometheus.NewGauge(prometheus.GaugeOpts{Name: "cosmicac_mesh_relay_reservations",
			Help: "Reservations that peers hold at this node's relay."}),
	}
}

// register puts everything into the registry; n's own state is read when asked.
func (m *metrics) register(registry prometheus.Registerer, n *Node) error {
	if registry == nil {
		return nil
	}
	for _, c := range []prometheus.Collector{m.dials, m.ways, m.admits, m.served, m.made, m.relayed, m.reserved, standing{n}} {
		if err := registry.Register(c); err != nil {
			return fault.Wrap(fault.Internal, err, "register the mesh's metrics")
		}
	}
	return nil
}

func (m *metrics) dial(transport, result string) { m.dials.WithLabelValues(transport, result).Inc() }
func (m *metrics) way(name, result string)       { m.ways.WithLabelValues(label(name), label(result)).Inc() }
func (m *metrics) admit(direction string, err error) {
	m.admits.WithLabelValues(direction, kindLabel(err)).Inc()
}

// called counts a call that this node made.
func (m *metrics) called(method string, err error) {
	if err == nil {
		if c, ok := m.good.Load(method); ok {
			c.(prometheus.Counter).Inc()
			return
		}
	}
	name := "other"
	if rpc.RightOf(method) != nil {
		name = strings.TrimPrefix(method, "/")
	}
	c := m.made.WithLabelValues(name, kindLabel(err))
	c.Inc()
	if err == nil && name != "other" {
		m.good.Store(method, c)
	}
}

func kindLabel(err error) string {
	if err == nil {
		return kindOK
	}
	return string(fault.KindOf(err))
}

func label(words string) string { return strings.ReplaceAll(words, " ", "_") }

// counted is a service whose calls are counted. Refused calls do not reach its
// handlers; authorize counts those.
func (m *metrics) counted(desc *grpc.ServiceDesc) *grpc.ServiceDesc {
	c := *desc
	c.Methods, c.Streams = slices.Clone(desc.Methods), slices.Clone(desc.Streams)
	for i, method := range desc.Methods {
		name := desc.ServiceName + "/" + method.MethodName
		good := m.served.WithLabelValues(name, kindOK)
		note := func(err error) {
			if err == nil {
				good.Inc()
			} else {
				m.served.WithLabelValues(name, kindLabel(err)).Inc()
			}
		}
		c.Methods[i].Handler = func(srv any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (reply any, err error) {
			if interceptor != nil { // gRPC's, which authorises
				return method.Handler(srv, ctx, decode, func(ctx context.Context, request any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
					return interceptor(ctx, request, info, func(ctx context.Context, request any) (reply any, err error) {
						err = errPanicked
						defer func() { note(err) }()
						reply, err = next(ctx, request)
						return reply, err
					})
				})
			}
			err = errPanicked
			defer func() { note(err) }()
			reply, err = method.Handler(srv, ctx, decode, nil)
			return reply, err
		}
	}
	for i, stream := range desc.Streams {
		name := desc.ServiceName + "/" + stream.StreamName
		c.Streams[i].Handler = func(srv any, s grpc.ServerStream) (err error) {
			err = errPanicked
			defer func() { m.served.WithLabelValues(name, kindLabel(err)).Inc() }()
			err = stream.Handler(srv, s)
			return err
		}
	}
	return &c
}

// errPanicked is what a handler that never returned came to.
var errPanicked error = fault.New(fault.Internal, "the handler broke")

// authorizeCounted is authorize, and counts whom it turns away. It is asked about
// methods that this node serves, and no others.
func (n *Node) authorizeCounted(ctx context.Context, remote net.Addr, fullMethod string) (context.Context, error) {
	ctx, err := n.authorize(ctx, remote, fullMethod)
	if err != nil {
		n.metrics.served.WithLabelValues(strings.TrimPrefix(fullMethod, "/"), kindLabel(err)).Inc()
	}
	return ctx, err
}

// relayMetrics adds this package's counts to the library's.
type relayMetrics struct {
	relay.MetricsTracer
	m *metrics
}

func newRelayMetrics(registry prometheus.Registerer, m *metrics) relay.MetricsTracer {
	if registry == nil {
		registry = prometheus.NewRegistry()
	}
	return &relayMetrics{relay.NewMetricsTracer(relay.WithRegisterer(registry)), m}
}

func (r *relayMetrics) BytesTransferred(count int) {
	r.m.relayed.Add(float64(count))
	r.MetricsTracer.BytesTransferred(count)
}

func (r *relayMetrics) ReservationAllowed(renewal bool) {
	if !renewal {
		r.m.reserved.Inc()
	}
	r.MetricsTracer.ReservationAllowed(renewal)
}

func (r *relayMetrics) ReservationClosed(count int) {
	r.m.reserved.Sub(float64(count))
	r.MetricsTracer.ReservationClosed(count)
}

// standing collects what stands now, when asked.
type standing struct{ n *Node }

var (
	peersDesc = prometheus.NewDesc("cosmicac_mesh_peers", "Connections by the peer's class, transport and path.",
		[]string{"class", "transport", "path"}, nil)
	keptDesc = prometheus.NewDesc("cosmicac_mesh_kept_peers", "Peers that this node keeps a link to, by the link's path.", []string{"path"}, nil)
	heldDesc = prometheus.NewDesc("cosmicac_mesh_held_reservations", "Relays that hold a reservation for this node.", nil, nil)
)

func (c standing) Describe(out chan<- *prometheus.Desc) {
	out <- peersDesc
	out <- keptDesc
	out <- heldDesc
}

func (c standing) Collect(out chan<- prometheus.Metric) {
	type key struct{ class, transport, path string }
	peers := make(map[key]int)
	for _, s := range c.n.sessions.all() {
		k := key{"stranger", s.transport(), "direct"}
		if caller, ok := s.caller(); ok {
			k.class = label(className(caller.Class))
		}
		if s.relayed {
			k.path = "relayed"
		}
		peers[k]++
	}
	for k, count := range peers {
		out <- prometheus.MustNewConstMetric(peersDesc, prometheus.GaugeValue, float64(count), k.class, k.transport, k.path)
	}
	kept := map[string]int{"direct": 0, "relayed": 0, "away": 0}
	for _, k := range c.n.Kept() {
		switch {
		case k.Path == nil:
			kept["away"]++
		case k.Path.GetRelayed():
			kept["relayed"]++
		default:
			kept["direct"]++
		}
	}
	for path, count := range kept {
		out <- prometheus.MustNewConstMetric(keptDesc, prometheus.GaugeValue, float64(count), path)
	}
	out <- prometheus.MustNewConstMetric(heldDesc, prometheus.GaugeValue, float64(len(c.n.reservations())))
}
