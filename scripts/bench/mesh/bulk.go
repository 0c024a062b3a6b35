package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// bulkName is the stream of bytes between nodes of the bench.
const bulkName = "bench-bulk"

// The one who opens a stream of bulk sends 8 bytes: how many bytes it wants, or with
// the top bit set how many it will send, which the other side answers with one byte.
const upload = 1 << 63

const bulkBuffer = 64 << 10

// serveBulk answers one request after the other until the stream ends.
func serveBulk(c io.ReadWriter) {
	buffer := make([]byte, bulkBuffer)
	for {
		var head [8]byte
		if _, err := io.ReadFull(c, head[:]); err != nil {
			return
		}
		n := binary.BigEndian.Uint64(head[:])
		var err error
		if n&upload == 0 {
			err = pour(c, buffer, int64(n))
		} else if err = drain(c, buffer, int64(n&^upload), time.Time{}); err == nil {
			_, err = c.Write([]byte{1})
		}
		if err != nil {
			return // the client has had enough
		}
	}
}

func pour(w io.Writer, buffer []byte, n int64) error {
	for n > 0 {
		k, err := w.Write(buffer[:min(n, int64(len(buffer)))])
		if err != nil {
			return err
		}
		n -= int64(k)
	}
	return nil
}

var errTimeUp = errors.New("time is up")

// drain reads n bytes, or until errTimeUp.
func drain(r io.Reader, buffer []byte, n int64, until time.Time) error {
	for n > 0 {
		k, err := r.Read(buffer[:min(n, int64(len(buffer)))])
		n -= int64(k)
		switch {
		case n == 0:
			return nil
		case err == io.EOF:
			return io.ErrUnexpectedEOF
		case err != nil:
			return err
		case !until.IsZero() && time.Now().After(until):
			return errTimeUp
		}
	}
	return nil
}

// BulkRequest asks for bytes on one stream, until they are there or time is up.
type BulkRequest struct{ Bytes, Nanoseconds int64 }

// BulkTime is what came, how long it took and what processor time the reader used.
type BulkTime struct{ Bytes, Nanoseconds, CPU int64 }

// Bulk takes bytes from the server. A thirty-second part comes first and does not
// count: windows grow meanwhile.
func (p *Program) Bulk(r *BulkRequest, t *BulkTime) error {
	c, err := p.client.stream(context.Background())
	if err != nil {
		return err
	}
	defer c.Close()
	counter := &counting{Reader: c}
	buffer := make([]byte, bulkBuffer)
	if err := ask(c, uint64(r.Bytes/32)); err != nil {
		return err
	}
	if err := drain(counter, buffer, r.Bytes/32, time.Time{}); err != nil {
		return err
	}
	used, err := usage()
	if err != nil {
		return err
	}
	began := time.Now()
	counter.n = 0
	if err := ask(c, uint64(r.Bytes)); err != nil {
		return err
	}
	if err := drain(counter, buffer, r.Bytes, began.Add(time.Duration(r.Nanoseconds))); err != nil && err != errTimeUp {
		return err
	}
	t.Nanoseconds, t.Bytes = int64(time.Since(began)), counter.n
	after, err := usage()
	t.CPU = int64(after - used)
	return err
}

type counting struct {
	io.Reader
	n int64
}

func (c *counting) Read(b []byte) (int, error) {
	k, err := c.Reader.Read(b)
	c.n += int64(k)
	return k, err
}

func ask(c io.Writer, n uint64) error {
	_, err := c.Write(binary.BigEndian.AppendUint64(nil, n))
	return err
}

// BesideRequest is a load with a stream of bulk to the same peer beside it.
type BesideRequest struct {
	Load
	Up bool // the caller sends the bulk
}

// BesideTimes are the calls and how much bulk went on meanwhile.
type BesideTimes struct {
	CallTimes
	Bytes int64
}

