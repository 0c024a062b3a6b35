package rpc

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// request is a call that the stream of calls can take.
type request struct {
	method      string
	args, reply proto.Message
	size        int         // of args, encoded
	header      metadata.MD // to send
	// Where the answer's go, nil if nobody asks.
	gotHeader, gotTrailer *metadata.MD
}

// set tells whether the stream of calls can take a call: protobuf, small enough, and
// no option that means something to gRPC alone.
func (q *request) set(ctx context.Context, method string, args, reply any, opts []grpc.CallOption) bool {
	var ok bool
	if q.args, ok = args.(proto.Message); !ok {
		return false
	}
	if q.reply, ok = reply.(proto.Message); !ok || len(method) > maxMethod {
		return false
	}
	q.method = method
	for _, o := range opts {
		switch o := o.(type) {
		case grpc.StaticMethodCallOption:
		case grpc.HeaderCallOption:
			q.gotHeader = o.HeaderAddr
		case grpc.TrailerCallOption:
			q.gotTrailer = o.TrailerAddr
		default:
			return false
		}
	}
	if q.size = proto.Size(q.args); q.size > FastBytes {
		return false
	}
	q.header, _ = metadata.FromOutgoingContext(ctx)
	return pairsFit(q.header)
}

// callLink is the caller's end of one stream of calls.
type callLink struct {
	conn  net.Conn
	out   *outbox
	once  sync.Once
	loops sync.WaitGroup
	slots chan struct{} // calls that the other end has, as many as it takes

	mu    sync.Mutex
	calls map[uint64]*call
	next  uint64
	seen  uint64 // next, when rest looked last
	err   error  // why it ended
}

// call is one call that waits for its answer.
type call struct {
	done   chan struct{} // capacity 1: sent to once
	err    error         // of the link
	answer frame         // the last frame
	parts  []byte        // of an answer in pieces, before the last
}

// abandoned stands for a call whose caller gave up. The other end has it until it
// answers, so it keeps its slot.
var abandoned = &call{}

var callPool = sync.Pool{New: func() any { return &call{done: make(chan struct{}, 1)} }}

func newCallLink(conn net.Conn, drop func(*callLink)) *callLink {
	l := &callLink{conn: conn, out: newOutbox(conn), calls: make(map[uint64]*call), slots: make(chan struct{}, callsPerStream)}
	l.loops.Go(l.out.run)
	l.loops.Go(func() {
		l.fail(l.read())
		drop(l)
	})
	return l
}

func (l *callLink) under() net.Conn { return l.conn }
func (l *callLink) dead() bool      { return l.out.isEnded() }
func (l *callLink) abandon()        { l.fail(net.ErrClosed) }

func (l *callLink) close() {
	l.fail(net.ErrClosed)
	l.loops.Wait()
}

// fail ends the link and every call on it, once.
func (l *callLink) fail(err error) {
	l.once.Do(func() {
		l.out.end() // first: a call that finds none of its kind here finds the link dead
		l.mu.Lock()
		if l.calls != nil {
			l.err = err
		}
		calls := l.calls
		l.calls = nil
		l.mu.Unlock()
		_ = l.conn.Close()
		for _, c := range calls {
			if c != abandoned {
				c.err = err
				c.done <- struct{}{}
			}
		}
	})
}

// errRested ends a call that came when its link had just been given back.
var errRested = errors.New("the link rests")

func (l *callLink) rest() {
	l.mu.Lock()
	quiet := l.calls != nil && len(l.calls) == 0 && l.next == l.seen
	l.seen = l.next
	if quiet {
		l.out.end()
		l.calls, l.err = nil, errRested
	}
	l.mu.Unlock()
	if quiet {
		l.fail(net.ErrClosed)
	}
}

func (l *callLink) read() error {
	in := newInlet(l.conn)
	for {
		var f frame
		if err := in.readFrame(&f); err != nil {
			return err
		}
		if f.kind != kindAnswer {
			f.buffer.free()
			return malformed("the answering end sent no answer")
		}
		last := f.flags&flagMore == 0
		l.mu.Lock()
		c := l.calls[f.id]
		if c != nil && last {
			delete(l.calls, f.id)
		}
		l.mu.Unlock()
		switch {
		case c == nil: // no call of this end's: a peer may say what it likes
			f.buffer.free()
		case c == abandoned:
			f.buffer.free()
			if last {
				<-l.slots
			}
		case last:
			<-l.slots
			c.answer = f
			c.done <- struct{}{}
		default:
			if len(c.parts)+len(f.body) > MaxMessageBytes {
				f.buffer.free()
				return fault.New(fault.TooLarge, "read an answer: more than %d bytes", MaxMessageBytes)
			}
			c.parts = append(c.parts, f.body...)
			f.buffer.free()
		}
	}
}

