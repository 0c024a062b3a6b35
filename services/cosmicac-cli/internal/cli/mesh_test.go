package cli

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/cosmicac/cosmicac/pkg/daemon/node"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/log"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/mesh/cards"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// village is a small network in this process: a bootstrap, wrk-ork and app-node
// that run, "gone" that does not, and an operator's folder.
type village struct {
	t        *testing.T
	operator string
	network  *trust.Network
	ork      *mesh.Node
	closed   string // an address where nobody listens
}

var villagers = map[string]meshv1.Role{"boot": meshv1.Role_ROLE_BOOTSTRAP, "wrk-ork": meshv1.Role_ROLE_ORK, "app-node": meshv1.Role_ROLE_APP_NODE,
	"old": meshv1.Role_ROLE_PROXY, "gone": meshv1.Role_ROLE_WORKER, "gone-2": meshv1.Role_ROLE_WORKER, "operator": meshv1.Role_ROLE_OPERATOR}

func newVillage(t *testing.T) *village {
	t.Helper()
	v := &village{t: t, operator: t.TempDir()}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	newKey := func() *identity.Key {
		k, err := identity.New(rand.Reader)
		check(err)
		return k
	}
	root, keys := newKey(), map[string]*identity.Key{}
	var members []*meshv1.Member
	for name, role := range villagers {
		keys[name] = newKey()
		members = append(members, &meshv1.Member{Key: keys[name].ID().String(), Name: name, Roles: []meshv1.Role{role}})
	}
	var err error
	v.network, err = trust.Create(filepath.Join(v.operator, "network"), "village", root, nil, members, nil)
	check(err)
	check(identity.Save(filepath.Join(v.operator, "operator.key"), keys["operator"]))
	start := func(name string, register func(n *mesh.Node, network *trust.Network)) *mesh.Node {
		id := v.network.ID()
		network, err := trust.NewMemory(id[:], v.network.RootKeys())
		check(err)
		check(network.AdoptGenesis(v.network.Genesis()))
		_, err = network.Adopt(v.network.RosterEnvelope(), v.network.InfoEnvelope())
		check(err)
		n, err := mesh.New(context.Background(), mesh.Options{Key: keys[name], Network: network, Role: villagers[name], Name: name, DHT: mesh.DHTServer,
			Listen: []string{"/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"}, Relay: name == "boot"})
		check(err)
		t.Cleanup(func() { _ = n.Close(context.Background()) })
		register(n, network)
		check(n.Start(context.Background()))
		return n
	}
	whole := func(n *mesh.Node, network *trust.Network) {
		member, _ := network.Known(n.ID())
		meshv1.RegisterNodeServer(n, &node.Service{Network: network, Mesh: n, Name: member.GetName(), Key: keys[member.GetName()], Ring: log.NewRing(0), Health: health.NewSet(nil),
			Metrics: prometheus.NewRegistry(), Ready: func() bool { return true }, Clock: time.Now})
	}
	boot := start("boot", func(n *mesh.Node, network *trust.Network) {
		whole(n, network)
		meshv1.RegisterCardsServer(n, cards.New(network, nil))
	})
	info, err := v.network.NextInfo(root, time.Now(), func(i *meshv1.NetworkInfo) {
		i.Bootstraps = []*meshv1.BootstrapAddress{{Key: boot.ID().String(), Addresses: boot.Addresses()}}
	})
	check(err)
	_, err = v.network.Adopt(nil, info)
	check(err)
	v.ork = start("wrk-ork", func(n *mesh.Node, network *trust.Network) {
		whole(n, network)
		n.RegisterService(later.desc(), later)
	})
	app := start("app-node", whole)
	old := start("old", func(n *mesh.Node, _ *trust.Network) { meshv1.RegisterNodeServer(n, oldNode{}) })
	for _, n := range []*mesh.Node{v.ork, app, old} { // they are found once their cards are held
		for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
			if _, err = boot.FindCard(context.Background(), n.ID()); err == nil {
				break
			}
			if time.Now().After(end) {
				t.Fatal(err)
			}
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	_, port, _ := net.SplitHostPort(l.Addr().String())
	check(l.Close())
	v.closed = "/ip4/127.0.0.1/tcp/" + port
	v.ork.Client(keys["gone"].ID(), v.closed) // what it knows of it
	return v
}

// run runs one command line as the operator.
func (v *village) run(args ...string) (status int, out, errOut string) {
	var o, e bytes.Buffer
	status = Main(append(args, "--operator", v.operator), strings.NewReader(""), &o, &e)
	return status, o.String(), e.String()
}

// ok runs one that must succeed.
func (v *village) ok(args ...string) string {
	v.t.Helper()
	status, out, errOut := v.run(args...)
	if status != 0 {
		v.t.Fatalf("cosmicac %v: status %d: %s%s", args, status, out, errOut)
	}
	return out
}

// refused runs one that must fail with a kind and these words; it returns what
// was printed.
func (v *village) refused(kind fault.Kind, words string, args ...string) string {
	v.t.Helper()
	status, out, errOut := v.run(args...)
	if status != kind.Exit() || !strings.Contains(errOut, words) {
		v.t.Errorf("cosmicac %v: status %d, want %d and %q: %s%s", args, status, kind.Exit(), words, out, errOut)
	}
	return out
}

// three runs a command in each form, checks that JSON and YAML say the same, and
// returns the table.
func (v *village) three(into any, args ...string) (table string) {
	v.t.Helper()
	if err := json.Unmarshal([]byte(v.ok(append(args, "-o", "json")...)), into); err != nil {
		v.t.Fatalf("%v: %v", args, err)
	}
	var same map[string]any
	if err := yaml.Unmarshal([]byte(v.ok(append(args, "-o", "yaml")...)), &same); err != nil || len(same) == 0 {
		v.t.Fatalf("%v: %v, %v", args, same, err)
	}
	return v.ok(args...)
}

// oldNode is a daemon from before nodes explained themselves.
type oldNode struct{ meshv1.UnimplementedNodeServer }

func (oldNode) Ping(_ context.Context, r *meshv1.PingRequest) (*meshv1.PingResponse, error) {
	return &meshv1.PingResponse{Payload: r.GetPayload()}, nil
}

func TestAnOperatorSeesHowAPeerIsReachedAndWhyNot(t *testing.T) {
	t.Parallel()
	v := newVillage(t)
	var reached trace
	table := v.three(&reached, "mesh", "trace", "wrk-ork")
	if !reached.Reached || reached.Reused || reached.Path == nil || reached.Path.Path != "direct" || reached.Path.RoundTripMS <= 0 || reached.Path.DialedBy != "this side" {
		t.Errorf("%+v, %+v", reached, reached.Path)
	}
	won := 0
	for _, w := range reached.Ways {
		for _, a := range w.Addresses {
			if a.Result == "won" && w.Result == "won" {
				won++
			}
		}
	}
	if won != 1 || !strings.Contains(table, "wrk-ork is reached: direct, ") || !strings.Contains(table, "WHY") {
		t.Errorf("%d winners in\n%s", won, table)
	}

	out := v.refused(fault.Unreachable, "(gone): no way worked", "mesh", "trace", "gone", "--from", "wrk-ork", "-o", "json")
	var lost trace
	if err := json.Unmarshal([]byte(out), &lost); err != nil {
		t.Fatal(err)
	}
	found := false
	for _, w := range lost.Ways {
		for _, a := range w.Addresses {
			found = found || a.Address == v.closed && a.Result == "failed" && a.Reason == "refused" && w.Name == "address book"
		}
	}
	if lost.Reached || lost.FaultKind != "unreachable" || !found {
		t.Errorf("%s", out)
	}
	// Two daemons keep their connection: it is told as it stands.
	v.ok("mesh", "ping", "wrk-ork", "--from", "app-node")
	if out := v.ok("mesh", "trace", "wrk-ork", "--from", "app-node"); !strings.Contains(out, "The connection stood already") {
		t.Errorf("%s", out)
	}
	v.refused(fault.NotFound, "no member is called", "mesh", "trace", "nobody")
	v.refused(fault.Invalid, "are several members, name one", "mesh", "trace", "worker")
	v.refused(fault.Unreachable, "cosmicac mesh trace gone", "mesh", "trace", "wrk-ork", "--from", "gone")
	v.refused(fault.Unsupported, "old is older than this cosmicac", "mesh", "trace", "wrk-ork", "--from", "old")
	v.refused(fault.Invalid, "this node itself", "mesh", "trace", "wrk-ork", "--from", "wrk-ork")
}

func TestAnOperatorPingsFromHereAndFromADaemon(t *testing.T) {
	t.Parallel()
	v := newVillage(t)
	var here struct {
		Pings []struct {
			Name  string
			Trips []float64 `json:"round_trips_ms"`
			Path  *path
			Error string
		}
	}
	if table := v.three(&here, "mesh", "ping", "ork", "--count", "2"); !strings.Contains(table, "wrk-ork") {
		t.Errorf("%s", table)
	}
	if len(here.Pings) != 1 || len(here.Pings[0].Trips) != 2 || here.Pings[0].Trips[0] <= 0 || here.Pings[0].Path == nil {
		t.Errorf("%+v", here)
	}
	if out := v.ok("mesh", "ping", v.ork.ID().String(), "--from", "app-node"); !strings.Contains(out, "direct, ") {
		t.Errorf("%s", out)
	}
	if out := v.refused(fault.Unreachable, "ping gone", "mesh", "ping", "worker"); !strings.Contains(out, "gone") {
		t.Errorf("%s", out)
	}
	for _, what := range []string{"ork", "wrk-ork", v.ork.ID().String()} {
		if out := v.ok("mesh", "find", what); !strings.Contains(out, v.ork.ID().String()) || !strings.Contains(out, "/tcp/") {
			t.Errorf("find %s: %s", what, out)
		}
	}
	stranger, err := identity.New(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	v.refused(fault.NotFound, "no bootstrap holds one", "mesh", "find", stranger.ID().String())
	if status, _, errOut := v.run("mesh", "ping", "ork", "--count", "100"); status != 2 || !strings.Contains(errOut, "1 to 20") {
		t.Errorf("status %d: %s", status, errOut)
	}
}

func TestAnOperatorSeesTheNetworkAroundADaemon(t *testing.T) {
	t.Parallel()
	v := newVillage(t)
	var c netcheck
	table := v.three(&c, "mesh", "netcheck", "--from", "wrk-ork")
	if len(c.Listen) != 2 || len(c.Announced) != 2 || c.UDP != "works" || c.NAT != "none" || len(c.Bootstraps) != 1 || c.Private {
		t.Fatalf("%+v", c)
	}
	b := c.Bootstraps[0]
	if b.Name != "boot" || !b.Answers || len(b.Addresses) != 2 || b.ClockAheadMS == nil || b.Addresses[0].RoundTripMS <= 0 || len(c.Observed) != 2 || c.Observed[0].Observer != "boot" {
		t.Errorf("%+v", c)
	}
	for _, want := range []string{"UDP", "works", "bootstrap boot", "its clock is the same", "seen by boot", "none wanted, this node is public"} {
		if !strings.Contains(table, want) {
			t.Errorf("%q is not in\n%s", want, table)
		}
	}
	if out := v.ok("mesh", "netcheck"); !strings.Contains(out, "bootstrap boot") {
		t.Errorf("from here: %s", out)
	}
}

func TestAnOperatorMeasuresTheSpeedBetweenDaemons(t *testing.T) {
	t.Parallel()
	v := newVillage(t)
	var r struct {
		Calls uint32
		P50   float64 `json:"calls_p50_ms"`
		Up    struct {
			Bytes uint64
			Speed float64 `json:"megabytes_per_second"`
		}
		Down struct{ Bytes uint64 }
		Path *path
	}
	table := v.three(&r, "mesh", "speedtest", "wrk-ork", "--from", "app-node", "--time", "1s", "--bytes", "1000000")
	if r.Calls == 0 || r.P50 <= 0 || r.Up.Bytes == 0 || r.Up.Bytes > 1000000 || r.Up.Speed <= 0 || r.Down.Bytes == 0 || r.Path == nil {
		t.Errorf("%+v", r)
	}
	if !strings.Contains(table, "MB/s") || !strings.Contains(table, "beside bulk from it") {
		t.Errorf("%s", table)
	}
	if status, _, errOut := v.run("mesh", "speedtest", "wrk-ork", "--time", "1h"); status != 2 || !strings.Contains(errOut, "1s to 10s") {
		t.Errorf("status %d: %s", status, errOut)
	}
	v.refused(fault.Invalid, "bytes", "mesh", "speedtest", "wrk-ork", "--bytes", "9999999999999")
}

// laterService is of a daemon that is newer than this cosmicac: its wire file is
// registered here, too, since all run in one process, but under a name where the
// commands do not look.
type laterService struct{ file protoreflect.FileDescriptor }

var later = func() *laterService {
	right := &descriptorpb.MethodOptions{}
	proto.SetExtension(right, meshv1.E_Right, &meshv1.Right{Members: true})
	closed := &descriptorpb.MethodOptions{}
	proto.SetExtension(closed, meshv1.E_Right, &meshv1.Right{Roles: []meshv1.Role{meshv1.Role_ROLE_MONITOR}})
	method := func(name string, options *descriptorpb.MethodOptions, streams bool) *descriptorpb.MethodDescriptorProto {
		return &descriptorpb.MethodDescriptorProto{Name: &name, InputType: proto.String(".later.v1.Note"), OutputType: proto.String(".later.v1.Note"),
			Options: options, ClientStreaming: &streams, ServerStreaming: &streams}
	}
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: proto.String("later/v1/later.proto"), Package: proto.String("later.v1"), Syntax: proto.String("proto3"), Dependency: []string{"cosmicac/mesh/v1/right.proto"},
		MessageType: []*descriptorpb.DescriptorProto{{Name: proto.String("Note"), Field: []*descriptorpb.FieldDescriptorProto{{
			Name: proto.String("text"), JsonName: proto.String("text"), Number: proto.Int32(1),
			Type: descriptorpb.FieldDescriptorProto_TYPE_STRING.Enum(), Label: descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum()}}}},
		Service: []*descriptorpb.ServiceDescriptorProto{{Name: proto.String("Later"), Method: []*descriptorpb.MethodDescriptorProto{
			method("Echo", right, false), method("Chat", right, true), method("Secret", closed, false)}}},
	}, protoregistry.GlobalFiles)
	if err == nil {
		err = protoregistry.GlobalFiles.RegisterFile(file)
	}
	if err != nil {
		panic(err)
	}
	return &laterService{file}
}()

