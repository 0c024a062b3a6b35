package rpc

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"testing"
	"testing/iotest"
	"time"

	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"google.golang.org/protobuf/proto"
)

func answerFrame(id uint64, body []byte) []byte {
	return endFrame(append(append(beginFrame(nil, kindAnswer, id), 0), body...), 0)
}

func TestFramesReadTheSameInWhatPiecesTheyCome(t *testing.T) {
	t.Parallel()
	sizes := []int{0, 1, 100, smallRead - 20, 30_000, largeRead, pieceBytes, 7}
	for range 200 {
		sizes = append(sizes, 150)
	}
	var sent []byte
	for i, size := range sizes {
		sent = append(sent, answerFrame(uint64(i+1), bytes.Repeat([]byte{byte(i)}, size))...)
	}
	pieces := map[string]func(io.Reader) io.Reader{
		"as much as fits":   func(r io.Reader) io.Reader { return r },
		"half of it":        iotest.HalfReader,
		"byte by byte":      iotest.OneByteReader,
		"the end with data": iotest.DataErrReader,
	}
	for name, cut := range pieces {
		quiet := answerFrame(uint64(len(sizes)), bytes.Repeat([]byte{byte(len(sizes) - 1)}, sizes[len(sizes)-1]))
		in := newInlet(cut(io.MultiReader(bytes.NewReader(sent[:len(sent)-len(quiet)]), bytes.NewReader(quiet))))
		for i, size := range sizes {
			var f frame
			if err := in.readFrame(&f); err != nil {
				t.Fatalf("%s: frame %d: %v", name, i, err)
			}
			if f.id != uint64(i+1) || !bytes.Equal(f.body, bytes.Repeat([]byte{byte(i)}, size)) {
				t.Fatalf("%s: frame %d came as %d with %d bytes, want %d", name, i, f.id, len(f.body), size)
			}
			f.free()
		}
		if err := in.readFrame(new(frame)); err != io.EOF {
			t.Errorf("%s: at the end: %v", name, err)
		}
		if in.large != nil {
			t.Errorf("%s: it waits with a large buffer", name)
		}
	}
	if err := newInlet(bytes.NewReader(sent[:3])).readFrame(new(frame)); err != io.ErrUnexpectedEOF {
		t.Errorf("within a frame's size: %v", err)
	}
}

type pings struct{ meshv1.UnimplementedNodeServer }

func (pings) Ping(_ context.Context, r *meshv1.PingRequest) (*meshv1.PingResponse, error) {
	return &meshv1.PingResponse{Payload: r.GetPayload()}, nil
}

// A caller's next call may be on its way for long: the answer to the one before must
// not wait for it.
func TestAnAnswerDoesNotWaitForTheRestOfTheNextCall(t *testing.T) {
	t.Parallel()
	s := NewServer(ServerOptions{Authorize: func(ctx context.Context, _ net.Addr, _ string) (context.Context, error) { return ctx, nil }})
	defer s.Close()
	meshv1.RegisterNodeServer(s, pings{})
	near, far := net.Pipe()
	defer near.Close()
	go s.ServeCalls(far)
	_ = near.SetDeadline(time.Now().Add(time.Minute))

	in := newInlet(near)
	id := uint64(0)
	call := func() []byte {
		id++
		body, err := proto.Marshal(&meshv1.PingRequest{Payload: []byte{byte(id)}})
		if err != nil {
			t.Fatal(err)
		}
		b := appendString(binary.AppendUvarint(beginFrame(nil, kindRequest, id), 0), meshv1.Node_Ping_FullMethodName)
		return endFrame(append(appendPairs(b, nil), body...), 0)
	}
	answered := func(want uint64) {
		t.Helper()
		var f frame
		if err := in.readFrame(&f); err != nil {
			t.Fatalf("answer %d: %v", want, err)
		}
		var got meshv1.PingResponse
		if err := proto.Unmarshal(f.body, &got); err != nil || f.id != want || f.flags != 0 || !bytes.Equal(got.GetPayload(), []byte{byte(want)}) {
			t.Fatalf("answer %d: frame %d, flags %d, %v, %v", want, f.id, f.flags, &got, err)
		}
		f.free()
	}
	send := func(b []byte) {
		t.Helper()
		if _, err := near.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	for range 100 { // it is known to be quick: the reader runs it, also beside others
		send(call())
		answered(id)
	}
	for range 20 {
		first, second := call(), call()
		send(append(first, second[:len(second)/2]...))
		answered(id - 1)
		send(second[len(second)/2:])
		answered(id)
	}
}

func TestAMethodRunsWhereItIsReadWhileItIsQuick(t *testing.T) {
	t.Parallel()
	now := time.Now()
	var p pace
	if !p.here(true, now) || p.here(false, now) {
		t.Error("unknown: a lone call is to run here, one with others behind it not")
	}
	for range 50 {
		p.took(2 * time.Microsecond)
	}
	p.took(5 * time.Millisecond) // waited for a processor
	if !p.here(false, now) {
		t.Error("one slow call of many moved a quick method away")
	}
	for range 50 {
		p.took(5 * time.Millisecond)
	}
	if p.here(true, now) {
		t.Error("a slow method runs here")
	}
	for range 100 {
		p.took(2 * time.Microsecond)
	}
	if !p.here(false, now) {
		t.Error("a method that became quick does not come back")
	}

	p.heldUp(now) // soon after another
	p.heldUp(now)
	if p.here(true, now.Add(slowLeast)) || !p.here(true, now.Add(2*slowLeast)) {
		t.Error("the second time it is away twice as long")
	}
	for range 20 {
		p.heldUp(now)
	}
	if p.here(true, now.Add(slowMost-1)) || !p.here(true, now.Add(slowMost)) {
		t.Error("it is away for slowMost at most")
	}
	for range goodRuns {
		p.here(true, now.Add(slowMost))
	}
	p.heldUp(now.Add(slowMost))
	if !p.here(true, now.Add(slowMost)) {
		t.Error("held up once in many runs, it was sent away")
	}
}
