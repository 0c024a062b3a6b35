package proxy

import (
	"context"
	"errors"
	"io"
	"mime"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/openai"
	"github.com/cosmicac/cosmicac/services/proxy-inference/internal/route"
)

// relay passes one engine's answer to the client.
type relay struct {
	c       *call
	ctx     context.Context
	lease   *route.Lease
	resp    *http.Response
	silence *silence
	began   func() // called with the first byte

	events bool // server-sent events that can be read
	stream openai.Stream
	usage  openai.BodyUsage

	mu        sync.Mutex // the client's side: the timer of early may write, too
	committed bool       // headers are out
	body      bool       // a byte of the body is out
	sent      int64      // bytes of the body
	closed    bool
	timer     *time.Timer
	deadline  time.Time
}

// errClient says that the client took no more.
var errClient = errors.New("the client is gone")

// run reports false while nothing went to the client and another replica may be
// tried.
func (o *relay) run() (answered bool, failed failure) {
	c := o.c
	media, _, _ := mime.ParseMediaType(o.resp.Header.Get("Content-Type"))
	encoded := o.resp.Header.Get("Content-Encoding") != ""
	o.events = media == "text/event-stream" && !encoded
	o.stream.HideUsage = c.hide
	readable := !o.events && !encoded && o.resp.StatusCode < 300

	if o.events && c.h.Timeouts.Commit > 0 {
		o.mu.Lock()
		o.timer = time.AfterFunc(c.h.Timeouts.Commit, o.early)
		o.mu.Unlock()
	}
	defer o.close()

	buffer := c.h.buffers.Get().(*[]byte)
	defer c.h.buffers.Put(buffer)
	out := c.h.events.Get().(*[]byte)
	defer c.h.events.Put(out)
	heard := false
	for {
		n, err := o.resp.Body.Read(*buffer)
		if n > 0 {
			if !heard {
				heard = true
				o.began()
				o.lease.Answered()
			}
			o.silence.heard(o.idle())
			passed := (*buffer)[:n]
			if o.events {
				*out = o.stream.Feed((*out)[:0], passed)
				passed = *out
			} else if readable {
				o.usage.Feed(passed)
			}
			if len(passed) > 0 && o.send(passed) != nil {
				o.note(readable)
				c.gone()
				return true, 0
			}
		}
		if err == nil {
			continue
		}
		ended := err == io.EOF
		if o.events {
			if ended {
				*out = o.stream.End((*out)[:0])
			}
			// A stream whose end was seen is whole, however its connection ended.
			// One that ends without it is not, and half an event helps nobody.
			ended = o.stream.Done() || ended && (!c.face.stream || o.resp.StatusCode >= 300 || o.stream.Failed())
			if ended && err == io.EOF && len(*out) > 0 && o.send(*out) != nil {
				ended = false
			}
		}
		o.note(readable)
		if ended {
			return o.whole()
		}
		return o.cut(err)
	}
}

// idle is how long the engine may be silent now. After the end of the events
// only the connection's end is due.
func (o *relay) idle() time.Duration {
	if o.stream.Done() {
		return 5 * time.Second
	}
	return o.c.h.Timeouts.Idle
}

// note keeps what the engine said of its usage.
func (o *relay) note(readable bool) {
	u, ok := o.stream.Usage()
	if readable {
		u, ok = o.usage.Usage()
	}
	if ok {
		o.c.usage = u
	}
}

// whole ends an answer that came to its end.
func (o *relay) whole() (bool, failure) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.commit() // an answer without a body
	o.c.status = o.resp.StatusCode
	o.c.incomplete = o.stream.Failed()
	if o.c.r.Context().Err() != nil && !o.delivered() {
		o.c.gone()
	}
	return true, 0
}

// delivered reports whether a client can have seen the end of its answer. Many
// clients hang up with it, before the engine's own end is heard here: they took all.
func (o *relay) delivered() bool {
	if o.events {
		return o.stream.Done()
	}
	return o.resp.ContentLength >= 0 && o.sent == o.resp.ContentLength
}

// cut ends an answer that broke off.
func (o *relay) cut(err error) (bool, failure) {
	c := o.c
	if c.r.Context().Err() != nil {
		c.gone()
		return true, 0
	}
	cause := context.Cause(o.ctx)
	late := cause == errLate
	if !late && cause != errSilent && o.lease.Faulted() {
		c.h.Log.Warn("replica broke off and rests", "attempt", o.lease.AttemptID, "agent", o.lease.AgentKey, "cause", err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	e := &openai.Error{Status: http.StatusGatewayTimeout, Type: openai.TypeServer, Code: "engine_timeout", NoRetry: true,
		Message: "the model sent nothing for too long; what came before is not the whole answer"}
	if !o.committed {
		if !late {
			return false, broke
		}
		o.closed = true
		c.refuse(e)
		return true, 0
	}
	if !late {
		e.Code, e.Message = "engine_broke_off", "the replica broke off in the middle of its answer; what came before is not the whole answer"
	}
	c.h.Log.Info("answer broke off", "id", c.id, "endpoint", c.endpointID(), "attempt", o.lease.AttemptID, "cause", err)
	if o.events {
		if o.stream.Broken() {
			c.w.Write([]byte("\n\n"))
		}
		c.w.Write(e.Event())
		c.rc.Flush()
	}
	c.status, c.incomplete, c.abort = o.resp.StatusCode, true, true
	return true, 0
}

// send passes bytes to the client, with the headers before the first of them.
func (o *relay) send(p []byte) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.commit()
	if !o.body {
		o.body = true
		o.c.firstByte = o.c.h.Now().Sub(o.c.start)
	}
	// A client that takes nothing for too long is as good as gone.
	if now := time.Now(); now.Sub(o.deadline) > o.c.h.Timeouts.Write/4 {
		o.deadline = now
		o.c.rc.SetWriteDeadline(now.Add(o.c.h.Timeouts.Write))
	}
	if _, err := o.c.w.Write(p); err != nil {
		return errClient
	}
	o.sent += int64(len(p))
	if o.events || o.resp.ContentLength < 0 {
		if o.c.rc.Flush() != nil {
			return errClient
		}
	}
	return nil
}

// commit sends the headers once. Called with mu held.
func (o *relay) commit() {
	if o.committed {
		return
	}
	o.committed = true
	header := o.c.w.Header()
	for _, name := range passedHeaders {
		if v := o.resp.Header.Values(name); len(v) > 0 {
			header[name] = v
		}
	}
	header.Set("X-Content-Type-Options", "nosniff")
	if o.events || o.resp.Header.Get("Content-Type") == "text/event-stream" {
		header.Set("Cache-Control", "no-cache")
		header.Set("X-Accel-Buffering", "no")
	} else if o.resp.ContentLength >= 0 {
		header.Set("Content-Length", strconv.FormatInt(o.resp.ContentLength, 10))
	}
	o.c.w.WriteHeader(o.resp.StatusCode)
}

// early sends the headers before there is a body, and comments after them.
func (o *relay) early() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed || o.body {
		return
	}
	if o.committed {
		o.c.w.Write([]byte(": keep-alive\n\n"))
	}
	o.commit()
	o.c.rc.Flush() // a client that left shows by its context
	if every := o.c.h.Timeouts.Comment; every > 0 {
		o.timer.Reset(every)
	}
}

func (o *relay) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	if o.timer != nil {
		o.timer.Stop()
	}
	if !o.deadline.IsZero() {
		o.c.rc.SetWriteDeadline(time.Time{})
	}
}
