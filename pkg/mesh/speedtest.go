package mesh

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh/internal/frame"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	"github.com/libp2p/go-libp2p/core/peer"
)

const speedTestName = "speedtest"

// Bounds of a speed test, of each direction.
const (
	SpeedTestMost      = 10 * time.Second
	SpeedTestMostBytes = 1 << 30
	speedTestUsual     = 3 * time.Second
	// speedTestGrace is how long the end of a direction may take to arrive.
	speedTestGrace = 10 * time.Second
	// speedTestRest is how long a test waits for one before it to end.
	speedTestRest = 2 * time.Second
	// speedTestsServed bounds the tests that a node answers at a time; one of each
	// caller among them.
	speedTestsServed = 4
	// aloneTime and aloneCalls bound the calls that are timed with nothing beside.
	aloneTime, aloneCalls = time.Second, 500
)

// speedTests counts the tests that run: those that this node asks for and those
// that it answers.
type speedTests struct {
	mu           sync.Mutex
	asked, serve map[peer.ID]bool
}

// take begins a test with p, false when one runs or there are too many.
func (t *speedTests) take(in *map[peer.ID]bool, p peer.ID, most int) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if (*in)[p] || len(*in) >= most {
		return false
	}
	if *in == nil {
		*in = make(map[peer.ID]bool)
	}
	(*in)[p] = true
	return true
}

func (t *speedTests) release(in *map[peer.ID]bool, p peer.ID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(*in, p)
}

// SpeedTest sends bulk to p and back, for d each way (0 is 3 s, at most 10 s) and
// at most so many bytes each way (0 is 1 GiB, the most), and times calls of
// mesh.v1.Node/Ping with nothing beside them and beside the bulk, one after the
// other. The bulk is of one stream and paced as all bulk is. Kind exhausted when a
// test with p runs already.
func (n *Node) SpeedTest(ctx context.Context, p peer.ID, d time.Duration, bytes uint64) (*meshv1.RunSpeedTestResponse, error) {
	if d == 0 {
		d = speedTestUsual
	}
	if bytes == 0 {
		bytes = SpeedTestMostBytes
	}
	switch {
	case p == n.id:
		return nil, fault.New(fault.Invalid, "test the speed to %s: it is this node itself", p)
	case d < 0 || d > SpeedTestMost:
		return nil, fault.New(fault.Invalid, "test the speed for %s each way, at most %s are allowed", d, SpeedTestMost)
	case bytes > SpeedTestMostBytes:
		return nil, fault.New(fault.Invalid, "test the speed with %d bytes each way, at most %d are allowed", bytes, SpeedTestMostBytes)
	}
	if !n.speedTests.take(&n.speedTests.asked, p, 64) {
		return nil, fault.New(fault.Exhausted, "test the speed to %s: a test runs already", p)
	}
	defer n.speedTests.release(&n.speedTests.asked, p)

	var r meshv1.RunSpeedTestResponse
	alone, cancel := context.WithTimeout(ctx, aloneTime)
	defer cancel()
	var err error
	if r.Alone, err = n.timeCalls(ctx, alone, p, aloneCalls); err != nil {
		return nil, err
	}
	for _, upload := range []bool{true, false} {
		running, over := context.WithCancel(ctx)
		var timing sync.WaitGroup
		var calls *meshv1.CallTimes
		var failed error
		timing.Go(func() { calls, failed = n.timeCalls(ctx, running, p, 1<<20) })
		speed, err := n.bulk(ctx, p, upload, d, bytes)
		over()
		timing.Wait()
		if err == nil {
			err = failed
		}
		if err != nil {
			return nil, err
		}
		if upload {
			r.Up, r.BesideUp = speed, calls
		} else {
			r.Down, r.BesideDown = speed, calls
		}
	}
	r.Path = n.Path(ctx, p)
	return &r, nil
}

