package mesh_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	gt "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// gRPC's interoperability cases, on both channels and both transports. Whoever
// holds a stub must not be able to tell which one a call took.

// testService behaves as gRPC's description of its test server says.
type testService struct {
	gt.UnimplementedTestServiceServer
	canceled chan error // why a sleeping call ended
}

const (
	echoInitial  = "x-grpc-test-echo-initial"
	echoTrailing = "x-grpc-test-echo-trailing-bin"
)

func echoMetadata(ctx context.Context) (header, trailer metadata.MD) {
	in, _ := metadata.FromIncomingContext(ctx)
	header, trailer = metadata.MD{}, metadata.MD{}
	for _, v := range in.Get(echoInitial) {
		header.Append(echoInitial, v)
	}
	for _, v := range in.Get(echoTrailing) {
		trailer.Append(echoTrailing, v)
	}
	return header, trailer
}

func statusOf(s *gt.EchoStatus) error {
	if s.GetCode() == 0 {
		return nil
	}
	return status.Error(codes.Code(s.GetCode()), s.GetMessage())
}

func (s *testService) EmptyCall(context.Context, *gt.Empty) (*gt.Empty, error) {
	return &gt.Empty{}, nil
}

func (s *testService) UnaryCall(ctx context.Context, r *gt.SimpleRequest) (*gt.SimpleResponse, error) {
	header, trailer := echoMetadata(ctx)
	if err := grpc.SetHeader(ctx, header); err != nil {
		return nil, err
	}
	if err := grpc.SetTrailer(ctx, trailer); err != nil {
		return nil, err
	}
	if err := statusOf(r.GetResponseStatus()); err != nil {
		return nil, err
	}
	if r.GetFillUsername() { // here: sleep until the caller goes
		<-ctx.Done()
		s.canceled <- ctx.Err()
		return nil, ctx.Err()
	}
	return &gt.SimpleResponse{Payload: &gt.Payload{Body: make([]byte, r.GetResponseSize())}}, nil
}

func (s *testService) StreamingInputCall(stream gt.TestService_StreamingInputCallServer) error {
	sum := 0
	for {
		m, err := stream.Recv()
		if err == io.EOF {
			return stream.SendAndClose(&gt.StreamingInputCallResponse{AggregatedPayloadSize: int32(sum)})
		}
		if err != nil {
			s.canceled <- err
			return err
		}
		sum += len(m.GetPayload().GetBody())
	}
}

func (s *testService) StreamingOutputCall(r *gt.StreamingOutputCallRequest, stream gt.TestService_StreamingOutputCallServer) error {
	for _, p := range r.GetResponseParameters() {
		if err := stream.Send(&gt.StreamingOutputCallResponse{Payload: &gt.Payload{Body: make([]byte, p.GetSize())}}); err != nil {
			return err
		}
	}
	return nil
}

func (s *testService) FullDuplexCall(stream gt.TestService_FullDuplexCallServer) error {
	header, trailer := echoMetadata(stream.Context())
	if err := stream.SetHeader(header); err != nil {
		return err
	}
	stream.SetTrailer(trailer)
	for {
		m, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			s.canceled <- err
			return err
		}
		if err := statusOf(m.GetResponseStatus()); err != nil {
			return err
		}
		for _, p := range m.GetResponseParameters() {
			if err := stream.Send(&gt.StreamingOutputCallResponse{Payload: &gt.Payload{Body: make([]byte, p.GetSize())}}); err != nil {
				return err
			}
		}
	}
}

// onEveryChannel runs a case with a stub of each kind.
func onEveryChannel(t *testing.T, f func(t *testing.T, stub gt.TestServiceClient, cc grpc.ClientConnInterface, s *testService)) {
	t.Parallel()
	for transport, listen := range transports {
		for _, channel := range []string{"calls", "grpc"} {
			t.Run(channel+" over "+transport, func(t *testing.T) {
				t.Parallel()
				l := newLab(t)
				service := &testService{canceled: make(chan error, 16)}
				anyone := func(string) *meshv1.Right { return &meshv1.Right{Members: true} }
				server := l.start(l.app, func(o *mesh.Options) { o.Listen = listen }, func(s *spot) {
					s.SetRightOf(anyone)
					gt.RegisterTestServiceServer(s, service)
				})
				client := l.start(l.ork, func(o *mesh.Options) { o.Listen, o.GRPCOnly = listen, channel == "grpc" })
				cc := client.Client(server.ID(), server.Addresses()...)
				f(t, gt.NewTestServiceClient(cc), cc, service)
			})
		}
	}
}

