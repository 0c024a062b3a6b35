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

// call is one call that the stream of calls can take.
type call struct {
	method, peer string
	args, reply  proto.Message
	size         int         // of args, encoded
	header       metadata.MD // to send
	// Where the answer's go, nil if nobody asks.
	gotHeader, gotTrailer *metadata.MD

	done   chan struct{} // capacity 1: sent to once it is over
	lost   bool          // something may be said to it after its end
	err    error         // why it failed
	broke  bool          // err is why the link ended
	answer frame         // the last frame, if the caller is to decode it
	parts  []byte        // of an answer in pieces, before the last
	room   [512]byte     // for a short request
}

var callPool = sync.Pool{New: func() any { return &call{done: make(chan struct{}, 1)} }}

// free gives the call's memory back.
func (c *call) free() {
	if c.lost {
		return
	}
	c.args, c.reply, c.header, c.gotHeader, c.gotTrailer = nil, nil, nil, nil, nil
	c.err, c.broke, c.answer, c.parts = nil, false, frame{}, nil
	callPool.Put(c)
}

// set tells whether the stream of calls can take a call: protobuf, small enough, and
// no option that means something to gRPC alone.
func (c *call) set(ctx context.Context, method string, args, reply any, opts []grpc.CallOption) bool {
	var ok bool
	if c.args, ok = args.(proto.Message); !ok {
		return false
	}
	if c.reply, ok = reply.(proto.Message); !ok || len(method) > maxMethod {
		return false
	}
	c.method = method
	for _, o := range opts {
		switch o := o.(type) {
		case grpc.StaticMethodCallOption:
		case grpc.HeaderCallOption:
			c.gotHeader = o.HeaderAddr
		case grpc.TrailerCallOption:
			c.gotTrailer = o.TrailerAddr
		default:
			return false
		}
	}
	if c.size = proto.Size(c.args); c.size > FastBytes {
		return false
	}
	c.header, _ = metadata.FromOutgoingContext(ctx)
	return pairsFit(c.header)
}

// callLink is the caller's end of one stream of calls.
type callLink struct {
	conn  net.Conn
	out   *outbox
	once  sync.Once
	loops sync.WaitGroup
	turn  chan struct{} // capacity 1: a place may be free for one of those who wait

	mu      sync.Mutex
	places  []place // that calls have or had, at most callsPerStream
	free    []uint8 // those of them that no call has
	waiting int     // calls without a place
	next    uint64
	seen    uint64 // next, when rest looked last
	ended   bool
	err     error // why
}

// place is a call's among those that the other end has.
type place struct {
	id   uint64 // the place's number and callsPerStream for each call before
	call *call  // nil when it is free
}

const _ = uint8(callsPerStream - 1) // a place's number

// abandoned stands for a call whose caller gave up. The other end has it until it
// answers, so it keeps its place.
var abandoned = &call{}

func newCallLink(conn net.Conn, drop func(*callLink)) *callLink {
	l := &callLink{conn: conn, out: newOutbox(conn), turn: make(chan struct{}, 1)}
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
		l.out.end() // first: a call that finds the link ended finds it dead too
		l.mu.Lock()
		if !l.ended {
			l.ended, l.err = true, err
		}
		places := l.places
		l.places, l.free = nil, nil
		l.mu.Unlock()
		_ = l.conn.Close()
		for _, p := range places {
			if c := p.call; c != nil && c != abandoned {
				c.err, c.broke = err, true
				c.done <- struct{}{}
			}
		}
	})
}

// running is how many calls the other end has; the lock is held.
func (l *callLink) running() int { return len(l.places) - len(l.free) }

// take gives a call a place; how is that of its frame. The lock is held.
func (l *callLink) take(c *call) (id uint64, how urgency) {
	i := len(l.places)
	if last := len(l.free) - 1; last >= 0 {
		i = int(l.free[last])
		l.free = l.free[:last]
	} else {
		l.places = append(l.places, place{})
	}
	l.next++
	id = l.next*callsPerStream + uint64(i)
	l.places[i] = place{id, c}
	if l.running() == 1 {
		return id, alone
	}
	return id, inTurn
}