// timeCalls calls Ping again and again until the second context ends, or so many
// times; at least once.
func (n *Node) timeCalls(ctx, until context.Context, p peer.ID, most int) (*meshv1.CallTimes, error) {
	client := meshv1.NewNodeClient(n.Client(p))
	var took []time.Duration
	for len(took) == 0 || (until.Err() == nil && len(took) < most) {
		began := time.Now()
		if _, err := client.Ping(ctx, &meshv1.PingRequest{Payload: []byte("speedtest")}); err != nil {
			return nil, err
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	at := func(share float64) int64 { return micro(took[int(share*float64(len(took)-1))]) }
	return &meshv1.CallTimes{Calls: uint32(len(took)), P50Microseconds: at(0.5), P99Microseconds: at(0.99)}, nil
}

// bulk runs one direction from the asking side.
func (n *Node) bulk(ctx context.Context, p peer.ID, upload bool, d time.Duration, bytes uint64) (*meshv1.BulkSpeed, error) {
	c, err := n.OpenStream(ctx, p, speedTestName)
	if fault.Is(err, fault.Unsupported) {
		return nil, fault.Wrap(fault.Unsupported, err, "test the speed to %s%s: it is of an older version", p, n.named(p))
	}
	if err != nil {
		return nil, err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	_ = c.SetDeadline(time.Now().Add(d + speedTestGrace))
	fail := func(err error) error {
		if ctx.Err() != nil {
			return ctxFault(ctx, "test the speed to", p)
		}
		return fault.Wrap(fault.KindOf(err), err, "test the speed to %s", p)
	}
	if err := frame.Write(c, &meshv1.SpeedTestOffer{Upload: upload, Bytes: bytes, Microseconds: micro(d)}); err != nil {
		return nil, fail(err)
	}
	if _, err := readAnswer(c); err != nil {
		return nil, fail(err)
	}
	if !upload {
		speed, err := receive(c, bytes)
		if err != nil {
			return nil, fail(err)
		}
		return speed, nil
	}
	if err := send(c, d, bytes); err != nil {
		return nil, fail(err)
	}
	answer, err := readAnswer(c)
	if err != nil {
		return nil, fail(err)
	}
	return answer.GetReceived(), nil
}

func readAnswer(c net.Conn) (*meshv1.SpeedTestAnswer, error) {
	var a meshv1.SpeedTestAnswer
	if err := frame.Read(c, frame.Guest, &a); err != nil {
		// The frame's own error says that it is malformed; what broke it says more.
		var stream *fault.Error
		switch cause := errors.Unwrap(err); {
		case errors.As(cause, &stream):
			return nil, stream
		case fault.Is(cause, fault.Timeout):
			return nil, fault.Wrap(fault.Timeout, cause, "no answer")
		}
		return nil, fault.Wrap(fault.Unreachable, err, "no answer")
	}
	if kind := fault.Kind(a.GetFaultKind()); kind != "" {
		if !kind.Known() {
			kind = fault.Internal
		}
		return nil, fault.New(kind, "the peer refuses: %s", clean(a.GetMessage()))
	}
	return &a, nil
}

// send writes for d or so many bytes, whichever is first, and closes its side.
func send(c net.Conn, d time.Duration, bytes uint64) error {
	piece := make([]byte, 256<<10)
	for end := time.Now().Add(d); bytes > 0 && time.Now().Before(end); {
		k, err := c.Write(piece[:min(uint64(len(piece)), bytes)])
		if err != nil {
			return err
		}
		bytes -= uint64(k)
	}
	return closeWrite(c)
}

// receive reads to the end and times it, from the first byte on.
func receive(c net.Conn, most uint64) (*meshv1.BulkSpeed, error) {
	piece := make([]byte, 256<<10)
	var speed meshv1.BulkSpeed
	var began time.Time
	for {
		k, err := c.Read(piece)
		if k > 0 && began.IsZero() {
			began = time.Now()
		}
		if speed.Bytes += uint64(k); speed.Bytes > most {
			return nil, fault.New(fault.TooLarge, "more than the agreed %d bytes came", most)
		}
		if err != nil && err != io.EOF {
			return nil, err
		}
		if err == io.EOF {
			if !began.IsZero() {
				speed.TookMicroseconds = micro(time.Since(began))
			}
			return &speed, nil
		}
	}
}

// serveSpeedTest answers one direction of a member's test.
func (n *Node) serveSpeedTest(ctx context.Context, s *Stream) {
	_ = s.SetDeadline(time.Now().Add(speedTestGrace))
	var offer meshv1.SpeedTestOffer
	if err := frame.Read(s, frame.Guest, &offer); err != nil {
		_ = s.Reset()
		return
	}
	d := time.Duration(offer.GetMicroseconds()) * time.Microsecond
	refuse := func(err *fault.Error) {
		_ = frame.Write(s, &meshv1.SpeedTestAnswer{FaultKind: string(err.Kind), Message: err.Message})
	}
	if d <= 0 || offer.GetMicroseconds() > micro(SpeedTestMost) || offer.GetBytes() > SpeedTestMostBytes {
		refuse(fault.New(fault.Invalid, "at most %s and %d bytes each way are allowed", SpeedTestMost, SpeedTestMostBytes))
		return
	}
	from := s.Caller().ID
	// The end of a direction reaches this side a moment after the next one begins.
	for patient := time.Now().Add(speedTestRest); !n.speedTests.take(&n.speedTests.serve, from, speedTestsServed); {
		if time.Now().After(patient) || !sleep(ctx, 20*time.Millisecond) {
			refuse(fault.New(fault.Exhausted, "a test of this caller runs already, or %d of others", speedTestsServed))
			return
		}
	}
	defer n.speedTests.release(&n.speedTests.serve, from)
	_ = s.SetDeadline(time.Now().Add(d + speedTestGrace))
	stop := context.AfterFunc(ctx, func() { _ = s.Reset() })
	defer stop()
	if err := frame.Write(s, &meshv1.SpeedTestAnswer{}); err != nil {
		return
	}
	if !offer.GetUpload() {
		_ = send(s, d, offer.GetBytes()) // the receiver notices what is missing
		// The last bytes leave before the stream goes.
		_, _ = io.Copy(io.Discard, io.LimitReader(s, frame.Guest))
		return
	}
	speed, err := receive(s, offer.GetBytes())
	if err != nil {
		_ = s.Reset()
		return
	}
	_ = frame.Write(s, &meshv1.SpeedTestAnswer{Received: speed})
}