func TestInteropEmptyCall(t *testing.T) {
	onEveryChannel(t, func(t *testing.T, stub gt.TestServiceClient, _ grpc.ClientConnInterface, _ *testService) {
		if _, err := stub.EmptyCall(within(t), &gt.Empty{}); err != nil {
			t.Fatal(err)
		}
	})
}

// The request above the bound of the stream of calls, and answers in one frame, in
// many, and above what may cross.
func TestInteropLargeCalls(t *testing.T) {
	onEveryChannel(t, func(t *testing.T, stub gt.TestServiceClient, _ grpc.ClientConnInterface, _ *testService) {
		for _, c := range []struct{ request, answer int }{{271828, 314159}, {100, 64 << 10}, {100, 65<<10 + 1}, {64 << 10, 3 << 20}, {60 << 10, 100}} {
			answer, err := stub.UnaryCall(within(t), &gt.SimpleRequest{ResponseSize: int32(c.answer), Payload: &gt.Payload{Body: make([]byte, c.request)}})
			if err != nil {
				t.Fatalf("%d bytes there, %d back: %v", c.request, c.answer, err)
			}
			if got := len(answer.GetPayload().GetBody()); got != c.answer {
				t.Errorf("%d bytes there: %d bytes back, want %d", c.request, got, c.answer)
			}
		}
		_, err := stub.UnaryCall(within(t), &gt.SimpleRequest{ResponseSize: 5 << 20})
		if kind := fault.KindOf(err); kind != fault.TooLarge && kind != fault.Exhausted {
			t.Errorf("an answer of 5 MiB ended as %q: %v", kind, err)
		}
	})
}

func TestInteropClientStreaming(t *testing.T) {
	onEveryChannel(t, func(t *testing.T, stub gt.TestServiceClient, _ grpc.ClientConnInterface, _ *testService) {
		stream, err := stub.StreamingInputCall(within(t))
		if err != nil {
			t.Fatal(err)
		}
		for _, size := range []int{27182, 8, 1828, 45904} {
			if err := stream.Send(&gt.StreamingInputCallRequest{Payload: &gt.Payload{Body: make([]byte, size)}}); err != nil {
				t.Fatal(err)
			}
		}
		answer, err := stream.CloseAndRecv()
		if err != nil || answer.GetAggregatedPayloadSize() != 74922 {
			t.Fatalf("got %v, %v", answer, err)
		}
	})
}

func TestInteropServerStreaming(t *testing.T) {
	onEveryChannel(t, func(t *testing.T, stub gt.TestServiceClient, _ grpc.ClientConnInterface, _ *testService) {
		request := &gt.StreamingOutputCallRequest{}
		sizes := []int32{31415, 9, 2653, 58979}
		for _, size := range sizes {
			request.ResponseParameters = append(request.ResponseParameters, &gt.ResponseParameters{Size: size})
		}
		stream, err := stub.StreamingOutputCall(within(t), request)
		if err != nil {
			t.Fatal(err)
		}
		for _, size := range sizes {
			m, err := stream.Recv()
			if err != nil || len(m.GetPayload().GetBody()) != int(size) {
				t.Fatalf("got %d bytes, %v, want %d", len(m.GetPayload().GetBody()), err, size)
			}
		}
		if _, err := stream.Recv(); err != io.EOF {
			t.Fatalf("after the last: %v", err)
		}
	})
}

func TestInteropPingPongAndEmptyStream(t *testing.T) {
	onEveryChannel(t, func(t *testing.T, stub gt.TestServiceClient, _ grpc.ClientConnInterface, _ *testService) {
		stream, err := stub.FullDuplexCall(within(t))
		if err != nil {
			t.Fatal(err)
		}
		for _, size := range []int32{31415, 9, 2653, 58979} {
			if err := stream.Send(&gt.StreamingOutputCallRequest{ResponseParameters: []*gt.ResponseParameters{{Size: size}}}); err != nil {
				t.Fatal(err)
			}
			m, err := stream.Recv()
			if err != nil || len(m.GetPayload().GetBody()) != int(size) {
				t.Fatalf("got %d bytes, %v, want %d", len(m.GetPayload().GetBody()), err, size)
			}
		}
		if err := stream.CloseSend(); err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); err != io.EOF {
			t.Fatalf("after the last: %v", err)
		}
		empty, err := stub.FullDuplexCall(within(t))
		if err != nil {
			t.Fatal(err)
		}
		if err := empty.CloseSend(); err != nil {
			t.Fatal(err)
		}
		if _, err := empty.Recv(); err != io.EOF {
			t.Fatalf("of an empty stream: %v", err)
		}
	})
}

