package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Load is a number of callers that call without a pause.
type Load struct {
	Payload, Callers int
	Nanoseconds      int64 // how long; 0 is one call each
}

// CallTimes is how a load fared. Times are in nanoseconds.
type CallTimes struct {
	Calls       int
	P50, P99    int64
	Nanoseconds int64 // from the first call's begin to the last answer
	CPU         int64 // of the calling process
}

// Unary runs a load. A call that fails is an error: a bench of failing calls
// measures nothing.
func (p *Program) Unary(l *Load, t *CallTimes) error { return p.load(l, t) }

func (p *Program) load(l *Load, t *CallTimes) error {
	for len(p.callers) < l.Callers {
		c, err := p.client.caller()
		if err != nil {
			return err
		}
		p.callers = append(p.callers, c)
	}
	payload := make([]byte, l.Payload)
	_, _ = rand.Read(payload)
	// All subjects carry a deadline, as calls of daemons do.
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(l.Nanoseconds)+callLimit)
	defer cancel()
	times, errs := make([][]int64, l.Callers), make([]error, l.Callers)
	used, err := usage()
	if err != nil {
		return err
	}
	var calling sync.WaitGroup
	began := time.Now()
	for i := range l.Callers {
		calling.Go(func() {
			for last := began; ; {
				if errs[i] = p.callers[i](ctx, payload); errs[i] != nil {
					return
				}
				next := time.Now()
				times[i] = append(times[i], int64(next.Sub(last)))
				if last = next; int64(next.Sub(began)) >= l.Nanoseconds {
					return
				}
			}
		})
	}
	calling.Wait()
	took := time.Since(began)
	after, err := usage()
	if err != nil {
		return err
	}
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	if t == nil {
		return nil
	}
	*t = summarise(slices.Concat(times...))
	t.Nanoseconds, t.CPU = int64(took), int64(after-used)
	return nil
}

// summarise sorts the times.
func summarise(times []int64) CallTimes {
	slices.Sort(times)
	return CallTimes{Calls: len(times), P50: percentile(times, 0.5), P99: percentile(times, 0.99)}
}

// callLimit is more than any call of the bench takes.
const callLimit = 30 * time.Second

// A payload and what it is called. The larger one makes a request of 64 KiB with
// its field's head, the largest that the stream of calls takes.
var payloads = []struct {
	name  string
	bytes int
}{{"128 B", 128}, {"64 KiB", 64<<10 - 4}}

var callerCounts = []int{1, 16, 128}

func unaryGroup(payload string, callers int) string {
	if callers == 1 {
		return fmt.Sprintf("unary %s, 1 caller", payload)
	}
	return fmt.Sprintf("unary %s, %d callers", payload, callers)
}

// measureUnary measures calls of every subject, all in turn in each round.
func (b *bench) measureUnary() error {
	pairs, err := b.openPairs(func(s subject) bool { return s.calls })
	defer closePairs(pairs)
	if err != nil {
		return err
	}
	for _, p := range pairs { // Node compiles what runs often, as it runs
		l := &Load{Payload: 128, Callers: 16, Nanoseconds: int64(min(4*b.slice, time.Second))}
		if err := p.client.call(answerLimit, "Unary", l, &CallTimes{}); err != nil {
			return err
		}
	}
	for round := range b.rounds {
		for _, payload := range payloads {
			for _, callers := range callerCounts {
				group := unaryGroup(payload.name, callers)
				b.say("round %d of %d: %s", round+1, b.rounds, group)
				for i := range pairs {
					p := pairs[(i+round)%len(pairs)] // nobody is always the first
					stop, err := b.profilePair(p, callers == 128 && round == b.rounds-1, fmt.Sprintf("unary-%d", payload.bytes))
					if err != nil {
						return err
					}
					if err := b.unaryOnce(p, group, payload.bytes, callers); err != nil {
						return err
					}
					if err := stop(); err != nil {
						return err
					}
				}
			}
		}
	}
	return nil
}

func (b *bench) unaryOnce(p *pair, group string, payload, callers int) error {
	l := &Load{Payload: payload, Callers: callers, Nanoseconds: int64(b.slice / 8)}
	var t CallTimes
	if err := p.client.call(answerLimit, "Unary", l, &t); err != nil { // warm
		return err
	}
	l.Nanoseconds = int64(b.slice)
	before, err := p.server.usage()
	if err != nil {
		return err
	}
	if err := p.client.call(answerLimit, "Unary", l, &t); err != nil {
		return err
	}
	after, err := p.server.usage()
	if err != nil {
		return err
	}
	b.results.add(group, "p50", p.name, "us", float64(t.P50)/1e3, t.Calls)
	b.results.add(group, "p99", p.name, "us", float64(t.P99)/1e3, t.Calls)
	b.results.add(group, "calls/s", p.name, "1/s", float64(t.Calls)/(float64(t.Nanoseconds)/1e9), t.Calls)
	b.results.add(group, "CPU a call", p.name, "us", float64(t.CPU+int64(after-before))/1e3/float64(t.Calls), t.Calls)
	return nil
}
