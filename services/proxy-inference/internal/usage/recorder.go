package usage

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cosmicac/cosmicac/pkg/fault"
	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
)

const (
	// batch is how many records one call carries; the wire's bound.
	batch = 1000
	// queued is how many records may wait for the disk.
	queued = 16 << 10
	// callTimeout bounds one RecordUsage.
	callTimeout = 30 * time.Second
)

// Options are what a Recorder needs.
type Options struct {
	// Directory holds the spool.
	Directory string
	// MaximumBytes bounds it.
	MaximumBytes int64
	// SyncInterval is how long a written record may wait for the fsync.
	SyncInterval time.Duration
	// SendInterval is the pause between looks into the spool, and the first
	// pause after a failure; it doubles up to a minute.
	SendInterval time.Duration
	// Send hands records to app-node and returns when it has them.
	Send func(ctx context.Context, records []*appv1.UsageRecord) error
	Log  hclog.Logger
}

// Recorder takes records and brings them to app-node. Run it once.
type Recorder struct {
	o     Options
	spool *spool
	queue chan *appv1.UsageRecord
	wake  chan struct{}

	lost atomic.Int64
	full atomic.Bool
	size int // of the next call; 1 while a record that is refused is looked for
}

// Status is how the spool stands.
type Status struct {
	// Records and Bytes wait for app-node.
	Records, Bytes int64
	// Lost counts records that could not be kept, since the start.
	Lost int64
	// Full is set while new records are lost.
	Full bool
}

// Open opens the spool and what is left in it from before.
func Open(o Options) (*Recorder, error) {
	s, damage, err := open(o.Directory, o.MaximumBytes)
	if err != nil {
		return nil, err
	}
	for _, d := range damage {
		o.Log.Error("usage records are lost", "cause", d)
	}
	if n, _ := s.size(); n > 0 {
		o.Log.Info("usage records from before the start wait for app-node", "records", n)
	}
	return &Recorder{o: o, spool: s, size: batch, queue: make(chan *appv1.UsageRecord, queued), wake: make(chan struct{}, 1)}, nil
}

// Record takes one record and returns at once. The record is the Recorder's then.
func (r *Recorder) Record(u *appv1.UsageRecord) {
	select {
	case r.queue <- u:
	default:
		r.lost.Add(1)
		r.full.Store(true)
	}
}

// Status tells how the spool stands.
func (r *Recorder) Status() Status {
	records, bytes := r.spool.size()
	return Status{Records: records, Bytes: bytes, Lost: r.lost.Load(), Full: r.full.Load()}
}

// Run writes and sends until ctx ends, then writes what was taken until then
// and closes the spool. What is not sent stays for the next start.
func (r *Recorder) Run(ctx context.Context) error {
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		r.send(ctx)
	}()
	r.write(ctx)
	<-sent
	return r.spool.close()
}

// write moves records from the queue to the disk.
func (r *Recorder) write(ctx context.Context) {
	tick := time.NewTicker(r.o.SyncInterval)
	defer tick.Stop()
	records := make([]*appv1.UsageRecord, 0, batch)
	for {
		select {
		case u := <-r.queue:
			records = r.drain(append(records[:0], u))
			r.keep(records)
			select {
			case r.wake <- struct{}{}:
			default:
			}
		case <-tick.C:
			if err := r.spool.sync(); err != nil {
				r.o.Log.Error("usage records may not survive a crash of the host", "cause", err)
			}
		case <-ctx.Done():
			for {
				records = r.drain(records[:0])
				if len(records) == 0 {
					return
				}
				r.keep(records)
			}
		}
	}
}

func (r *Recorder) drain(records []*appv1.UsageRecord) []*appv1.UsageRecord {
	for len(records) < batch {
		select {
		case u := <-r.queue:
			records = append(records, u)
		default:
			return records
		}
	}
	return records
}

func (r *Recorder) keep(records []*appv1.UsageRecord) {
	err := r.spool.append(records)
	if err == nil {
		r.full.Store(false)
		return
	}
	r.lost.Add(int64(len(records)))
	if !r.full.Swap(true) {
		r.o.Log.Error("usage records are lost", "records", len(records), "cause", err)
	}
}

// send moves records from the disk to app-node.
func (r *Recorder) send(ctx context.Context) {
	pause := r.o.SendInterval
	failing := false
	for {
		more, err := r.sendBatch(ctx)
		switch {
		case err != nil && ctx.Err() == nil:
			if !failing {
				r.o.Log.Warn("app-node does not take usage records; they are kept", "cause", err)
			}
			failing = true
			pause = min(2*pause, time.Minute)
		case err == nil:
			if failing {
				r.o.Log.Info("app-node takes usage records again")
			}
			failing, pause = false, r.o.SendInterval
			if more {
				continue
			}
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		if !failing {
			// Idle until there is something, so that a quiet proxy reads no disk.
			if records, _ := r.spool.size(); records == 0 {
				select {
				case <-ctx.Done():
					return
				case <-r.wake:
				}
			}
		}
	}
}

// sendBatch makes one call, and tells whether another is due at once. A record
// that app-node refuses for what it is, which only a defect can cause, is found,
// told and dropped, so that it holds up no other.
func (r *Recorder) sendBatch(ctx context.Context) (more bool, err error) {
	records, m, err := r.spool.peek(r.size)
	if err != nil || len(records) == 0 {
		return false, err
	}
	more = len(records) == r.size
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err = r.o.Send(ctx, records)
	switch kind := fault.KindOf(err); {
	case err == nil:
		r.size = min(2*r.size, batch)
	case kind != fault.Invalid && kind != fault.TooLarge:
		return false, err
	case len(records) > 1:
		r.size = len(records) / 2
		return true, nil
	default:
		r.lost.Add(1)
		r.o.Log.Error("app-node refuses a usage record; it is dropped", "record", records[0].GetId(), "cause", err)
	}
	return more, r.spool.forget(m)
}
