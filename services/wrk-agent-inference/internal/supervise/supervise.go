package supervise

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	dto "github.com/prometheus/client_model/go"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// Launch is one way to start the engine and to reach it.
type Launch struct {
	Path        string
	Arguments   []string // without the zeroth
	Environment []string
	Directory   string
	// Network and Address are where the engine's HTTP will be.
	Network, Address string
	// Models are the names that it is to serve; the first one is asked.
	Models []string
}

// Timing of a supervisor. Zero fields have the defaults in brackets.
type Timing struct {
	// StartPoll is the pause between looks at an engine that starts. [500 ms]
	StartPoll time.Duration
	// Poll is the pause between looks at one that serves. [2 s]
	Poll time.Duration
	// ProbeAfter is how long without a token before one is asked for. [30 s]
	ProbeAfter time.Duration
	// ProbeTime is how long that one may take. [15 s]
	ProbeTime time.Duration
	// NoProgress without a token is not ready. [60 s]
	NoProgress time.Duration
	// Stuck without a token is a restart. [5 min]
	Stuck time.Duration
	// Pause before a restart, doubled each time up to PauseMost. [1 s, 5 min]
	Pause, PauseMost time.Duration
	// Grace between SIGTERM and SIGKILL. [20 s]
	Grace time.Duration
}

func (t *Timing) fill() {
	for _, d := range []struct {
		v        *time.Duration
		fallback time.Duration
	}{
		{&t.StartPoll, 500 * time.Millisecond}, {&t.Poll, 2 * time.Second}, {&t.ProbeAfter, 30 * time.Second}, {&t.ProbeTime, 15 * time.Second},
		{&t.NoProgress, time.Minute}, {&t.Stuck, 5 * time.Minute}, {&t.Pause, time.Second}, {&t.PauseMost, 5 * time.Minute}, {&t.Grace, 20 * time.Second},
	} {
		if *d.v <= 0 {
			*d.v = d.fallback
		}
	}
}

const (
	// tries is how often an engine that was never ready is started.
	tries = 5
	// deadHealth times in a row a health check of 5xx is the engine's death.
	deadHealth = 3
	// gpuWait bounds the wait for empty GPUs before a restart.
	gpuWait = time.Minute
)

// Options of a Supervisor. Prepare, Mark, Output and Now are required.
type Options struct {
	// Prepare says how to start the engine; it is asked before each start.
	Prepare func() (Launch, error)
	// Mark tells this engine's processes from all others of the machine.
	Mark string
	// Output gets what the engine prints; LastLine is its last line, for messages.
	Output   io.Writer
	LastLine func() string
	// Traffic is what passed between clients and the engine: how many exchanges
	// are under way, and when a byte last came from the engine.
	Traffic func() (open int, last time.Time)
	// Changed is called after the status changed; it must not block.
	Changed func()
	Timing  Timing
	Log     hclog.Logger
	Now     func() time.Time
}

// State of the engine.
type State int

// The states.
const (
	Starting State = iota
	Ready
	// Lost was ready, and makes no progress now.
	Lost
	// Failed is given up.
	Failed
)

// Status is a moment's view.
type Status struct {
	State            State
	Message          string
	Running, Waiting uint32
	// ExitCode of the last engine that ended, and Ended how many did.
	ExitCode int
	Ended    int
	// Final: it is given up since its model does not exist or may not be had.
	Final bool
}

// Supervisor keeps an engine. It is safe for concurrent use.
type Supervisor struct {
	o Options

	mu     sync.Mutex
	status Status
	prober *prober // of the engine that runs and has been ready, else nil
}

// New makes a supervisor; Run starts the engine.
func New(o Options) *Supervisor {
	o.Timing.fill()
	if o.Traffic == nil {
		o.Traffic = func() (int, time.Time) { return 0, time.Time{} }
	}
	if o.LastLine == nil {
		o.LastLine = func() string { return "" }
	}
	if o.Changed == nil {
		o.Changed = func() {}
	}
	if o.Log == nil {
		o.Log = hclog.NewNullLogger()
	}
	return &Supervisor{o: o, status: Status{Message: "the engine was not started yet"}}
}

// Status is the newest view.
func (s *Supervisor) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status
}