func TestInteropTimeoutOnASleepingServer(t *testing.T) {
	onEveryChannel(t, func(t *testing.T, stub gt.TestServiceClient, _ grpc.ClientConnInterface, s *testService) {
		if _, err := stub.EmptyCall(within(t), &gt.Empty{}); err != nil { // connected
			t.Fatal(err)
		}
		// The deadline travels: the handler ends by itself. On a busy machine it may
		// pass before the call is sent, so it grows.
		for deadline := 50 * time.Millisecond; ; deadline *= 2 {
			if deadline > patience {
				t.Fatal("no handler has seen its deadline")
			}
			ctx, cancel := context.WithTimeout(context.Background(), deadline)
			_, err := stub.UnaryCall(ctx, &gt.SimpleRequest{FillUsername: true})
			cancel()
			wantKind(t, err, fault.Timeout)
			select {
			case err := <-s.canceled:
				if err != context.DeadlineExceeded && err != context.Canceled {
					t.Errorf("the handler ended with %v", err)
				}
				return
			case <-time.After(deadline):
			}
		}
	})
}

func TestInteropCancelAfterBegin(t *testing.T) {
	onEveryChannel(t, func(t *testing.T, stub gt.TestServiceClient, _ grpc.ClientConnInterface, s *testService) {
		ctx, cancel := context.WithCancel(within(t))
		time.AfterFunc(30*time.Millisecond, cancel)
		_, err := stub.UnaryCall(ctx, &gt.SimpleRequest{FillUsername: true})
		wantKind(t, err, fault.Canceled)
		if _, err := stub.EmptyCall(within(t), &gt.Empty{}); err != nil {
			t.Fatalf("the next call: %v", err)
		}
		ctx, cancel = context.WithCancel(within(t))
		stream, err := stub.StreamingInputCall(ctx)
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		_, err = stream.CloseAndRecv()
		wantKind(t, err, fault.Canceled)
	})
}

func TestInteropCancelReachesTheHandler(t *testing.T) {
	onEveryChannel(t, func(t *testing.T, stub gt.TestServiceClient, _ grpc.ClientConnInterface, s *testService) {
		if _, err := stub.EmptyCall(within(t), &gt.Empty{}); err != nil { // connected
			t.Fatal(err)
		}
		for pause := 30 * time.Millisecond; ; pause *= 2 {
			if pause > patience {
				t.Fatal("no handler was told")
			}
			ctx, cancel := context.WithCancel(within(t))
			time.AfterFunc(pause, cancel)
			_, err := stub.UnaryCall(ctx, &gt.SimpleRequest{FillUsername: true})
			wantKind(t, err, fault.Canceled)
			select {
			case err := <-s.canceled:
				if err != context.Canceled {
					t.Errorf("the handler ended with %v", err)
				}
				return
			case <-time.After(pause):
			}
		}
	})
}

func TestInteropCancelAfterFirstResponse(t *testing.T) {
	onEveryChannel(t, func(t *testing.T, stub gt.TestServiceClient, _ grpc.ClientConnInterface, _ *testService) {
		ctx, cancel := context.WithCancel(within(t))
		defer cancel()
		stream, err := stub.FullDuplexCall(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(&gt.StreamingOutputCallRequest{ResponseParameters: []*gt.ResponseParameters{{Size: 31415}}}); err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); err != nil {
			t.Fatal(err)
		}
		cancel()
		_, err = stream.Recv()
		wantKind(t, err, fault.Canceled)
	})
}

