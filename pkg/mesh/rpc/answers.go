package rpc

import (
	"context"
	"io"
	"net"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

const (
	// callsPerStream is how many calls a caller lets run at a time on one stream of
	// calls. Who does not keep to it is refused after clearUp: an answer may arrive, and
	// be followed by a new call, before its worker has cleared up.
	callsPerStream = 256
	clearUp        = 5 * time.Second
	// heldBytes bounds the requests and answers of one stream whose calls still
	// run; above it the stream is not read, so that a peer that reads no answers
	// gets no more of them made.
	heldBytes = 8 << 20
	// largeAnswers is how many answers above a piece one stream encodes at a time.
	largeAnswers = 4
)

// unary is one method that the stream of calls can reach.
type unary struct {
	name   string
	impl   any
	handle grpc.MethodHandler
	most   uint32 // that one caller may have at a time, 0 for no bound
	pace   pace
}

// answers is the answering end of one stream of calls.
type answers struct {
	s    *Server
	conn net.Conn
	out  *outbox
	ctx  context.Context // of every call; it names the peer
	cut  context.CancelFunc

	large chan struct{}
	stint stint
	in    *inlet     // of who reads
	over  chan error // why reading ended

	mu      sync.Mutex
	room    sync.Cond // bytes went down or ended
	running map[uint64]*job
	bytes   int
	ended   bool
	crowded bool // one waited for clearUp in vain, and no call has ended since
}

// ServeCalls answers calls on c, a stream of calls, until it ends; it returns when
// the last handler has.
func (s *Server) ServeCalls(c net.Conn) {
	ctx, cancel := context.WithCancel(peer.NewContext(context.Background(), &peer.Peer{Addr: c.RemoteAddr(), LocalAddr: c.LocalAddr()}))
	defer cancel()
	a := &answers{s: s, conn: c, out: newOutbox(c), ctx: ctx, cut: cancel, large: make(chan struct{}, largeAnswers), running: make(map[uint64]*job),
		in: newInlet(c), over: make(chan error, 1)}
	a.room.L = &a.mu
	a.stint.timer = time.AfterFunc(time.Hour, a.look)
	defer a.stint.timer.Stop()
	if !s.open(a) {
		_ = c.Close()
		return
	}
	defer s.finish(a)
	var writing sync.WaitGroup
	writing.Go(func() {
		a.out.run()
		a.end() // the reader may wait for room
	})
	a.read()
	if err := <-a.over; err != io.EOF {
		s.o.Log.Debug("a stream of calls ended", "peer", c.RemoteAddr().String(), "reason", err)
	}
	cancel()
	a.end()
	a.mu.Lock()
	for len(a.running) > 0 {
		a.room.Wait()
	}
	a.mu.Unlock()
	writing.Wait()
}

// end closes the connection and wakes who waits for room.
func (a *answers) end() {
	a.out.end()
	_ = a.conn.Close()
	a.mu.Lock()
	a.ended = true
	a.room.Broadcast()
	a.mu.Unlock()
}

// ends says why the stream did, and ends its calls: the goroutine that is to hear it
// may itself run one.
func (a *answers) ends(why error) {
	a.over <- why
	a.cut()
}

// read starts calls until the stream ends, and says why it did; or until another
// goroutine reads on.
func (a *answers) read() {
	for {
		if !a.in.whole() {
			a.out.flush() // what was answered does not wait for what is to come
		}
		var f frame
		if err := a.in.readFrame(&f); err != nil {
			a.ends(err)
			return
		}
		switch f.kind {
		case kindRequest:
			job, err := a.start(&f)
			if err != nil {
				f.free()
				a.ends(err)
				return
			}
			if job != nil && !job.run() {
				a.out.flush() // another reads on, which may have flushed before
				return
			}
		case kindCancel:
			a.mu.Lock()
			if running := a.running[f.id]; running != nil {
				running.ctx.end()
			}
			a.mu.Unlock()
			f.free()
		default:
			f.free()
			a.ends(malformed("the calling end sent an answer"))
			return
		}
	}
}

// start runs a call on a worker, or returns it for the reader to run. It waits while
// the stream's calls hold too much.
func (a *answers) start(f *frame) (here *job, err error) {
	now := time.Now()
	j := &job{a: a, id: f.id, header: f.header, began: now, size: f.size}
	if j.unary = a.s.unary[string(f.method)]; j.unary == nil {
		j.method = string(f.method)
	} else {
		j.method = j.unary.name
	}
	j.ctx.stream = a.ctx
	if f.timeout > 0 {
		j.ctx.deadline = now.Add(time.Duration(min(f.timeout, uint64(maxTimeout/time.Microsecond))) * time.Microsecond)
	}
	a.mu.Lock()
	if len(a.running) >= callsPerStream || a.bytes+j.size > heldBytes {
		a.mu.Unlock()
		a.out.flush() // this is going to wait
		a.mu.Lock()
	}
	full := len(a.running) >= callsPerStream && !a.clears()
	for !a.ended && a.bytes+j.size > heldBytes && len(a.running) > 0 {
		a.room.Wait()
	}
	_, twice := a.running[j.id]
	if a.ended || twice || full {
		a.mu.Unlock()
		if full && !twice {
			f.free()
			a.failWith(j, fault.New(fault.Exhausted, "more than %d calls at a time on one stream", callsPerStream))
			return nil, nil
		}
		return nil, malformed("a call with the id of one that runs")
	}
	if j.unary != nil && j.unary.pace.here(len(a.running) == 0 && len(a.in.unread) == 0, now) {
		j.here = true
		j.body, j.buffer = f.body, f.buffer
		a.stint.begin(j)
		a.mu.Unlock()
		return j, nil
	}
	a.count(j)
	a.mu.Unlock()
	f.keep() // the reader goes on
	j.body, j.buffer = f.body, f.buffer
	a.s.dispatch(j)
	return nil, nil
}

// count has a call be one of those that run beside the reader; the lock is held.
func (a *answers) count(j *job) {
	j.counted = true
	a.bytes += j.size
	a.running[j.id] = j
}

// clears waits for a call to end; the caller holds the lock. Only clearUp, and once for
// all that come meanwhile, since only who reads the stream hears that the peer is gone.
func (a *answers) clears() bool {
	if a.crowded {
		return false
	}
	waits := true
	t := time.AfterFunc(clearUp, func() {
		a.mu.Lock()
		a.crowded = a.crowded || waits && len(a.running) >= callsPerStream
		a.room.Broadcast()
		a.mu.Unlock()
	})
	defer func() { waits = false; t.Stop() }()
	for len(a.running) >= callsPerStream && !a.crowded && !a.ended {
		a.room.Wait()
	}
	return len(a.running) < callsPerStream
}

// maxTimeout bounds what a peer may ask for; longer counts as this.
const maxTimeout = 24 * time.Hour

// job is one call that runs. Its memory is the call's largest part.
type job struct {
	a      *answers
	id     uint64
	method string
	unary  *unary // nil if there is none of that name
	header metadata.MD
	body   []byte
	buffer *buffer // of body; nil when that is the inlet's
	size   int
	began  time.Time
	ctx    callContext

	here    bool // the reader runs it
	counted bool // among those that run beside the reader; guarded by the lock of answers

	mu   sync.Mutex // of what the handler sets
	told struct{ header, trailer metadata.MD }
}

// run runs one call to its end and answers it. reads is true for the goroutine that
// reads the stream and is to read on.
func (j *job) run() (reads bool) {
	a := j.a
	if !j.here {
		j.began = time.Now()
	}
	reply, err := j.call()
	if j.unary != nil {
		j.unary.pace.took(time.Since(j.began))
	}
	if err == nil {
		err = a.answer(j, reply)
	}
	if err != nil {
		a.failWith(j, cutOff(&j.ctx, j.method, err))
	}
	j.ctx.end()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.stint.end(j) {
		return true
	}
	delete(a.running, j.id)
	a.crowded = false
	a.bytes -= j.size
	a.room.Broadcast()
	return false
}

// call authorises, decodes and handles.
func (j *job) call() (reply any, err error) {
	a := j.a
	defer j.free()
	m := j.unary
	if m == nil {
		return nil, fault.New(fault.Unsupported, "call %q: this node has no such method", j.method)
	}
	var ctx context.Context = &j.ctx
	if j.header != nil {
		ctx = metadata.NewIncomingContext(ctx, j.header)
	}
	ctx, end, err := a.s.begin(ctx, m.name, m.most)
	if err != nil {
		return nil, err
	}
	defer end()
	defer a.s.o.recover(m.name, &err)
	return m.handle(m.impl, grpc.NewContextWithServerTransportStream(ctx, j), j.decode, nil)
}

// decode reads the request, and lets go of the bytes that it came in.
func (j *job) decode(into any) error {
	defer j.free()
	message, ok := into.(proto.Message)
	if !ok {
		return fault.New(fault.Internal, "the request of %s is no protobuf message", j.method)
	}
	if err := proto.Unmarshal(j.body, message); err != nil {
		return fault.Wrap(fault.Invalid, err, "decode the request of %s", j.method)
	}
	return nil
}

func (j *job) free() {
	b := j.buffer
	j.body, j.buffer = nil, nil
	if b != nil {
		b.free()
	}
}

// answer sends the reply, in pieces if it is long.
func (a *answers) answer(j *job, reply any) error {
	message, ok := reply.(proto.Message)
	if !ok {
		return fault.New(fault.Internal, "the answer of %s is no protobuf message", j.method)
	}
	size := proto.Size(message)
	if size > MaxMessageBytes {
		return fault.New(fault.TooLarge, "the answer of %s has %d bytes, at most %d may cross", j.method, size, MaxMessageBytes)
	}
	// Of a call that the reader runs a short answer is never counted: it saves a lock, and
	// those that were held up and count otherwise are callsPerStream at most.
	if !j.here || size > smallBuffer {
		a.mu.Lock()
		if j.counted {
			j.size += size
			a.bytes += size
		}
		a.mu.Unlock()
	}
	if size > pieceBytes {
		select {
		case a.large <- struct{}{}:
			defer func() { <-a.large }()
		case <-j.ctx.Done():
			return j.ctx.Err()
		}
	}
	marshal := proto.MarshalOptions{UseCachedSize: true}
	if size <= pieceBytes {
		b := newBuffer(size + 32)
		defer func() { b.free() }()
		out, err := marshal.MarshalAppend(j.begin(b.bytes, 0), message)
		if err != nil {
			return fault.Wrap(fault.Internal, err, "encode the answer of %s", j.method)
		}
		b.bytes = endFrame(out, 0)
		return a.send(j, b.bytes)
	}
	body, err := marshal.MarshalAppend(make([]byte, 0, size), message)
	if err != nil {
		return fault.Wrap(fault.Internal, err, "encode the answer of %s", j.method)
	}
	b := newBuffer(maxFrameBytes)
	defer func() { b.free() }()
	for len(body) > pieceBytes {
		out := append(beginFrame(b.bytes[:0], kindAnswer, j.id), flagMore)
		b.bytes = endFrame(append(out, body[:pieceBytes]...), 0)
		if err := a.send(j, b.bytes); err != nil {
			return err
		}
		body = body[pieceBytes:]
	}
	b.bytes = endFrame(append(j.begin(b.bytes[:0], 0), body...), 0)
	return a.send(j, b.bytes)
}

// send fails when the call ended before there was room. A failure must follow then,
// also to a caller that gave up: its call keeps its turn until it is answered.
func (a *answers) send(j *job, frame []byte) error {
	how := inTurn
	if j.here {
		how = held
	} else {
		a.mu.Lock()
		if len(a.running) == 1 {
			how = alone
		}
		a.mu.Unlock()
	}
	if a.out.put(&j.ctx, frame, how) {
		return nil
	}
	if err := j.ctx.Err(); err != nil {
		return err
	}
	return net.ErrClosed
}

// begin appends all of an answer's last frame but the body.
func (j *job) begin(b []byte, flags byte) []byte {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.told.header) > 0 {
		flags |= flagHeader
	}
	if len(j.told.trailer) > 0 {
		flags |= flagTrailer
	}
	b = append(beginFrame(b, kindAnswer, j.id), flags)
	if len(j.told.header) > 0 {
		b = appendPairs(b, j.told.header)
	}
	if len(j.told.trailer) > 0 {
		b = appendPairs(b, j.told.trailer)
	}
	return b
}