// Beside runs a load while one stream of bulk to the same peer runs flat out.
func (p *Program) Beside(r *BesideRequest, t *BesideTimes) error {
	c, err := p.client.stream(context.Background())
	if err != nil {
		return err
	}
	const endless = 1 << 50
	buffer := make([]byte, bulkBuffer)
	stop := make(chan struct{})
	flowing := make(chan struct{}) // closed when the bulk runs
	var moved int64
	var failed error
	var running sync.WaitGroup
	running.Go(func() {
		n := uint64(endless)
		if r.Up {
			n |= upload
		}
		failed = ask(c, n)
		for failed == nil {
			select {
			case <-stop:
				return
			default:
			}
			var k int
			if r.Up {
				k, failed = c.Write(buffer)
			} else {
				k, failed = c.Read(buffer)
			}
			if moved += int64(k); moved > 4<<20 && !isClosed(flowing) {
				close(flowing)
			}
		}
	})
	var loaded error
	select {
	case <-flowing:
		loaded = p.load(&r.Load, &t.CallTimes)
	case <-time.After(callLimit):
		loaded = fmt.Errorf("the bulk did not begin to flow in %s", callLimit)
	}
	close(stop)
	_ = c.Close() // a write or read that waits ends
	running.Wait()
	t.Bytes = moved
	if loaded == nil && !isClosed(flowing) {
		return failed
	}
	return loaded
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

const bulkGroup = "bulk, one stream"

// measureBulk measures one stream of every subject, all in turn in each round.
func (b *bench) measureBulk() error {
	pairs, err := b.openPairs(func(s subject) bool { return s.bulk })
	defer closePairs(pairs)
	if err != nil {
		return err
	}
	for round := range b.rounds {
		b.say("round %d of %d: %s", round+1, b.rounds, bulkGroup)
		for i := range pairs {
			p := pairs[(i+round)%len(pairs)]
			stop, err := b.profilePair(p, round == b.rounds-1, "bulk")
			if err != nil {
				return err
			}
			before, err := p.server.usage()
			if err != nil {
				return err
			}
			var t BulkTime
			if err := p.client.call(answerLimit, "Bulk", &BulkRequest{b.bulkBytes, int64(b.bulkSlice)}, &t); err != nil {
				return err
			}
			after, err := p.server.usage()
			if err != nil {
				return err
			}
			if err := stop(); err != nil {
				return err
			}
			b.results.add(bulkGroup, "speed", p.name, "MB/s", float64(t.Bytes)/1e6/(float64(t.Nanoseconds)/1e9), 1)
			// The server's part is of the warm-up too.
			server := float64(after-before) * float64(t.Bytes) / float64(t.Bytes+b.bulkBytes/32)
			b.results.add(bulkGroup, "CPU", p.name, "s/GB", (float64(t.CPU)+server)/float64(t.Bytes), 1)
		}
	}
	return nil
}

const besideGroup = "unary 128 B, 1 caller, beside bulk"

// measureBeside measures calls beside a stream of bulk to the same peer.
func (b *bench) measureBeside() error {
	pairs, err := b.openPairs(func(s subject) bool { return s.calls && s.bulk && s.stack == "mesh" })
	defer closePairs(pairs)
	if err != nil {
		return err
	}
	for round := range b.rounds {
		b.say("round %d of %d: %s", round+1, b.rounds, besideGroup)
		for _, p := range pairs {
			for _, up := range []bool{false, true} {
				name := p.name + ", bulk from the server"
				if up {
					name = p.name + ", bulk from the caller"
				}
				r := &BesideRequest{Load{Payload: 128, Callers: 1, Nanoseconds: int64(b.slice)}, up}
				var t BesideTimes
				if err := p.client.call(answerLimit, "Beside", r, &t); err != nil {
					return err
				}
				b.results.add(besideGroup, "p50", name, "ms", float64(t.P50)/1e6, t.Calls)
				b.results.add(besideGroup, "p99", name, "ms", float64(t.P99)/1e6, t.Calls)
				b.results.add(besideGroup, "bulk", name, "MB/s", float64(t.Bytes)/1e6/(float64(t.Nanoseconds)/1e9), t.Calls)
			}
		}
	}
	return nil
}