// at is where the call with an id is, nil if there is none; the lock is held.
func (l *callLink) at(id uint64) *place {
	i := id % callsPerStream
	if i >= uint64(len(l.places)) || l.places[i].id != id || l.places[i].call == nil {
		return nil
	}
	return &l.places[i]
}

// leave frees a place; the lock is held.
func (l *callLink) leave(p *place) {
	p.call = nil
	l.free = append(l.free, uint8(p.id%callsPerStream))
	if l.waiting > 0 {
		l.pass()
	}
}

// pass wakes one of those who wait for a place.
func (l *callLink) pass() {
	select {
	case l.turn <- struct{}{}:
	default:
	}
}

// begin gives a call a place, and waits for one if need be.
func (l *callLink) begin(ctx context.Context, c *call) (id uint64, how urgency, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.ended && (l.waiting > 0 || l.running() == callsPerStream) {
		if err := l.wait(ctx, c); err != nil {
			return 0, 0, err
		}
	}
	if l.ended {
		if l.err == errRested {
			return 0, 0, l.err
		}
		return 0, 0, l.cut(c, l.err)
	}
	id, how = l.take(c)
	return id, how, nil
}

// wait waits until a place is free or the link ended. Who has just come waits behind
// those who wait. The lock is held, and let go meanwhile.
func (l *callLink) wait(ctx context.Context, c *call) (err error) {
	l.waiting++
	for err == nil {
		l.mu.Unlock()
		select {
		case <-l.turn:
		case <-ctx.Done():
			err = ended(ctx, c)
		case <-l.out.ended:
			err = l.cut(c, l.why())
		}
		l.mu.Lock()
		if l.ended || l.running() < callsPerStream {
			break
		}
	}
	l.waiting--
	left := callsPerStream - l.running()
	if err == nil {
		left-- // this call's
	}
	if l.waiting > 0 && left > 0 {
		l.pass()
	}
	return err
}

// errRested ends a call that came when its link had just been given back.
var errRested = errors.New("the link rests")

func (l *callLink) rest() {
	l.mu.Lock()
	quiet := !l.ended && l.running() == 0 && l.waiting == 0 && l.next == l.seen
	l.seen = l.next
	if quiet {
		l.out.end()
		l.ended, l.err = true, errRested
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
			f.free()
			return malformed("the answering end sent no answer")
		}
		last := f.flags&flagMore == 0
		var c *call
		l.mu.Lock()
		if p := l.at(f.id); p != nil {
			c = p.call
			if last {
				l.leave(p)
			}
		}
		l.mu.Unlock()
		switch {
		case c == nil || c == abandoned: // a peer may also answer what nobody asked
			f.free()
		case !last:
			if len(c.parts)+len(f.body) > MaxMessageBytes {
				f.free()
				return fault.New(fault.TooLarge, "read an answer: more than %d bytes", MaxMessageBytes)
			}
			c.parts = append(c.parts, f.body...)
			f.free()
		case len(f.body) <= smallBuffer && len(c.parts) == 0:
			c.err = c.decode(&f) // to pass the bytes on would cost more
			c.done <- struct{}{}
		default:
			f.keep()
			c.answer = f
			c.done <- struct{}{}
		}
	}
}

// invoke makes one call. sent is false when certainly nothing of it went out; it may be
// made again then, unless it is lost.
func (l *callLink) invoke(ctx context.Context, c *call) (sent bool, err error) {
	id, how, err := l.begin(ctx, c)
	if err != nil {
		return false, err
	}
	if sent, err = l.send(ctx, c, id, how); err != nil && l.forget(id, c, nil) {
		return false, err
	}
	// Not sent because the link ended: fail tells the call so.
	select {
	case <-c.done:
	case <-ctx.Done():
		if l.forget(id, c, abandoned) {
			var cancel [16]byte
			l.out.put(ctx, endFrame(beginFrame(cancel[:0], kindCancel, id), 0), atOnce)
			return true, ended(ctx, c)
		}
		<-c.done // it is over at this moment
	}
	switch {
	case c.broke:
		c.broke, err = false, c.err
		return sent, l.cut(c, err)
	case c.answer.kind != 0:
		return true, c.decode(&c.answer)
	}
	return true, c.err
}

