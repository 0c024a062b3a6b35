// Package app wires the development cluster together and holds its life: start order, the line that says it is ready,
// and the stop. It decides nothing about Kubernetes or machines itself.
package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"
	"k8s.io/klog/v2"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/apiproxy"
	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/bootstrap"
	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/config"
	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/controlplane"
	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/fault"
	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/guest"
	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/logs"
	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/sim"
)

const usage = `usage: cosmicac-devcluster up --dir DIR [flags]
       cosmicac-devcluster fault list|set|clear --dir DIR ...

"up" runs a Kubernetes control plane with simulated GPU nodes until it gets SIGTERM; "up --help" lists the flags.
"fault" switches simulated faults of a running cluster.
`

// Exit codes.
const (
	exitOK    = 0
	exitFail  = 1
	exitUsage = 2
)

// vmGrace is how long simulated VMs may take to power off at a clean stop; the whole stop stays under ten seconds.
const vmGrace = 4 * time.Second

// Main runs a command line and returns the exit code.
func Main(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		fmt.Fprint(stderr, usage)
		return exitUsage
	}
	switch args[0] {
	case "up":
		return up(args[1:], stdin, stdout, stderr)
	case "fault":
		err := fault.Command(context.Background(), args[1:], stdout)
		switch {
		case errors.Is(err, fault.ErrUsage):
			fmt.Fprintf(stderr, "cosmicac-devcluster: fault: %v\n", err)
			return exitUsage
		case err != nil:
			fmt.Fprintf(stderr, "cosmicac-devcluster: fault: %v\n", err)
			return exitFail
		}
		return exitOK
	case "vm-init":
		return guest.Init(args[1:])
	case "help", "-h", "--help":
		fmt.Fprint(stdout, usage)
		return exitOK
	default:
		fmt.Fprintf(stderr, "cosmicac-devcluster: unknown command %q\n%s", args[0], usage)
		return exitUsage
	}
}

func up(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	o, err := config.ParseUp(args, stdout)
	if errors.Is(err, config.ErrHelp) {
		return exitOK
	}
	if err != nil {
		fmt.Fprintf(stderr, "cosmicac-devcluster: %v\n", err)
		return exitUsage
	}
	lock, code, err := claim(o.Dir)
	if err != nil {
		fmt.Fprintf(stderr, "cosmicac-devcluster: %v\n", err)
		return code
	}
	defer lock.Close()

	log := hclog.New(&hclog.LoggerOptions{Name: "devcluster", Output: stderr, Level: hclog.LevelFromString(o.LogLevel)})
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		cancel(fmt.Errorf("got %s", <-signals))
		<-signals // a second one means now
		os.Exit(exitFail)
	}()
	if o.StopOnStdinEOF {
		go func() {
			_, _ = io.Copy(io.Discard, stdin)
			cancel(errors.New("standard input closed"))
		}()
	}
	if err := run(ctx, o, stdout, log); err != nil {
		log.Error("cluster failed", "error", err)
		return exitFail
	}
	return exitOK
}

// claim makes the state folder and takes its lock, which the kernel lets go however this process ends.
func claim(dir string) (*os.File, int, error) {
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, exitUsage, fmt.Errorf("--dir must be a writable folder: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, exitUsage, fmt.Errorf("--dir must be a writable folder: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return nil, exitFail, fmt.Errorf("--dir %s: another development cluster runs on this folder", dir)
	}
	return f, exitOK, nil
}

// ready is the one line on standard output.
type ready struct {
	Kubeconfig  string            `json:"kubeconfig"`
	URL         string            `json:"url"`
	CAFile      string            `json:"ca_file"`
	PID         int               `json:"pid"`
	Kubeconfigs map[string]string `json:"kubeconfigs"`
}

