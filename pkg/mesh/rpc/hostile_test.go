package rpc

import (
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// A peer may answer what it was never asked, what it has answered before, and in
// pieces without an end: no other call takes that for its own.
func TestAnswersThatNobodyWaitsForReachNobody(t *testing.T) {
	t.Parallel()
	near, far := net.Pipe()
	c := NewClient("the-peer", nil, func(context.Context) (net.Conn, error) { return near, nil })
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	const calls = 50
	answering := make(chan error, 1)
	go func() {
		in := newInlet(far)
		var before uint64
		for range calls {
			var f frame
			if err := in.readFrame(&f); err != nil {
				answering <- err
				return
			}
			id := f.id
			lie, err := proto.Marshal(&meshv1.PingResponse{Payload: []byte("another's")})
			if err != nil {
				answering <- err
				return
			}
			answer, err := proto.Marshal(&meshv1.PingResponse{Payload: []byte(fmt.Sprint(id))})
			if err != nil {
				answering <- err
				return
			}
			var out []byte
			// Its place before and after it, places that no call ever had, and the largest.
			for _, other := range []uint64{before, id + callsPerStream, id + 1, id + callsPerStream - 1, 1, 1<<64 - 1} {
				if other != 0 {
					piece := beginFrame(nil, kindAnswer, other)
					out = append(out, endFrame(append(append(piece, flagMore), lie...), 0)...)
					out = append(out, answerFrame(other, lie)...)
				}
			}
			out = append(out, answerFrame(id, answer)...)
			out = append(out, answerFrame(id, lie)...) // twice
			before = id
			f.free()
			if _, err := far.Write(out); err != nil {
				answering <- err
				return
			}
		}
		answering <- nil
	}()
	seen := make(map[string]bool)
	for range calls {
		var reply meshv1.PingResponse
		if err := c.Invoke(ctx, meshv1.Node_Ping_FullMethodName, &meshv1.PingRequest{}, &reply); err != nil {
			t.Fatal(err)
		}
		seen[string(reply.GetPayload())] = true
	}
	if seen["another's"] || len(seen) != calls {
		t.Errorf("%d calls got %d answers of their own: %v", calls, len(seen), seen)
	}
	if err := <-answering; err != nil {
		t.Error(err)
	}
}
