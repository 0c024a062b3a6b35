package rpc_test

import (
	"context"
	"fmt"
	"net"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/mesh/rpc"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

type echo struct{ meshv1.UnimplementedNodeServer }

func (echo) Ping(_ context.Context, r *meshv1.PingRequest) (*meshv1.PingResponse, error) {
	return &meshv1.PingResponse{Payload: r.GetPayload()}, nil
}

func allow(ctx context.Context, _ net.Addr, _ string) (context.Context, error) { return ctx, nil }

// BenchmarkUnary compares the two channels over one plain TCP connection.
func BenchmarkUnary(b *testing.B) {
	for _, channel := range []string{"calls", "grpc"} {
		for _, callers := range []int{1, 16, 128} {
			b.Run(fmt.Sprintf("%s/%d", channel, callers), func(b *testing.B) {
				s := rpc.NewServer(rpc.ServerOptions{Authorize: allow})
				defer s.Close()
				meshv1.RegisterNodeServer(s, echo{})
				l, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					b.Fatal(err)
				}
				defer l.Close()
				go func() {
					for {
						c, err := l.Accept()
						if err != nil {
							return
						}
						if channel == "calls" {
							go s.ServeCalls(c)
						} else {
							_ = s.Serve(c)
						}
					}
				}()
				dial := func(context.Context) (net.Conn, error) { return net.Dial("tcp", l.Addr().String()) }
				fast := rpc.Open(dial)
				if channel == "grpc" {
					fast = nil
				}
				c := rpc.NewClient("peer", dial, fast)
				defer c.Close()
				stub := meshv1.NewNodeClient(c)
				payload := make([]byte, 128)
				b.ReportAllocs()
				b.SetParallelism(max(1, callers/runtime.GOMAXPROCS(0)))
				before := cpuTime()
				defer func() { b.ReportMetric(float64((cpuTime()-before).Microseconds())/float64(b.N), "cpu-us/op") }()
				if callers == 1 {
					for b.Loop() {
						if _, err := stub.Ping(context.Background(), &meshv1.PingRequest{Payload: payload}); err != nil {
							b.Fatal(err)
						}
					}
					return
				}
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						if _, err := stub.Ping(context.Background(), &meshv1.PingRequest{Payload: payload}); err != nil {
							b.Error(err)
							return
						}
					}
				})
			})
		}
	}
}

// cpuTime is what this process has used; it does not grow while others run.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
