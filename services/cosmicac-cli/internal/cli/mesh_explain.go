package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/spf13/cobra"

	"github.com/cosmicac/cosmicac/pkg/daemon/node"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// vantage is where the mesh is looked at from: this process, or a daemon.
type vantage interface {
	TracePeer(context.Context, *meshv1.TracePeerRequest) (*meshv1.TracePeerResponse, error)
	PingPeer(context.Context, *meshv1.PingPeerRequest) (*meshv1.PingPeerResponse, error)
	CheckNetwork(context.Context, *meshv1.CheckNetworkRequest) (*meshv1.CheckNetworkResponse, error)
	RunSpeedTest(context.Context, *meshv1.RunSpeedTestRequest) (*meshv1.RunSpeedTestResponse, error)
}

// remote is a daemon's view.
type remote struct{ c meshv1.NodeClient }

func (r remote) TracePeer(ctx context.Context, q *meshv1.TracePeerRequest) (*meshv1.TracePeerResponse, error) {
	return r.c.TracePeer(ctx, q)
}
func (r remote) PingPeer(ctx context.Context, q *meshv1.PingPeerRequest) (*meshv1.PingPeerResponse, error) {
	return r.c.PingPeer(ctx, q)
}
func (r remote) CheckNetwork(ctx context.Context, q *meshv1.CheckNetworkRequest) (*meshv1.CheckNetworkResponse, error) {
	return r.c.CheckNetwork(ctx, q)
}
func (r remote) RunSpeedTest(ctx context.Context, q *meshv1.RunSpeedTestRequest) (*meshv1.RunSpeedTestResponse, error) {
	return r.c.RunSpeedTest(ctx, q)
}

// lookFrom runs f with the view of a daemon, or this process's own when from is
// empty. A daemon too old to have such views is said to be so.
func (e *environment) lookFrom(ctx context.Context, operator, from string, limit time.Duration, f func(ctx context.Context, v vantage, network *trust.Network) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return withOperator(ctx, operator, func(n *mesh.Node, _ string) error {
		if from == "" {
			return fault.FromGRPC(f(ctx, &node.Service{Mesh: n, Name: "this operator's node"}, n.Network()))
		}
		p, name, err := onePeer(n.Network(), from)
		if err != nil {
			return err
		}
		client := meshv1.NewNodeClient(n.Client(p))
		err = f(ctx, remote{client}, n.Network())
		if fault.Is(err, fault.Unsupported) && older(ctx, client) {
			return fault.Wrap(fault.Unsupported, err, "%s is older than this cosmicac and cannot look at the mesh for it; update it, or leave --from away", name)
		}
		return err
	})
}

// older tells whether a daemon is from before nodes explained themselves: what came
// with it is missing, too.
func older(ctx context.Context, c meshv1.NodeClient) bool {
	_, err := c.ListServices(ctx, &meshv1.ListServicesRequest{})
	return fault.Is(err, fault.Unsupported)
}

// onePeer turns a name, a role of one member, or any key into a peer and what to
// call it. Keys need not be in the roster: agents are not.
func onePeer(network *trust.Network, what string) (peer.ID, string, error) {
	if p, err := identity.ParseID(what); err == nil {
		if m, ok := network.Known(p); ok {
			return p, m.GetName(), nil
		}
		return p, p.String(), nil
	}
	members, err := findDaemons(network, what)
	if err != nil {
		return "", "", err
	}
	if len(members) > 1 {
		var names []string
		for _, m := range members {
			names = append(names, m.GetName())
		}
		return "", "", fault.New(fault.Invalid, "%q are several members, name one: %s", what, strings.Join(names, ", "))
	}
	p, err := peerOf(members[0])
	return p, members[0].GetName(), err
}

func fromFlag(c *cobra.Command) *string {
	return c.Flags().String("from", "", "the daemon to look from, by name, role or key (default: this process)")
}

// path is a connection in words and numbers.
type path struct {
	Path        string     `json:"path"`
	Transport   string     `json:"transport"`
	Address     string     `json:"address"`
	RoundTripMS float64    `json:"round_trip_ms"`
	DialedBy    string     `json:"dialed_by"`
	ConnectedAt *time.Time `json:"connected_at"`
}