// run starts the parts, each on what came before: control plane, definitions, machines, simulator, and only then the
// caller's manifests and accounts, so that whoever reads the ready line finds everything in place.
func run(ctx context.Context, o config.Options, stdout io.Writer, log hclog.Logger) error {
	began := time.Now()
	// The control plane's caches double its memory at Go's default pace; half the slack costs a tenth more CPU. With many
	// nodes it is a quarter, and the limit is what bounds memory.
	debug.SetGCPercent(gcPercent(o.Pools))
	if o.MemoryLimitMiB > 0 {
		debug.SetMemoryLimit(int64(o.MemoryLimitMiB) << 20)
	}
	libraries := logs.New(log.Named("kubernetes"), o.KubernetesTrace)
	klog.SetLogger(libraries)
	ctrllog.SetLogger(libraries)

	cp, err := controlplane.Start(ctx, controlplane.Options{Dir: o.Dir, Port: o.Port, Fsync: o.Fsync, Log: log.Named("controlplane")})
	if err != nil {
		return stopped(ctx, err)
	}
	defer cp.Stop()
	log.Info("control plane is ready", "url", cp.URL, "after", time.Since(began).Round(time.Millisecond))

	boot, err := bootstrap.New(cp.Config(controlplane.Simulator), log.Named("bootstrap"))
	if err != nil {
		return err
	}
	if err := boot.Base(ctx, o.Pools); err != nil {
		return stopped(ctx, err)
	}

	server := cp.URL
	if o.APIProxy {
		proxy, err := startProxy(cp, o, log.Named("apiproxy"))
		if err != nil {
			return err
		}
		defer proxy.Stop()
		o.Switched, server = proxy.Set, proxy.URL
	} else if err := os.Remove(filepath.Join(o.Dir, fault.ProxyPort)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forget the API proxy of a run before: %w", err)
	}

	machines, err := guest.New(guest.Options{Dir: o.Dir, AgentDir: o.AgentDir, Binds: o.Binds, Plain: o.Plain, Played: o.PlayVMs, Log: log.Named("vm")})
	if err != nil {
		return err
	}
	defer machines.Close(o.KeepVMs, vmGrace)

	simulator, err := sim.Start(ctx, cp.Config(controlplane.Simulator), machines, o, log.Named("simulated"))
	if err != nil {
		return stopped(ctx, err)
	}
	defer simulator.Stop()

	if o.Manifests != "" {
		if err := boot.Manifests(ctx, o.Manifests); err != nil {
			return stopped(ctx, err)
		}
	}
	kubeconfigs, err := boot.Accounts(ctx, server, o.Accounts)
	if err != nil {
		return stopped(ctx, err)
	}
	admin := filepath.Join(o.Dir, "admin.kubeconfig")
	if err := boot.Kubeconfig(admin, cp.URL, "admin", cp.Config(controlplane.Admin).BearerToken, "default"); err != nil {
		return err
	}
	line, err := json.Marshal(ready{Kubeconfig: admin, URL: cp.URL, CAFile: cp.CAFile, PID: os.Getpid(), Kubeconfigs: kubeconfigs})
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(stdout, "%s\n", line); err != nil {
		return fmt.Errorf("say that the cluster is ready: %w", err)
	}
	debug.FreeOSMemory() // the start left much garbage
	log.Info("cluster is ready; its nodes and vms are simulated", "after", time.Since(began).Round(time.Millisecond))

	select {
	case <-ctx.Done():
		log.Info("stopping", "why", context.Cause(ctx))
		return nil
	case err := <-cp.Died():
		return err
	case err := <-simulator.Died():
		return err
	}
}

// startProxy puts the fault-making proxy before the API server, at the same port in every run.
func startProxy(cp *controlplane.ControlPlane, o config.Options, log hclog.Logger) (*apiproxy.Proxy, error) {
	listener, err := controlplane.Listen(filepath.Join(o.Dir, fault.ProxyPort), 0)
	if err != nil {
		return nil, err
	}
	p, err := apiproxy.Start(apiproxy.Options{
		Listener: listener, Server: cp.URL, CAFile: cp.CAFile, CertFile: cp.CAFile, KeyFile: strings.TrimSuffix(cp.CAFile, ".crt") + ".key", Log: log,
	})
	if err != nil {
		listener.Close()
	}
	return p, err
}

// stopped turns a failure that only came from being asked to stop into none.
func stopped(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

func gcPercent(pools []config.Pool) int {
	nodes := 0
	for _, p := range pools {
		nodes += p.Nodes
	}
	if nodes > 50 {
		return 100
	}
	return 50
}
