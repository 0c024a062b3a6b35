package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"sort"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"

	// Their descriptors are what list and call read.
	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

func (e *environment) rpcCommand() *cobra.Command {
	c := &cobra.Command{Use: "rpc", Short: "Call a daemon's methods by hand, under the operator's rights", Args: cobra.NoArgs, RunE: helpOnly}
	var operator string
	list := &cobra.Command{
		Use: "list [MEMBER|KEY]", Short: "Methods and who may call them: of the whole wire, or what one daemon serves", Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return e.printMethods(wireMethods())
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 30*time.Second)
			defer cancel()
			return withOperator(ctx, operator, func(node *mesh.Node, _ string) error {
				p, name, err := onePeer(node.Network(), args[0])
				if err != nil {
					return err
				}
				methods, err := servedMethods(ctx, node.Client(p), name)
				if err != nil {
					return err
				}
				return e.printMethods(methods)
			})
		},
	}
	var timeout time.Duration
	call := &cobra.Command{
		Use:   "call MEMBER|KEY SERVICE/METHOD [JSON|-]",
		Short: "Call one method with protobuf JSON; streams print until they end",
		Long: "Call one method with a request in protobuf JSON, an empty one when it is left out, and print what comes back.\n" +
			"A method that takes a stream of requests gets every JSON value that is given, one after the other.\n" +
			"A method that this cosmicac does not know is looked up at the daemon, which may be newer.",
		Example: `  cosmicac rpc call wrk-ork cosmicac.ork.v1.Jobs/ListJobs '{"pageSize": 5}'`,
		Args:    cobra.RangeArgs(2, 3),
		RunE: func(cmd *cobra.Command, args []string) error {
			text := "{}"
			if len(args) == 3 {
				text = args[2]
			}
			if text == "-" {
				raw, err := io.ReadAll(io.LimitReader(e.in, 4<<20))
				if err != nil {
					return fault.Wrap(fault.Invalid, err, "read the request from standard input")
				}
				text = string(raw)
			}
			method := findMethod(wireMethods(), args[1])
			if method != nil { // a bad request is told without asking anybody
				if _, err := requests(method, text); err != nil {
					return err
				}
			}
			return withOperator(cmd.Context(), operator, func(node *mesh.Node, _ string) error {
				ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
				defer cancel()
				p, name, err := onePeer(node.Network(), args[0])
				if err != nil {
					return err
				}
				if method == nil {
					served, err := servedMethods(ctx, node.Client(p), name)
					if err != nil {
						return fault.Wrap(fault.KindOf(err), err, "no method of the wire is called %q", args[1])
					}
					if method = findMethod(served, args[1]); method == nil {
						return fault.New(fault.NotFound, "neither this cosmicac nor %s knows a method %q; cosmicac rpc list %s shows what it serves", name, args[1], name)
					}
				}
				list, err := requests(method, text)
				if err != nil {
					return err
				}
				err = e.invoke(ctx, node.Client(p), method, list)
				if fault.Is(err, fault.Unsupported) {
					if served, failed := servedMethods(ctx, node.Client(p), name); failed == nil && findMethod(served, args[1]) != nil {
						return err // the method itself says so
					}
					return fault.Wrap(fault.Unsupported, err, "%s does not serve %s, it is another kind of daemon or of another version; cosmicac rpc list %s shows what it serves", name, args[1], name)
				}
				return err
			})
		},
	}
	c.PersistentFlags().StringVar(&operator, "operator", "", "operator folder (default: COSMICAC_OPERATOR_DIR, /etc/cosmicac/operator)")
	call.Flags().DurationVar(&timeout, "timeout", 30*time.Second, "give up after this long")
	c.AddCommand(list, call)
	return c
}

// invoke makes one call of any shape and prints each answer.
func (e *environment) invoke(ctx context.Context, c grpc.ClientConnInterface, m protoreflect.MethodDescriptor, list []proto.Message) error {
	path := "/" + methodName(m)
	if !m.IsStreamingClient() && !m.IsStreamingServer() {
		out := newMessage(m.Output())
		if err := c.Invoke(ctx, path, list[0], out); err != nil {
			return err
		}
		return e.printAnswer(out)
	}
	s, err := c.NewStream(ctx, &grpc.StreamDesc{ServerStreams: m.IsStreamingServer(), ClientStreams: m.IsStreamingClient()}, path)
	if err != nil {
		return err
	}
	for _, in := range list {
		if err := s.SendMsg(in); err != nil && err != io.EOF { // at EOF the answer says why
			return err
		}
	}
	if err := s.CloseSend(); err != nil {
		return err
	}
	for {
		out := newMessage(m.Output())
		err := s.RecvMsg(out)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := e.printAnswer(out); err != nil {
			return err
		}
	}
}

func (e *environment) printAnswer(out proto.Message) error {
	_, err := fmt.Fprintln(e.out, protojson.Format(out))
	return err
}