func (l *laterService) note() *dynamicpb.Message {
	return dynamicpb.NewMessage(l.file.Messages().ByName("Note"))
}

func (l *laterService) desc() *grpc.ServiceDesc {
	echo := func(_ any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
		in := l.note()
		if err := decode(in); err != nil || interceptor == nil {
			return in, err
		}
		return interceptor(ctx, in, &grpc.UnaryServerInfo{FullMethod: "/later.v1.Later/Echo"}, func(_ context.Context, in any) (any, error) { return in, nil })
	}
	return &grpc.ServiceDesc{ServiceName: "later.v1.Later", HandlerType: (*any)(nil), Methods: []grpc.MethodDesc{{MethodName: "Echo", Handler: echo}, {MethodName: "Secret", Handler: echo}},
		Streams: []grpc.StreamDesc{{StreamName: "Chat", ClientStreams: true, ServerStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
			for {
				in := l.note()
				if err := s.RecvMsg(in); err == io.EOF {
					return nil
				} else if err != nil {
					return err
				}
				if err := s.SendMsg(in); err != nil {
					return err
				}
			}
		}}}}
}

func TestMethodsOfEveryShapeAreCalledByHand(t *testing.T) {
	t.Parallel()
	v := newVillage(t)
	var listed struct {
		Methods []struct{ Method, Streams, Callers string }
	}
	table := v.three(&listed, "rpc", "list", "app-node")
	if !strings.Contains(table, "cosmicac.mesh.v1.Node/TracePeer") || strings.Contains(table, "cosmicac.ork.v1") || strings.Contains(table, "later.v1") {
		t.Errorf("app-node serves\n%s", table)
	}
	for _, m := range listed.Methods {
		if m.Callers == "nobody" || m.Callers == "" || (m.Method == "cosmicac.mesh.v1.Node/StreamLogs") != (m.Streams == "answers") {
			t.Errorf("%+v", m)
		}
	}
	if out := v.ok("rpc", "call", "app-node", "cosmicac.mesh.v1.Node/Ping", `{"payload": "aGk="}`); !strings.Contains(out, "aGk=") {
		t.Errorf("unary: %s", out)
	}
	if out := v.ok("rpc", "call", "app-node", "cosmicac.mesh.v1.Node/StreamLogs", `{"tail": 5}`); strings.Contains(out, "error") {
		t.Errorf("a stream of answers: %s", out)
	}
	v.refused(fault.Timeout, "StreamLogs", "rpc", "call", "app-node", "cosmicac.mesh.v1.Node/StreamLogs", `{"follow": true}`, "--timeout", "4s")
	v.refused(fault.Invalid, "is not a cosmicac.mesh.v1.PingRequest in JSON", "rpc", "call", "app-node", "cosmicac.mesh.v1.Node/Ping", `{"pay`)
	v.refused(fault.Invalid, "takes one request", "rpc", "call", "app-node", "cosmicac.mesh.v1.Node/Ping", `{}{}`)
	v.refused(fault.Unsupported, "app-node does not serve cosmicac.ork.v1.Jobs/ListJobs", "rpc", "call", "app-node", "cosmicac.ork.v1.Jobs/ListJobs")
	v.refused(fault.Invalid, "this node itself", "rpc", "call", "app-node", "cosmicac.mesh.v1.Node/TracePeer", `{"key": "`+keyOf(v, "app-node")+`"}`)
}

