package daemon

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/health"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/log"
	"github.com/cosmicac/cosmicac/pkg/store/dirlock"
	"github.com/cosmicac/cosmicac/pkg/trust"
)

// Version is the software's version, set by the linker.
var Version = "dev"

// Exit codes of a daemon.
const (
	exitFatal  = 1
	exitConfig = 2
)

// Main runs a daemon and exits. Defaults gives every key its default; base finds
// the common part of a configuration; run wires the service. A configuration may
// be a Validator.
func Main[C any](service string, defaults func() C, base func(*C) *Base, run func(ctx context.Context, env *Env, cfg C) error) {
	KeepHeapRoom()
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	// The clean-up is the exit: everything that matters was stopped in order.
	os.Exit(start(process{
		service: service, args: os.Args[1:], environ: os.Environ(), stdout: os.Stdout, stderr: os.Stderr, signals: signals, globals: true,
	}, defaults, base, run))
}

// process is what a daemon has of its surroundings.
type process struct {
	service        string
	args           []string
	environ        []string
	stdout, stderr io.Writer
	signals        <-chan os.Signal
	// globals lets it take the process-wide loggers.
	globals bool
}

func (p process) complain(err error) {
	fmt.Fprintf(p.stderr, "cosmicac-%s: %s\n", p.service, inWords(err, "\n  "))
}

// inWords is an error with its details.
func inWords(err error, separator string) string {
	text := err.Error()
	for _, d := range fault.DetailsOf(err) {
		if d.Field != "reason" && !strings.Contains(text, d.Rule) {
			text += separator + d.Field + ": " + d.Rule
		}
	}
	return text
}

// start is Main without the exit.
func start[C any](p process, defaults func() C, base func(*C) *Base, run func(context.Context, *Env, C) error) int {
	startedAt := time.Now()
	flags := flag.NewFlagSet("cosmicac-"+p.service, flag.ContinueOnError)
	flags.SetOutput(p.stderr)
	path := flags.String("config", "", "configuration `FILE` (default /etc/cosmicac/"+p.service+".yaml, if there is one)")
	check := flags.Bool("check-config", false, "check the configuration and exit")
	version := flags.Bool("version", false, "print the version and exit")
	if err := flags.Parse(p.args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return exitConfig
	}
	if flags.NArg() > 0 {
		p.complain(fault.New(fault.Invalid, "unexpected argument %q", flags.Arg(0)))
		return exitConfig
	}
	if *version {
		fmt.Fprintf(p.stdout, "cosmicac-%s %s %s\n", p.service, Version, runtime.Version())
		return 0
	}
	required := *path != ""
	if !required {
		*path = filepath.Join("/etc/cosmicac", p.service+".yaml")
	}
	cfg, unused, err := loadConfig(p.service, *path, required, p.environ, defaults, base)
	if err != nil {
		p.complain(err)
		return exitConfig
	}
	if *check {
		fmt.Fprintf(p.stdout, "%s: the configuration is good\n", *path)
		return 0
	}
	e, lock, err := prepare(p, *base(&cfg), startedAt)
	if err != nil {
		p.complain(err)
		return exitFatal
	}
	defer func() { _ = lock.Unlock() }()
	defer func() { _ = e.log.Close() }()
	if len(unused) > 0 {
		e.Log.Info("environment variables that name no key of this daemon", "variables", unused)
	}
	return e.live(p, func(ctx context.Context) error { return run(ctx, e, cfg) })
}

// prepare opens everything that a daemon has before its service runs, in the order
// that the package comment gives.
func prepare(p process, b Base, startedAt time.Time) (*Env, *dirlock.Lock, error) {
	if err := openState(b.StateDirectory); err != nil {
		return nil, nil, err
	}
	// The lock comes before everything that writes: two processes of one folder
	// would be two of one key.
	lock, err := dirlock.Take(b.StateDirectory, "daemon.lock")
	if err != nil {
		return nil, nil, err
	}
	e, err := prepareLocked(p, b, startedAt)
	if err != nil {
		_ = lock.Unlock()
		return nil, nil, err
	}
	return e, lock, nil
}

func prepareLocked(p process, b Base, startedAt time.Time) (*Env, error) {
	lines, err := log.Open(p.service, b.Log, p.stderr, log.NewRing(0))
	if err != nil {
		return nil, err
	}
	fail := func(err error) (*Env, error) { _ = lines.Close(); return nil, err }
	if p.globals {
		log.TakeGlobals(lines.Logger())
	}
	key, err := identity.LoadOrCreate(filepath.Join(b.StateDirectory, KeyFile))
	if err != nil {
		return fail(err)
	}
	network, err := trust.OpenDirectory(b.Mesh.NetworkDirectory)
	if fault.Is(err, fault.NotFound) {
		err = fault.New(fault.NotFound, "%s (this daemon's key is %s)", err, key.ID())
	}
	if err != nil {
		return fail(err)
	}
	if err := bind(b.StateDirectory, key, network); err != nil {
		return fail(err)
	}
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	e := &Env{
		Service: p.service, Name: b.Name, Log: lines.Logger(), Key: key, Network: network, StateDirectory: b.StateDirectory,
		Health: health.NewSet(nil), Metrics: metrics, Version: Version, StartedAt: startedAt,
		base: b, log: lines, clock: time.Now, beats: make(map[string]*beat), fatal: make(chan error, 1), changed: make(chan struct{}, 1),
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "cosmicac_build_info", Help: "Always 1; its labels say what runs.",
		ConstLabels: prometheus.Labels{"service": p.service, "version": Version, "goversion": runtime.Version()},
	})
	info.Set(1)
	metrics.MustRegister(info,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "cosmicac_ready", Help: "1 while the daemon serves."}, func() float64 {
			if e.IsReady() {
				return 1
			}
			return 0
		}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "cosmicac_warnings", Help: "Health warnings that hold."}, func() float64 {
			return float64(len(e.Health.List()))
		}))
	return e, nil
}

// live runs the service until something ends it, then stops it in order. It
// returns the exit code.
func (e *Env) live(p process, run func(context.Context) error) int {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	returned := make(chan error, 1)
	go func() { returned <- e.guard(ctx, "run", run) }()

	cause, runs := e.loop(p.signals, returned)
	wasReady := e.ready.Swap(false)
	notify(sd.SdNotifyStopping)
	if cause == nil {
		e.Log.Info("stopping")
	}

	finished := make(chan error, 1)
	go func() {
		deadline, done := context.WithTimeout(context.Background(), StopTime)
		defer done()
		cancel()
		if runs {
			select {
			case <-returned:
			case <-deadline.Done():
				finished <- fault.New(fault.Timeout, "stopping takes longer than %s: the service's run does not end", StopTime)
				return
			}
		}
		finished <- e.unwind(deadline)
	}()
	var late error
	for waiting := true; waiting; {
		select {
		case late = <-finished:
			waiting = false
		case s := <-p.signals:
			if s != syscall.SIGHUP {
				fmt.Fprintf(p.stderr, "cosmicac-%s: %s again: exiting at once\n", p.service, s)
				return exitFatal
			}
		}
	}
	now := e.clock()
	e.writeStatus(&now)
	switch {
	case cause != nil:
		e.Log.Error("ended by an error", "error", inWords(cause, "; "))
		if !wasReady && !runs && fault.Is(cause, fault.Invalid) {
			return exitConfig // run refused its configuration
		}
		return exitFatal
	case late != nil:
		e.Log.Error("ended before all was stopped", "error", late)
		return exitFatal
	}
	e.Log.Info("stopped")
	return 0
}

func notify(state string) { _, _ = sd.SdNotify(false, state) }