// invoke makes one call. sent is false when certainly nothing of it went out.
func (l *callLink) invoke(ctx context.Context, peer string, q *request) (sent bool, err error) {
	select {
	case l.slots <- struct{}{}:
	default:
		select {
		case l.slots <- struct{}{}:
		case <-ctx.Done():
			return false, ended(ctx, q.method, peer)
		case <-l.out.ended:
			return false, l.broke(q.method, peer, l.why())
		}
	}
	c := callPool.Get().(*call)
	l.mu.Lock()
	if l.calls == nil {
		err := l.err
		l.mu.Unlock()
		callPool.Put(c)
		<-l.slots
		if err == errRested {
			return false, err
		}
		return false, l.broke(q.method, peer, err)
	}
	l.next++
	id := l.next
	l.calls[id] = c
	how := inTurn
	if len(l.calls) == 1 {
		how = alone
	}
	l.mu.Unlock()

	b := newBuffer(q.size + len(q.method) + 64)
	out, err := q.append(ctx, b.bytes, id)
	if err != nil {
		b.free()
		l.forget(id, c, nil)
		return false, err
	}
	b.bytes = out
	sent = l.out.put(ctx, b.bytes, how)
	b.free()
	if !sent && ctx.Err() != nil {
		l.forget(id, c, nil)
		return false, ended(ctx, q.method, peer)
	}
	// Not sent because the link ended: fail tells the call so.
	select {
	case <-c.done:
	case <-ctx.Done():
		if !l.forget(id, c, abandoned) {
			return true, ended(ctx, q.method, peer) // its answer came at the same moment
		}
		var cancel [16]byte
		l.out.put(ctx, endFrame(beginFrame(cancel[:0], kindCancel, id), 0), atOnce)
		return true, ended(ctx, q.method, peer)
	}
	if c.err != nil {
		err := c.err
		return sent, l.broke(q.method, peer, err)
	}
	err = q.take(c, peer)
	c.answer, c.parts = frame{}, nil
	callPool.Put(c)
	return true, err
}

// forget takes a call off the link, or leaves another in its place; false when it
// was answered or ended before. A call that was is left to the collector: its
// channel may have been sent to.
func (l *callLink) forget(id uint64, c, instead *call) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.calls[id] != c {
		return false
	}
	if instead != nil {
		l.calls[id] = instead
		return true
	}
	delete(l.calls, id)
	<-l.slots
	return true
}

func (l *callLink) why() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

func (l *callLink) broke(method, peer string, err error) error {
	if errors.Is(err, net.ErrClosed) || err == nil {
		return fault.New(fault.Unreachable, "call %s on %s: the connection broke", method, peer)
	}
	return fault.New(fault.Unreachable, "call %s on %s: the connection broke: %v", method, peer, err)
}

func ended(ctx context.Context, method, peer string) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fault.New(fault.Timeout, "call %s on %s: no answer in time", method, peer)
	}
	return fault.New(fault.Canceled, "call %s on %s: canceled", method, peer)
}

// append writes the call's frame to b.
func (q *request) append(ctx context.Context, b []byte, id uint64) ([]byte, error) {
	start := len(b)
	b = beginFrame(b, kindRequest, id)
	var timeout uint64
	if deadline, ok := ctx.Deadline(); ok {
		// Rounded up, never to 0, which says none.
		timeout = uint64(max(time.Until(deadline), 0)/time.Microsecond) + 1
	}
	b = binary.AppendUvarint(b, timeout)
	b = appendString(b, q.method)
	b = appendPairs(b, q.header)
	b, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(b, q.args)
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "encode the request of %s", q.method)
	}
	return endFrame(b, start), nil
}

// take reads the answer.
func (q *request) take(c *call, peer string) error {
	f := &c.answer
	defer f.buffer.free()
	if q.gotHeader != nil {
		*q.gotHeader = f.header
	}
	if q.gotTrailer != nil {
		*q.gotTrailer = f.trailer
	}
	body := f.body
	if len(c.parts) > 0 && f.flags&flagFailed == 0 { // a failure may break off an answer in pieces
		if len(c.parts)+len(body) > MaxMessageBytes {
			return fault.New(fault.TooLarge, "read the answer of %s from %s: more than %d bytes", q.method, peer, MaxMessageBytes)
		}
		body = append(c.parts, body...)
	}
	if f.flags&flagFailed != 0 {
		var st spb.Status
		if err := proto.Unmarshal(body, &st); err != nil || st.GetCode() == 0 {
			return fault.New(fault.Internal, "read the failure of %s from %s: it is malformed", q.method, peer)
		}
		return fault.FromGRPC(status.ErrorProto(&st))
	}
	if err := proto.Unmarshal(body, q.reply); err != nil {
		return fault.Wrap(fault.Internal, err, "decode the answer of %s from %s", q.method, peer)
	}
	return nil
}
