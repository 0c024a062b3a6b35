package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Bounds of open event streams.
const (
	maximumStreams        = 4096
	maximumStreamsPerUser = 64
	writeTimeout          = 10 * time.Second
)

// streamCount bounds open streams and ends them all at the end.
type streamCount struct {
	mu     sync.Mutex
	total  int
	byUser map[string]int
	ended  chan struct{}
	once   sync.Once
}

func newStreamCount() *streamCount {
	return &streamCount{byUser: map[string]int{}, ended: make(chan struct{})}
}

func (c *streamCount) end() { c.once.Do(func() { close(c.ended) }) }

func (c *streamCount) enter(user string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.total >= maximumStreams || c.byUser[user] >= maximumStreamsPerUser {
		return false
	}
	c.total++
	c.byUser[user]++
	return true
}

func (c *streamCount) leave(user string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.total--
	if c.byUser[user]--; c.byUser[user] == 0 {
		delete(c.byUser, user)
	}
}

// streamJob follows a job. Guarantees: the whole job comes first; then the newest
// after each change, in order, changes that come faster than the reader merged;
// `deleted` comes last, and the stream ends. It also ends when the token does.
// While the orchestrator is away only comments come; nothing is lost but merged.
func (s *Server) streamJob(ctx context.Context, in *JobPath) (*huma.StreamResponse, error) {
	user := caller(ctx).User.ID
	if !s.streams.enter(user) {
		return nil, fault.New(fault.Exhausted, "too many event streams are open: close one first")
	}
	// Before the job is read, so that no change falls between.
	subscription := s.Watch.Subscribe(in.ID)
	job, err := s.owned(ctx, in.ID)
	if err != nil {
		subscription.Close()
		s.streams.leave(user)
		return nil, err
	}
	known, up := s.Watch.Holds(in.ID)
	gone := job.GetDeleteRequestedAt() != nil && up && !known
	return &huma.StreamResponse{Body: func(ctx huma.Context) {
		defer s.streams.leave(user)
		defer subscription.Close()
		s.metrics.streams.Inc()
		defer s.metrics.streams.Dec()
		_, w := humago.Unwrap(ctx)
		ctx.SetHeader("Content-Type", "text/event-stream")
		ctx.SetHeader("X-Accel-Buffering", "no")
		ctx.SetStatus(http.StatusOK)
		out := &eventWriter{w: w, control: http.NewResponseController(w)}
		// The server reads on to notice that the caller left; that must not time out.
		_ = out.control.SetReadDeadline(time.Time{})
		alive := time.NewTicker(s.KeepAlive)
		defer alive.Stop()
		done := ctx.Context().Done()
		var last []byte
		for {
			data, err := json.Marshal(s.job(job))
			if err != nil {
				s.Log.Error("write a job as JSON", "job", in.ID, "error", err)
				return
			}
			if !bytes.Equal(data, last) {
				if out.event("job", data) != nil {
					return
				}
				last = data
			}
			if gone {
				_ = out.event("deleted", fmt.Appendf(nil, `{"id":%q}`, in.ID))
				return
			}
			select {
			case <-subscription.Signal():
				var newest *orkv1.Job
				newest, gone = subscription.Latest()
				if newest != nil && newest.GetRevision() >= job.GetRevision() {
					job = newest
				}
			case <-alive.C:
				// A token that ended since, or a user who was disabled, hears no more.
				if _, err := s.Accounts.Introspect(ctx.Context(), requestOf(ctx.Context()).token); fault.Is(err, fault.Unauthenticated) {
					return
				}
				comment := ": alive"
				if !s.Watch.Connected() {
					comment = ": the orchestrator is away; what was sent last may be old"
				}
				if out.write([]byte(comment+"\n\n")) != nil {
					return
				}
			case <-done:
				return
			case <-s.streams.ended:
				return
			}
		}
	}}, nil
}

// eventWriter writes server-sent events, each flushed, and gives up on a reader
// who does not read.
type eventWriter struct {
	w       http.ResponseWriter
	control *http.ResponseController
}

func (e *eventWriter) event(name string, data []byte) error {
	return e.write(fmt.Appendf(nil, "event: %s\ndata: %s\n\n", name, data))
}

func (e *eventWriter) write(b []byte) error {
	_ = e.control.SetWriteDeadline(time.Now().Add(writeTimeout))
	if _, err := e.w.Write(b); err != nil {
		return err
	}
	return e.control.Flush()
}