// failWith sends a failure with the status that gRPC would have sent.
func (a *answers) failWith(j *job, err error) {
	st, _ := status.FromError(fault.ToGRPC(err))
	body, err := proto.Marshal(st.Proto())
	if err != nil || len(body) > pieceBytes {
		body, _ = proto.Marshal(status.New(fault.Internal.GRPC(), "the failure could not be encoded").Proto())
	}
	a.out.put(a.ctx, endFrame(append(j.begin(nil, flagFailed), body...), 0), inTurn)
}

// A job is the grpc.ServerTransportStream of its call.

// Method is the call's full name.
func (j *job) Method() string { return j.method }

// SetHeader adds to what the caller gets before the answer. Both come at once here.
func (j *job) SetHeader(md metadata.MD) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.set(&j.told.header, md)
}

// SendHeader is SetHeader.
func (j *job) SendHeader(md metadata.MD) error { return j.SetHeader(md) }

// SetTrailer adds to what the caller gets with the answer.
func (j *job) SetTrailer(md metadata.MD) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.set(&j.told.trailer, md)
}

func (j *job) set(to *metadata.MD, md metadata.MD) error {
	sum := metadata.Join(*to, md)
	if !pairsFit(sum) {
		return fault.New(fault.TooLarge, "metadata of %s: more than %d pairs or %d bytes", j.method, maxPairs, maxPairsBytes)
	}
	*to = sum
	return nil
}

// Workers. A fresh goroutine grows its stack anew with each call; a few that
// stay save that. They belong to the server, not to a stream, so idle streams cost
// none.

// maxIdle is how many stay: 8 KiB each.
const maxIdle = 128

func (s *Server) dispatch(j *job) {
	select {
	case s.jobs <- j:
	default:
		s.workers.Go(func() { s.work(j) })
	}
}

func (s *Server) work(j *job) {
	for {
		j.run()
		if s.idle.Add(1) > maxIdle {
			s.idle.Add(-1)
			return
		}
		select {
		case j = <-s.jobs:
			s.idle.Add(-1)
		case <-s.stop:
			s.idle.Add(-1)
			return
		}
	}
}

func (s *Server) open(a *answers) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.serving[a] = struct{}{}
	s.streams.Add(1)
	return true
}

func (s *Server) finish(a *answers) {
	s.mu.Lock()
	delete(s.serving, a)
	s.mu.Unlock()
	s.streams.Done()
}