// requests are the messages in a text of JSON values: one, unless the method takes
// a stream of them.
func requests(m protoreflect.MethodDescriptor, text string) ([]proto.Message, error) {
	var list []proto.Message
	values := json.NewDecoder(bytes.NewBufferString(text))
	for {
		var raw json.RawMessage
		err := values.Decode(&raw)
		if err == io.EOF {
			break
		}
		in := newMessage(m.Input())
		if err == nil {
			err = protojson.Unmarshal(raw, in)
		}
		if err != nil {
			return nil, fault.Wrap(fault.Invalid, err, "the request is not a %s in JSON", m.Input().FullName())
		}
		list = append(list, in)
	}
	if len(list) != 1 && !m.IsStreamingClient() {
		return nil, fault.New(fault.Invalid, "%s takes one request, not %d", m.Name(), len(list))
	}
	return list, nil
}

// newMessage is a message of the linked type, or of the descriptor alone.
func newMessage(d protoreflect.MessageDescriptor) proto.Message {
	if t, err := protoregistry.GlobalTypes.FindMessageByName(d.FullName()); err == nil && t.Descriptor() == d {
		return t.New().Interface()
	}
	return dynamicpb.NewMessage(d)
}

// wireMethods are the methods that this cosmicac knows.
func wireMethods() []protoreflect.MethodDescriptor {
	var list []protoreflect.MethodDescriptor
	protoregistry.GlobalFiles.RangeFiles(func(file protoreflect.FileDescriptor) bool {
		if strings.HasPrefix(string(file.Package()), "cosmicac.") {
			for i := range file.Services().Len() {
				list = append(list, methodsOf(file.Services().Get(i))...)
			}
		}
		return true
	})
	return list
}

func methodsOf(s protoreflect.ServiceDescriptor) []protoreflect.MethodDescriptor {
	list := make([]protoreflect.MethodDescriptor, s.Methods().Len())
	for i := range list {
		list[i] = s.Methods().Get(i)
	}
	return list
}

// servedMethods asks a daemon what it serves, by its own descriptors.
func servedMethods(ctx context.Context, c grpc.ClientConnInterface, name string) ([]protoreflect.MethodDescriptor, error) {
	answer, err := meshv1.NewNodeClient(c).ListServices(ctx, &meshv1.ListServicesRequest{})
	if fault.Is(err, fault.Unsupported) {
		return nil, fault.Wrap(fault.Unsupported, err, "%s is older than this cosmicac and cannot say what it serves; cosmicac rpc list shows the whole wire", name)
	}
	if err != nil {
		return nil, err
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(answer.GetFileDescriptorSet(), &set); err != nil {
		return nil, fault.Wrap(fault.Internal, err, "read the descriptors of %s", name)
	}
	files, err := protodesc.NewFiles(&set)
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "read the descriptors of %s", name)
	}
	var list []protoreflect.MethodDescriptor
	for _, service := range answer.GetServices() {
		d, err := files.FindDescriptorByName(protoreflect.FullName(service))
		if err != nil {
			return nil, fault.Wrap(fault.Internal, err, "read the descriptors of %s", name)
		}
		if s, ok := d.(protoreflect.ServiceDescriptor); ok {
			list = append(list, methodsOf(s)...)
		}
	}
	return list, nil
}

func methodName(m protoreflect.MethodDescriptor) string {
	return string(m.Parent().FullName()) + "/" + string(m.Name())
}

func findMethod(list []protoreflect.MethodDescriptor, name string) protoreflect.MethodDescriptor {
	for _, m := range list {
		if methodName(m) == strings.TrimPrefix(name, "/") {
			return m
		}
	}
	return nil
}

func (e *environment) printMethods(list []protoreflect.MethodDescriptor) error {
	type row struct {
		Method  string `json:"method"`
		Streams string `json:"streams"`
		Callers string `json:"callers"`
	}
	rows := make([]row, 0, len(list))
	for _, m := range list {
		streams := ""
		switch {
		case m.IsStreamingClient() && m.IsStreamingServer():
			streams = "both"
		case m.IsStreamingClient():
			streams = "requests"
		case m.IsStreamingServer():
			streams = "answers"
		}
		rows = append(rows, row{methodName(m), streams, rightText(rightOf(m))})
	}
	sort.Slice(rows, func(i, j int) bool { return rows[i].Method < rows[j].Method })
	return e.print(map[string]any{"methods": rows}, func(t *tableWriter) {
		t.row("METHOD", "STREAMS", "CALLERS")
		for _, r := range rows {
			t.row(r.Method, orDash(r.Streams), r.Callers)
		}
	})
}

// rightOf reads a method's right, also of a daemon's own descriptors.
func rightOf(m protoreflect.MethodDescriptor) *meshv1.Right {
	if options, ok := m.Options().(*descriptorpb.MethodOptions); ok && proto.HasExtension(options, meshv1.E_Right) {
		right, _ := proto.GetExtension(options, meshv1.E_Right).(*meshv1.Right)
		return right
	}
	return nil
}

func rightText(r *meshv1.Right) string {
	if r == nil {
		return "nobody"
	}
	var parts []string
	for _, role := range r.GetRoles() {
		parts = append(parts, roleText(role))
	}
	for _, p := range []struct {
		set  bool
		name string
	}{{r.GetMembers(), "every member"}, {r.GetAgents(), "agents"}, {r.GetJoining(), "joining agents"}, {r.GetClients(), "clients with a grant"}, {r.GetGuests(), "guests"}} {
		if p.set {
			parts = append(parts, p.name)
		}
	}
	return strings.Join(parts, ", ")
}
