package daemon

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/log"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
)

// StopTime bounds an orderly stop.
const StopTime = 10 * time.Second

// goTime is how long stopping waits for one function given to Go before it goes
// on; those that need a later OnStop to end are waited for at the end.
const goTime = 250 * time.Millisecond

// Env is what a daemon's run function gets. Its fields are set before run is
// called and not changed; its methods are safe for concurrent use.
type Env struct {
	// Service is the kind of daemon, Name its name in the roster.
	Service, Name string
	// Log is the service's root logger; parts take Log.Named.
	Log hclog.Logger
	// Key is the daemon's identity.
	Key *identity.Key
	// Network is what it holds of its network.
	Network *trust.Network
	// StateDirectory is its own folder, locked.
	StateDirectory string
	// Health takes warnings.
	Health *health.Set
	// Metrics is its registry, with the Go and process collectors in it.
	Metrics *prometheus.Registry
	// Version of the software.
	Version string
	// StartedAt is when the process began.
	StartedAt time.Time

	base  Base
	log   *log.Log
	clock func() time.Time

	mu       sync.Mutex
	stack    []entry // in order of start
	stopping bool
	node     *mesh.Node
	started  bool // the mesh node
	http     []string
	beats    map[string]*beat

	relayed, refusing, skewed subjects // of warnings that hold

	ready   atomic.Bool
	running sync.WaitGroup
	fatal   chan error    // first one counts
	changed chan struct{} // the status file should be written
}

// entry is one thing to undo.
type entry struct {
	name string
	stop func(context.Context) error // OnStop
	done chan struct{}               // Go
	end  context.CancelFunc          // Go
}

// Go runs f on a goroutine that the daemon owns. Its context ends when the stop
// comes to it. An error or a panic while the daemon runs is fatal: the daemon stops
// and exits 1. Nil just ends it.
func (e *Env) Go(name string, f func(ctx context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	en := entry{name: name, done: make(chan struct{}), end: cancel}
	e.mu.Lock()
	if e.stopping {
		e.mu.Unlock()
		cancel()
		return
	}
	e.stack = append(e.stack, en)
	e.running.Add(1)
	e.mu.Unlock()
	go func() {
		defer e.running.Done()
		defer close(en.done)
		defer cancel()
		if err := e.guard(ctx, name, f); err != nil && ctx.Err() == nil {
			e.fail(fault.Wrap(fault.KindOf(err), err, "%s", name).With(fault.DetailsOf(err)...))
		}
	}()
}

// guard turns a panic into an error and its stack into a log line.
func (e *Env) guard(ctx context.Context, name string, f func(context.Context) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			e.Log.Error("panic", "in", name, "panic", p, "stack", string(debug.Stack()))
			err = fault.New(fault.Internal, "panic: %v (the stack is in the log)", p)
		}
	}()
	return f(ctx)
}

// fail ends the daemon with an error, once.
func (e *Env) fail(err error) {
	select {
	case e.fatal <- err:
	default:
	}
}

// OnStop adds a function that the stop calls, in reverse order of OnStop and Go
// together. Its context ends with StopTime. If the daemon stops already it is
// called at once.
func (e *Env) OnStop(name string, f func(ctx context.Context) error) {
	e.mu.Lock()
	if !e.stopping {
		e.stack = append(e.stack, entry{name: name, stop: f})
		e.mu.Unlock()
		return
	}
	e.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), goTime)
	defer cancel()
	if err := f(ctx); err != nil {
		e.Log.Warn("stop", "part", name, "error", err)
	}
}

// unwind stops everything in reverse order and waits. It returns what was still
// running when ctx ended.
func (e *Env) unwind(ctx context.Context) error {
	e.mu.Lock()
	e.stopping = true
	stack := e.stack
	e.mu.Unlock()
	for _, en := range slices.Backward(stack) {
		if en.stop == nil {
			en.end()
			grace, cancel := context.WithTimeout(ctx, goTime)
			select {
			case <-en.done:
			case <-grace.Done():
				e.Log.Debug("stop goes on, waited for at the end", "part", en.name)
			}
			cancel()
			continue
		}
		e.Log.Debug("stopping", "part", en.name)
		stopped := make(chan error, 1)
		go func() { stopped <- e.guard(ctx, en.name, en.stop) }()
		select {
		case err := <-stopped:
			if err != nil {
				e.Log.Warn("stop", "part", en.name, "error", err)
			}
		case <-ctx.Done():
			return fault.New(fault.Timeout, "stopping takes longer than %s: %s does not end", StopTime, en.name)
		}
	}
	for _, en := range stack {
		if en.done == nil {
			continue
		}
		select {
		case <-en.done:
		case <-ctx.Done():
			return fault.New(fault.Timeout, "stopping takes longer than %s: %s does not end", StopTime, en.name)
		}
	}
	return nil
}

// Ready says that the daemon serves: to systemd, in the status file and in GetInfo.
func (e *Env) Ready() {
	if e.ready.CompareAndSwap(false, true) {
		e.Log.Info("ready", "version", e.Version, "key", e.Key.ID(), "after", e.clock().Sub(e.StartedAt).Round(time.Millisecond))
		notify("READY=1")
	}
	e.touch()
}

// IsReady tells whether Ready was called.
func (e *Env) IsReady() bool { return e.ready.Load() }

// touch asks for the status file to be written.
func (e *Env) touch() {
	select {
	case e.changed <- struct{}{}:
	default:
	}
}

// Instance names this start of the process.
func (e *Env) Instance() string { return e.log.Ring().Instance() }

// AddHTTPAddress puts an address into the status file.
func (e *Env) AddHTTPAddress(address string) {
	e.mu.Lock()
	e.http = append(e.http, address)
	e.mu.Unlock()
	e.touch()
}

// beat is one loop's promise to be alive.
type beat struct {
	every time.Duration
	last  atomic.Int64 // unix nanoseconds of the monotonic difference to birth
}

// Beat registers a loop that calls the returned function at least each period. When
// it is late the watchdog is not fed, and systemd restarts the daemon.
func (e *Env) Beat(name string, every time.Duration) func() {
	b := &beat{every: every}
	alive := func() { b.last.Store(int64(time.Since(e.StartedAt))) }
	alive()
	e.mu.Lock()
	e.beats[name] = b
	e.mu.Unlock()
	return alive
}

// late names a loop that missed its beat, or "".
func (e *Env) late() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	for name, b := range e.beats {
		if since := time.Since(e.StartedAt) - time.Duration(b.last.Load()); since > b.every {
			return fmt.Sprintf("%s, silent for %s", name, since.Round(time.Second))
		}
	}
	return ""
}

// listenFault turns a failed listen into words that name the key.
func listenFault(key, address string, err error) error {
	if inUse(err) {
		return fault.New(fault.Conflict, "%s: %s is taken by another program: stop it (`ss -lntup`), or set another address in %s", key, address, key)
	}
	return fault.Wrap(fault.Invalid, err, "%s: listen on %s", key, address)
}
