package cli

import (
	"context"
	"fmt"
	"io"
	"sort"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/mesh/rpc"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"

	// Their descriptors are what list and call read.
	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	_ "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

func (e *environment) rpcCommand() *cobra.Command {
	c := &cobra.Command{Use: "rpc", Short: "Call a daemon's methods by hand, under the operator's rights", Args: cobra.NoArgs, RunE: helpOnly}
	list := &cobra.Command{
		Use: "list", Short: "Every method of the wire and who may call it", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			type row struct {
				Method  string `json:"method"`
				Callers string `json:"callers"`
			}
			var rows []row
			eachMethod(func(m protoreflect.MethodDescriptor) {
				path := string(m.Parent().FullName()) + "/" + string(m.Name())
				rows = append(rows, row{path, rightText(rpc.RightOf("/" + path))})
			})
			sort.Slice(rows, func(i, j int) bool { return rows[i].Method < rows[j].Method })
			return e.print(map[string]any{"methods": rows}, func(t *tableWriter) {
				t.row("METHOD", "CALLERS")
				for _, r := range rows {
					t.row(r.Method, r.Callers)
				}
			})
		},
	}
	var operator string
	var timeout time.Duration
	call := &cobra.Command{
		Use:     "call MEMBER SERVICE/METHOD [JSON|-]",
		Short:   "Call one method with a protobuf JSON request; server streams print until they end",
		Example: `  cosmicac rpc call wrk-ork cosmicac.ork.v1.Jobs/ListJobs '{"pageSize": 5}'`,
		Args:    cobra.RangeArgs(2, 3),
		RunE: func(cmd *cobra.Command, args []string) error {
			m, err := findMethod(args[1])
			if err != nil {
				return err
			}
			in, out, err := messagesOf(m)
			if err != nil {
				return err
			}
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
			if err := protojson.Unmarshal([]byte(text), in); err != nil {
				return fault.Wrap(fault.Invalid, err, "the request is not a %s in JSON", m.Input().FullName())
			}
			return withOperator(cmd.Context(), operator, func(node *mesh.Node, _ string) error {
				members, err := findDaemons(node.Network(), args[0])
				if err != nil {
					return err
				}
				p, err := peerOf(members[0])
				if err != nil {
					return err
				}
				ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
				defer cancel()
				path := "/" + string(m.Parent().FullName()) + "/" + string(m.Name())
				if m.IsStreamingClient() {
					return fault.New(fault.Unsupported, "%s takes a stream of requests; rpc call sends one", args[1])
				}
				if !m.IsStreamingServer() {
					if err := node.Client(p).Invoke(ctx, path, in, out); err != nil {
						return err
					}
					fmt.Fprintln(e.out, protojson.Format(out))
					return nil
				}
				s, err := node.Client(p).NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, path)
				if err != nil {
					return err
				}
				if err := s.SendMsg(in); err != nil {
					return err
				}
				if err := s.CloseSend(); err != nil {
					return err
				}
				for {
					next := proto.Clone(out)
					err := s.RecvMsg(next)
					if err == io.EOF {
						return nil
					}
					if err != nil {
						return err
					}
					fmt.Fprintln(e.out, protojson.Format(next))
				}
			})
		},
	}
	call.Flags().StringVar(&operator, "operator", "", "operator folder (default: COSMICAC_OPERATOR_DIR, /etc/cosmicac/operator)")
	call.Flags().DurationVar(&timeout, "timeout", 30*time.Second, "give up after this long")
	c.AddCommand(list, call)
	return c
}

func eachMethod(f func(protoreflect.MethodDescriptor)) {
	protoregistry.GlobalFiles.RangeFiles(func(file protoreflect.FileDescriptor) bool {
		if !strings.HasPrefix(string(file.Package()), "cosmicac.") {
			return true
		}
		for i := 0; i < file.Services().Len(); i++ {
			methods := file.Services().Get(i).Methods()
			for j := 0; j < methods.Len(); j++ {
				f(methods.Get(j))
			}
		}
		return true
	})
}

func findMethod(name string) (protoreflect.MethodDescriptor, error) {
	var found protoreflect.MethodDescriptor
	eachMethod(func(m protoreflect.MethodDescriptor) {
		if string(m.Parent().FullName())+"/"+string(m.Name()) == strings.TrimPrefix(name, "/") {
			found = m
		}
	})
	if found == nil {
		return nil, fault.New(fault.NotFound, "no method is called %q; cosmicac rpc list shows them all", name)
	}
	return found, nil
}

func messagesOf(m protoreflect.MethodDescriptor) (in, out proto.Message, err error) {
	i, err := protoregistry.GlobalTypes.FindMessageByName(m.Input().FullName())
	if err != nil {
		return nil, nil, err
	}
	o, err := protoregistry.GlobalTypes.FindMessageByName(m.Output().FullName())
	if err != nil {
		return nil, nil, err
	}
	return i.New().Interface(), o.New().Interface(), nil
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