func TestInteropCustomMetadata(t *testing.T) {
	onEveryChannel(t, func(t *testing.T, stub gt.TestServiceClient, _ grpc.ClientConnInterface, _ *testService) {
		binary := string([]byte{0xab, 0xab, 0x00, 0xab})
		ctx := metadata.AppendToOutgoingContext(within(t), echoInitial, "test_initial_metadata_value", echoTrailing, binary)
		var header, trailer metadata.MD
		check := func() {
			t.Helper()
			if got := header.Get(echoInitial); len(got) != 1 || got[0] != "test_initial_metadata_value" {
				t.Errorf("header %q", got)
			}
			if got := trailer.Get(echoTrailing); len(got) != 1 || !bytes.Equal([]byte(got[0]), []byte(binary)) {
				t.Errorf("trailer %q", got)
			}
		}
		if _, err := stub.UnaryCall(ctx, &gt.SimpleRequest{ResponseSize: 1}, grpc.Header(&header), grpc.Trailer(&trailer)); err != nil {
			t.Fatal(err)
		}
		check()
		header, trailer = nil, nil
		_, err := stub.UnaryCall(ctx, &gt.SimpleRequest{ResponseStatus: &gt.EchoStatus{Code: int32(codes.NotFound), Message: "gone"}}, grpc.Header(&header), grpc.Trailer(&trailer))
		wantKind(t, err, fault.NotFound, "gone")
		check()

		stream, err := stub.FullDuplexCall(ctx)
		if err == nil {
			err = stream.CloseSend()
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err = stream.Recv(); err != io.EOF {
			t.Fatal(err)
		}
		header, err = stream.Header()
		if err != nil {
			t.Fatal(err)
		}
		trailer = stream.Trailer()
		check()
	})
}

// Every gRPC code comes back as the kind that stands for it, alike on both channels.
func TestInteropStatusCodeAndMessage(t *testing.T) {
	onEveryChannel(t, func(t *testing.T, stub gt.TestServiceClient, _ grpc.ClientConnInterface, _ *testService) {
		want := map[codes.Code]fault.Kind{
			codes.InvalidArgument: fault.Invalid, codes.NotFound: fault.NotFound, codes.PermissionDenied: fault.Denied,
			codes.FailedPrecondition: fault.FailedPrecondition, codes.ResourceExhausted: fault.Exhausted, codes.Unimplemented: fault.Unsupported,
			codes.DeadlineExceeded: fault.Timeout, codes.Canceled: fault.Canceled, codes.Internal: fault.Internal, codes.Unknown: fault.Internal,
		}
		for code, kind := range want {
			s := &gt.EchoStatus{Code: int32(code), Message: "test status message"}
			_, err := stub.UnaryCall(within(t), &gt.SimpleRequest{ResponseStatus: s})
			wantKind(t, err, kind)
			stream, err := stub.FullDuplexCall(within(t))
			if err != nil {
				t.Fatal(err)
			}
			if err := stream.Send(&gt.StreamingOutputCallRequest{ResponseStatus: s}); err != nil {
				t.Fatal(err)
			}
			_, err = stream.Recv()
			wantKind(t, err, kind)
		}
	})
}

func TestInteropSpecialStatusMessage(t *testing.T) {
	onEveryChannel(t, func(t *testing.T, stub gt.TestServiceClient, _ grpc.ClientConnInterface, _ *testService) {
		message := "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"
		_, err := stub.UnaryCall(within(t), &gt.SimpleRequest{ResponseStatus: &gt.EchoStatus{Code: int32(codes.NotFound), Message: message}})
		wantKind(t, err, fault.NotFound, message)
	})
}

func TestInteropUnimplementedMethodAndService(t *testing.T) {
	onEveryChannel(t, func(t *testing.T, _ gt.TestServiceClient, cc grpc.ClientConnInterface, _ *testService) {
		for _, method := range []string{"/grpc.testing.TestService/NoSuchMethod", "/grpc.testing.NoSuchService/EmptyCall", "nonsense"} {
			err := cc.Invoke(within(t), method, &gt.Empty{}, &gt.Empty{})
			if kind := fault.KindOf(err); kind != fault.Unsupported && !(method == "nonsense" && kind == fault.Internal) {
				t.Errorf("%s ended as %q: %v", method, kind, err)
			}
		}
		_, err := gt.NewTestServiceClient(cc).UnimplementedCall(within(t), &gt.Empty{})
		wantKind(t, err, fault.Unsupported)
	})
}

// Calls that wait never hold up others: 600 sleep, more than the stream takes at a
// time would without a bound of its own, and each ends once.
func TestInteropManyCallsAtATime(t *testing.T) {
	onEveryChannel(t, func(t *testing.T, stub gt.TestServiceClient, _ grpc.ClientConnInterface, _ *testService) {
		const callers = 1500
		results := make(chan error, callers)
		for i := range callers {
			go func() {
				size := int32(i % 3000)
				answer, err := stub.UnaryCall(within(t), &gt.SimpleRequest{ResponseSize: size})
				if err == nil && len(answer.GetPayload().GetBody()) != int(size) {
					err = fmt.Errorf("call %d got the answer of another: %d bytes, want %d", i, len(answer.GetPayload().GetBody()), size)
				}
				results <- err
			}()
		}
		for range callers {
			if err := <-results; err != nil {
				t.Fatal(err)
			}
		}
	})
}