func pathOf(p *meshv1.Peer) *path {
	if p == nil {
		return nil
	}
	v := &path{Path: "direct", Transport: p.GetTransport(), Address: p.GetAddress(), RoundTripMS: milliseconds(p.GetRoundTripMicroseconds()), DialedBy: "this side"}
	if p.GetRelayed() {
		v.Path = "relay"
	}
	if p.GetInbound() {
		v.DialedBy = "the peer"
	}
	if p.GetConnectedAt() != nil {
		at := p.GetConnectedAt().AsTime()
		v.ConnectedAt = &at
	}
	return v
}

func (p *path) String() string {
	if p == nil {
		return "no connection"
	}
	return fmt.Sprintf("%s, %s, %s, round trip %.1f ms, dialed by %s", p.Path, p.Transport, p.Address, p.RoundTripMS, p.DialedBy)
}

func milliseconds(micro int64) float64 { return float64(micro) / 1000 }

func (e *environment) pingCommand(operator *string) *cobra.Command {
	c := &cobra.Command{Use: "ping MEMBER|ROLE|KEY", Short: "Call a peer, and time it", Args: cobra.ExactArgs(1)}
	from := fromFlag(c)
	count := c.Flags().Uint32("count", 3, "calls of each peer, 1 to 20")
	c.RunE = func(cmd *cobra.Command, args []string) error {
		if *count < 1 || *count > 20 {
			return usageError{fmt.Errorf("--count %d: must be 1 to 20", *count)}
		}
		return e.lookFrom(cmd.Context(), *operator, *from, 2*time.Minute, func(ctx context.Context, v vantage, network *trust.Network) error {
			type target struct{ name, key string }
			var targets []target
			if p, name, err := onePeer(network, args[0]); err == nil {
				targets = []target{{name, p.String()}}
			} else {
				members, err := findDaemons(network, args[0])
				if err != nil {
					return err
				}
				for _, m := range members {
					targets = append(targets, target{m.GetName(), m.GetKey()})
				}
			}
			type result struct {
				Name         string    `json:"name"`
				Key          string    `json:"key"`
				RoundTripsMS []float64 `json:"round_trips_ms"`
				Path         *path     `json:"path"`
				Error        string    `json:"error,omitempty"`
			}
			var results []result
			var failed error
			for _, t := range targets {
				r := result{Name: t.name, Key: t.key, RoundTripsMS: []float64{}}
				answer, err := v.PingPeer(ctx, &meshv1.PingPeerRequest{Key: t.key, Count: *count})
				if err = fault.FromGRPC(err); err != nil {
					if fault.Is(err, fault.Unsupported) {
						return err
					}
					r.Error = err.Error()
					failed = fault.Wrap(fault.KindOf(err), err, "ping %s", t.name)
				}
				for _, took := range answer.GetRoundTripMicroseconds() {
					r.RoundTripsMS = append(r.RoundTripsMS, milliseconds(took))
				}
				r.Path = pathOf(answer.GetPath())
				results = append(results, r)
			}
			if err := e.print(map[string]any{"pings": results}, func(t *tableWriter) {
				t.row("NAME", "ROUND TRIPS", "PATH")
				for _, r := range results {
					times := make([]string, len(r.RoundTripsMS))
					for i, took := range r.RoundTripsMS {
						times[i] = fmt.Sprintf("%.1f ms", took)
					}
					t.row(r.Name, orDash(strings.Join(times, ", ")), r.Path)
				}
			}); err != nil {
				return err
			}
			return failed
		})
	}
	return c
}

// trace is a search as it is printed.
type trace struct {
	Key        string     `json:"key"`
	Name       string     `json:"name,omitempty"`
	Reached    bool       `json:"reached"`
	FaultKind  string     `json:"fault_kind,omitempty"`
	Message    string     `json:"message,omitempty"`
	Path       *path      `json:"path"`
	Reused     bool       `json:"reused"`
	SearchedAt *time.Time `json:"searched_at,omitempty"`
	TookMS     float64    `json:"took_ms"`
	Ways       []traceWay `json:"ways"`
}