func (s *Supervisor) change(f func(*Status)) {
	s.mu.Lock()
	before := s.status
	f(&s.status)
	after := s.status
	s.mu.Unlock()
	if before != after {
		if before.State != after.State {
			s.o.Log.Info("engine", "state", [...]string{"starting", "ready", "lost", "failed"}[after.State], "message", after.Message)
		}
		s.o.Changed()
	}
}

func (s *Supervisor) set(state State, format string, a ...any) {
	message := fmt.Sprintf(format, a...)
	s.change(func(st *Status) { st.State, st.Message = state, message })
}

// Dial connects to the engine. It is unavailable until the engine was ready.
func (s *Supervisor) Dial(ctx context.Context) (net.Conn, error) {
	s.mu.Lock()
	p := s.prober
	s.mu.Unlock()
	if p == nil {
		return nil, fault.New(fault.Unavailable, "the engine does not serve: %s", s.Status().Message)
	}
	conn, err := (&net.Dialer{Timeout: askTime}).DialContext(ctx, p.launch.Network, p.launch.Address)
	if err != nil {
		return nil, fault.Wrap(fault.Unavailable, err, "connect to the engine")
	}
	return conn, nil
}

// Families are the engine's own metrics, empty when it has none now.
func (s *Supervisor) Families(ctx context.Context) []*dto.MetricFamily {
	s.mu.Lock()
	p := s.prober
	s.mu.Unlock()
	if p == nil {
		return nil
	}
	families, err := p.families(ctx)
	if err != nil {
		return nil
	}
	var list []*dto.MetricFamily
	for name, f := range families {
		if strings.HasPrefix(name, "vllm:") {
			list = append(list, f)
		}
	}
	return list
}

// Run keeps the engine until ctx ends; then the engine is stopped with grace and
// nothing of it is left. It returns nil then, and also when it gave the engine
// up, which Status tells and which lasts until ctx ends.
func (s *Supervisor) Run(ctx context.Context) error {
	if left := sweep(s.o.Mark); left > 0 {
		s.o.Log.Warn("processes of an earlier engine could not be ended", "count", left)
	}
	failed, ever := 0, false
	for {
		ready, why, refusal := s.once(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if ever = ever || ready; ready {
			failed = 0
		}
		failed++
		if !ever && refusal != "" {
			s.change(func(st *Status) {
				st.State, st.Final = Failed, true
				st.Message = fmt.Sprintf("%s and its model cannot be had, so it is not started again; it said: %s", why, refusal)
			})
			<-ctx.Done()
			return nil
		}
		if !ever && failed >= tries {
			s.set(Failed, "%s, %d times and was never ready; it is not started again%s", why, failed, s.lastLine())
			<-ctx.Done()
			return nil
		}
		pause := min(s.o.Timing.Pause<<min(failed-1, 20), s.o.Timing.PauseMost)
		s.set(Starting, "%s; it is started again in %s%s", why, pause.Round(time.Millisecond), s.lastLine())
		if err := emptyGPUs(ctx, gpuWait); err != nil {
			s.o.Log.Warn("the GPUs are not empty before the restart", "reason", err)
		}
		if !sleep(ctx, pause) {
			return nil
		}
	}
}

func (s *Supervisor) lastLine() string {
	if line := s.o.LastLine(); line != "" {
		return "; it said: " + line
	}
	return ""
}

// once starts the engine and watches it to its end. refusal is the hub's word that the
// model cannot be had.
func (s *Supervisor) once(ctx context.Context) (wasReady bool, why, refusal string) {
	l, err := s.o.Prepare()
	if err != nil {
		return false, "the engine cannot be started: " + err.Error(), ""
	}
	s.set(Starting, "the engine starts")
	output := &hub{to: s.o.Output}
	p, err := launch(l, s.o.Mark, output)
	if err != nil {
		return false, "the engine cannot be started: " + err.Error(), ""
	}
	s.o.Log.Info("engine started", "program", l.Path, "pid", p.cmd.Process.Pid)
	w := &watch{s: s, p: p, prober: newProber(l), begun: s.o.Now()}
	why = w.run(ctx)
	s.mu.Lock()
	s.prober = nil
	s.mu.Unlock()
	if ctx.Err() != nil {
		s.set(Starting, "the engine is stopped")
		p.stop(context.WithoutCancel(ctx), s.o.Timing.Grace)
		return w.ready, "", ""
	}
	select {
	case <-p.exited:
		p.clear()
		why = "the engine " + p.ending()
	default: // it lives and was given up
		p.stop(ctx, s.o.Timing.Grace)
	}
	s.change(func(st *Status) {
		st.ExitCode, st.Running, st.Waiting = p.code(), 0, 0
		st.Ended++
	})
	return w.ready, why, output.refusal()
}

// watch looks at one running engine.
type watch struct {
	s      *Supervisor
	p      *process
	prober *prober
	begun  time.Time

	ready    bool // it has been, once
	healthy  bool // it has a health check that said 200 once
	dead     int  // health checks in a row that said 5xx
	tokens   float64
	progress time.Time // when a token last came
}

// run returns when the engine ended, ctx ended, or it must be restarted and why.
func (w *watch) run(ctx context.Context) string {
	ctx, cancel := context.WithCancel(ctx)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer cancel()
	tasks.Go(func() {
		select {
		case <-w.p.exited:
			cancel()
		case <-ctx.Done():
		}
	})
	for !w.started(ctx) {
		if !sleep(ctx, w.s.o.Timing.StartPoll) {
			return ""
		}
	}
	w.ready, w.progress = true, w.s.o.Now()
	w.s.mu.Lock()
	w.s.prober = w.prober
	w.s.mu.Unlock()
	w.s.set(Ready, "")
	probed := make(chan error, 1)
	probing, lastProbe := false, time.Time{}
	tick := time.NewTicker(w.s.o.Timing.Poll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ""
		case err := <-probed:
			probing = false
			if err == nil {
				w.progress = w.s.o.Now()
			} else if ctx.Err() == nil {
				w.s.o.Log.Debug("a token was asked for and did not come", "error", err)
			}
		case <-tick.C:
		}
		if why := w.look(ctx); why != "" {
			return why
		}
		now := w.s.o.Now()
		if !probing && now.Sub(w.progress) >= w.s.o.Timing.ProbeAfter && now.Sub(lastProbe) >= w.s.o.Timing.Poll {
			probing, lastProbe = true, now
			tasks.Go(func() {
				ask, cancel := context.WithTimeout(ctx, w.s.o.Timing.ProbeTime)
				defer cancel()
				probed <- w.prober.complete(ask)
			})
		}
	}
}