func keyOf(v *village, name string) string {
	for _, m := range v.network.Roster().GetMembers() {
		if m.GetName() == name {
			return m.GetKey()
		}
	}
	return ""
}

func TestMethodsOfANewerDaemonAreCalledByItsOwnDescriptors(t *testing.T) {
	t.Parallel()
	v := newVillage(t)
	if out := v.ok("rpc", "list", "wrk-ork"); !strings.Contains(out, "later.v1.Later/Echo") || !strings.Contains(out, "both") {
		t.Errorf("%s", out)
	}
	if out := v.ok("rpc", "call", "wrk-ork", "later.v1.Later/Echo", `{"text": "hello"}`); !strings.Contains(out, "hello") {
		t.Errorf("%s", out)
	}
	if out := v.ok("rpc", "call", "wrk-ork", "later.v1.Later/Chat", `{"text": "one"} {"text": "two"}`); !strings.Contains(out, "one") || !strings.Contains(out, "two") {
		t.Errorf("%s", out)
	}
	v.refused(fault.Denied, "may not call it", "rpc", "call", "wrk-ork", "later.v1.Later/Secret")
	v.refused(fault.Invalid, "later.v1.Note", "rpc", "call", "wrk-ork", "later.v1.Later/Echo", `{"colour": "red"}`)
	v.refused(fault.NotFound, "neither this cosmicac nor app-node knows a method", "rpc", "call", "app-node", "later.v1.Later/Echo")
	v.refused(fault.Unsupported, "old is older than this cosmicac", "rpc", "call", "old", "later.v1.Later/Echo")
	v.refused(fault.Unsupported, "old does not serve cosmicac.mesh.v1.Node/GetInfo", "rpc", "call", "old", "cosmicac.mesh.v1.Node/GetInfo")
}