type traceWay struct {
	Name      string         `json:"name"`
	Result    string         `json:"result"`
	Reason    string         `json:"reason,omitempty"`
	AfterMS   float64        `json:"after_ms"`
	TookMS    float64        `json:"took_ms"`
	Addresses []traceAddress `json:"addresses"`
}

type traceAddress struct {
	Address   string  `json:"address"`
	Transport string  `json:"transport"`
	Result    string  `json:"result"`
	Reason    string  `json:"reason,omitempty"`
	AfterMS   float64 `json:"after_ms"`
	TookMS    float64 `json:"took_ms"`
}

func traceOf(t *meshv1.PeerTrace) *trace {
	v := &trace{Key: t.GetKey(), Name: t.GetName(), Reached: t.GetFaultKind() == "", FaultKind: t.GetFaultKind(), Message: t.GetMessage(),
		Path: pathOf(t.GetPath()), Reused: t.GetReused(), TookMS: milliseconds(t.GetTookMicroseconds()), Ways: []traceWay{}}
	if t.GetSearchedAt() != nil {
		at := t.GetSearchedAt().AsTime()
		v.SearchedAt = &at
	}
	for _, w := range t.GetWays() {
		way := traceWay{Name: w.GetName(), Result: w.GetResult(), Reason: w.GetReason(), AfterMS: milliseconds(w.GetBeganMicroseconds()),
			TookMS: milliseconds(w.GetTookMicroseconds()), Addresses: []traceAddress{}}
		for _, a := range w.GetAddresses() {
			way.Addresses = append(way.Addresses, traceAddress{Address: a.GetAddress(), Transport: a.GetTransport(), Result: a.GetResult(), Reason: a.GetReason(),
				AfterMS: milliseconds(a.GetBeganMicroseconds()), TookMS: milliseconds(a.GetTookMicroseconds())})
		}
		v.Ways = append(v.Ways, way)
	}
	return v
}

func (v *trace) table(t *tableWriter, now time.Time) {
	name := v.Name
	if name == "" {
		name = v.Key
	}
	if v.Reached {
		t.row(name + " is reached: " + v.Path.String())
	} else {
		t.row(name + " is not reached")
	}
	switch {
	case v.Reused && len(v.Ways) == 0:
		t.row("The connection stood already, and this side never had to search for it.")
		return
	case v.Reused && v.SearchedAt != nil:
		t.row("The connection stood already. This is the last search, of " + age(*v.SearchedAt, now) + " ago:")
	case v.Path != nil && v.Path.Path == "relay" && !slices.ContainsFunc(v.Ways, func(w traceWay) bool { return w.Name == "relays" }):
		t.row("It was relayed before. This is the search for a direct way:")
	}
	t.row("WAY", "ADDRESS", "RESULT", "AFTER", "TOOK", "WHY")
	row := func(way, address, result string, after, took float64, reason string) {
		began, lasted := "-", "-"
		if result != "not needed" && result != "not dialed" {
			began, lasted = fmt.Sprintf("%.1f ms", after), fmt.Sprintf("%.1f ms", took)
		}
		t.row(way, address, result, began, lasted, orDash(reason))
	}
	for _, w := range v.Ways {
		row(w.Name, "", w.Result, w.AfterMS, w.TookMS, w.Reason)
		for _, a := range w.Addresses {
			row("", a.Address, a.Result, a.AfterMS, a.TookMS, a.Reason)
		}
	}
}

func (e *environment) traceCommand(operator *string) *cobra.Command {
	c := &cobra.Command{
		Use: "trace MEMBER|KEY", Short: "How a peer is reached: every way and address that was tried, and why not", Args: cobra.ExactArgs(1),
		Example: "  cosmicac mesh trace wrk-ork --from app-node",
	}
	from := fromFlag(c)
	c.RunE = func(cmd *cobra.Command, args []string) error {
		return e.lookFrom(cmd.Context(), *operator, *from, 45*time.Second, func(ctx context.Context, v vantage, network *trust.Network) error {
			p, _, err := onePeer(network, args[0])
			if err != nil {
				return err
			}
			answer, err := v.TracePeer(ctx, &meshv1.TracePeerRequest{Key: p.String()})
			if err != nil {
				return err
			}
			view := traceOf(answer.GetTrace())
			if err := e.print(view, func(t *tableWriter) { view.table(t, time.Now()) }); err != nil {
				return err
			}
			if view.Reached {
				return nil
			}
			kind := fault.Kind(view.FaultKind)
			if !kind.Known() {
				kind = fault.Unreachable
			}
			return fault.New(kind, "%s", view.Message)
		})
	}
	return c
}