// started tells whether the engine answers: its own health, the model, one token.
func (w *watch) started(ctx context.Context) bool {
	status, err := w.prober.health(ctx)
	w.healthy = w.healthy || err == nil && status == 200
	if err == nil && (status == 200 || status == 404) {
		if err = w.prober.models(ctx); err == nil {
			ask, cancel := context.WithTimeout(ctx, time.Minute)
			err = w.prober.complete(ask)
			cancel()
		}
		if err == nil {
			return true
		}
	}
	if ctx.Err() == nil {
		w.s.set(Starting, "the engine starts, since %s%s", w.s.o.Now().Sub(w.begun).Round(5*time.Second), w.s.lastLine())
	}
	return false
}

// look takes load and progress in. A reason to restart is returned.
func (w *watch) look(ctx context.Context) string {
	o := w.s.o
	open, last := o.Traffic()
	l, ok := w.prober.load(ctx)
	if ok {
		if l.tokens != w.tokens {
			w.tokens, w.progress = l.tokens, o.Now()
		}
	} else {
		l.running, l.waiting = uint32(open), 0
	}
	if last.After(w.progress) {
		w.progress = last
	}
	if status, err := w.prober.health(ctx); w.healthy && err == nil && status >= 500 {
		if w.dead++; w.dead >= deadHealth {
			return fmt.Sprintf("the engine's health check said %d, %d times", status, w.dead)
		}
	} else {
		w.dead = 0
	}
	if ctx.Err() != nil {
		return ""
	}
	silent := o.Now().Sub(w.progress)
	w.s.change(func(st *Status) {
		st.Running, st.Waiting = l.running, l.waiting
		if silent < o.Timing.NoProgress {
			st.State, st.Message = Ready, ""
		} else {
			st.State = Lost
			st.Message = fmt.Sprintf("no progress: no token for over %s, %d requests run and %d wait", o.Timing.NoProgress, l.running, l.waiting)
		}
	})
	if silent >= o.Timing.Stuck {
		return fmt.Sprintf("the engine made no progress for %s", o.Timing.Stuck)
	}
	return ""
}

// sleep waits, false when the context ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