// send puts a call's frame out. It fails when ctx ended before there was room, and
// when the request cannot be encoded.
func (l *callLink) send(ctx context.Context, c *call, id uint64, how urgency) (sent bool, err error) {
	frame := c.room[:0]
	if need := c.size + len(c.method) + 64; need > len(c.room) {
		b := newBuffer(need)
		defer b.free()
		frame = b.bytes
	}
	if frame, err = c.append(ctx, frame, id); err != nil {
		return false, err
	}
	if l.out.put(ctx, frame, how) {
		return true, nil
	}
	if ctx.Err() != nil {
		return false, ended(ctx, c)
	}
	return false, nil
}

// forget takes a call off the link, or leaves another in its place; false when it
// is over or about to be, which done will say. It is lost otherwise: the peer may
// answer what it was never asked.
func (l *callLink) forget(id uint64, c, instead *call) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.at(id)
	if p == nil {
		return false
	}
	c.lost = true
	if instead == nil {
		l.leave(p)
	} else {
		p.call = instead
	}
	return true
}

func (l *callLink) why() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// cut is what a call is told when the connection broke.
func (l *callLink) cut(c *call, err error) error {
	if errors.Is(err, net.ErrClosed) || err == nil {
		return fault.New(fault.Unreachable, "call %s on %s: the connection broke", c.method, c.peer)
	}
	return fault.New(fault.Unreachable, "call %s on %s: the connection broke: %v", c.method, c.peer, err)
}

func ended(ctx context.Context, c *call) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fault.New(fault.Timeout, "call %s on %s: no answer in time", c.method, c.peer)
	}
	return fault.New(fault.Canceled, "call %s on %s: canceled", c.method, c.peer)
}

// append writes the call's frame to b.
func (c *call) append(ctx context.Context, b []byte, id uint64) ([]byte, error) {
	start := len(b)
	b = beginFrame(b, kindRequest, id)
	var timeout uint64
	if deadline, ok := ctx.Deadline(); ok {
		// Rounded up, never to 0, which says none.
		timeout = uint64(max(time.Until(deadline), 0)/time.Microsecond) + 1
	}
	b = binary.AppendUvarint(b, timeout)
	b = appendString(b, c.method)
	b = appendPairs(b, c.header)
	b, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(b, c.args)
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "encode the request of %s", c.method)
	}
	return endFrame(b, start), nil
}

// decode reads the answer.
func (c *call) decode(f *frame) error {
	defer f.free()
	if c.gotHeader != nil {
		*c.gotHeader = f.header
	}
	if c.gotTrailer != nil {
		*c.gotTrailer = f.trailer
	}
	body := f.body
	if len(c.parts) > 0 && f.flags&flagFailed == 0 { // a failure may break off an answer in pieces
		if len(c.parts)+len(body) > MaxMessageBytes {
			return fault.New(fault.TooLarge, "read the answer of %s from %s: more than %d bytes", c.method, c.peer, MaxMessageBytes)
		}
		body = append(c.parts, body...)
	}
	if f.flags&flagFailed != 0 {
		var st spb.Status
		if err := proto.Unmarshal(body, &st); err != nil || st.GetCode() == 0 {
			return fault.New(fault.Internal, "read the failure of %s from %s: it is malformed", c.method, c.peer)
		}
		return fault.FromGRPC(status.ErrorProto(&st))
	}
	if err := proto.Unmarshal(body, c.reply); err != nil {
		return fault.Wrap(fault.Internal, err, "decode the answer of %s from %s", c.method, c.peer)
	}
	return nil
}