func (e *environment) speedtestCommand(operator *string) *cobra.Command {
	c := &cobra.Command{Use: "speedtest MEMBER|KEY", Short: "How fast bulk and calls to a peer are, alone and together", Args: cobra.ExactArgs(1)}
	from := fromFlag(c)
	duration := c.Flags().Duration("time", 3*time.Second, "of each direction, 1s to 10s")
	bytes := c.Flags().Uint64("bytes", 0, "at most so many bytes of each direction (default: 1 GiB, the most)")
	c.RunE = func(cmd *cobra.Command, args []string) error {
		seconds := uint32(duration.Round(time.Second) / time.Second)
		if *duration < time.Second || *duration > mesh.SpeedTestMost {
			return usageError{fmt.Errorf("--time %s: must be 1s to %s", *duration, mesh.SpeedTestMost)}
		}
		return e.lookFrom(cmd.Context(), *operator, *from, 90*time.Second, func(ctx context.Context, v vantage, network *trust.Network) error {
			p, _, err := onePeer(network, args[0])
			if err != nil {
				return err
			}
			r, err := v.RunSpeedTest(ctx, &meshv1.RunSpeedTestRequest{Key: p.String(), Seconds: seconds, Bytes: *bytes})
			if err != nil {
				return err
			}
			type direction struct {
				Bytes            uint64  `json:"bytes"`
				TookMS           float64 `json:"took_ms"`
				MegabytesPerSec  float64 `json:"megabytes_per_second"`
				CallsBeside      uint32  `json:"calls_beside"`
				CallsBesideP50MS float64 `json:"calls_beside_p50_ms"`
				CallsBesideP99MS float64 `json:"calls_beside_p99_ms"`
			}
			view := struct {
				Path       *path     `json:"path"`
				Calls      uint32    `json:"calls"`
				CallsP50MS float64   `json:"calls_p50_ms"`
				CallsP99MS float64   `json:"calls_p99_ms"`
				Up         direction `json:"up"`
				Down       direction `json:"down"`
			}{Path: pathOf(r.GetPath()), Calls: r.GetAlone().GetCalls(), CallsP50MS: milliseconds(r.GetAlone().GetP50Microseconds()), CallsP99MS: milliseconds(r.GetAlone().GetP99Microseconds())}
			of := func(b *meshv1.BulkSpeed, c *meshv1.CallTimes) direction {
				d := direction{Bytes: b.GetBytes(), TookMS: milliseconds(b.GetTookMicroseconds()), CallsBeside: c.GetCalls(),
					CallsBesideP50MS: milliseconds(c.GetP50Microseconds()), CallsBesideP99MS: milliseconds(c.GetP99Microseconds())}
				if took := b.GetTookMicroseconds(); took > 0 {
					d.MegabytesPerSec = float64(b.GetBytes()) / float64(took) // bytes a microsecond
				}
				return d
			}
			view.Up, view.Down = of(r.GetUp(), r.GetBesideUp()), of(r.GetDown(), r.GetBesideDown())
			return e.print(view, func(t *tableWriter) {
				t.row("over " + view.Path.String())
				t.row("", "BULK", "CALLS", "P50", "P99")
				t.row("alone", "-", view.Calls, fmt.Sprintf("%.2f ms", view.CallsP50MS), fmt.Sprintf("%.2f ms", view.CallsP99MS))
				for _, d := range []struct {
					name string
					direction
				}{{"beside bulk to it", view.Up}, {"beside bulk from it", view.Down}} {
					t.row(d.name, fmt.Sprintf("%.1f MB/s", d.MegabytesPerSec), d.CallsBeside, fmt.Sprintf("%.2f ms", d.CallsBesideP50MS), fmt.Sprintf("%.2f ms", d.CallsBesideP99MS))
				}
			})
		})
	}
	return c
}
