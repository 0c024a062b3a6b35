// Package config turns the command line of the development cluster into checked options. Every refusal names the flag
// and the rule. It starts nothing and touches no file except to see that given folders exist.
package config

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Account asks for a kubeconfig of one service account.
type Account struct {
	Namespace string
	Name      string
	File      string
}

// Key is the account as namespace/name.
func (a Account) Key() string { return a.Namespace + "/" + a.Name }

// Options is everything `up` can be told.
type Options struct {
	Dir       string    // state folder
	Port      int       // API server port, 0 for a free one that is remembered
	Pools     []Pool    // simulated nodes
	AgentDir  string    // local folder served as the agent disk, empty for none
	Manifests string    // folder of YAML to apply, empty for none
	Accounts  []Account // kubeconfigs to write
	Binds     []string  // host folders shown read-only in every simulated VM

	ImportTime time.Duration // simulated import of a disk image
	BootTime   time.Duration // simulated boot of a VM, from Scheduled to Running
	PodTime    time.Duration // simulated start of a pod on its node

	QPS             int    // simulator's request limit against the API server, 0 for none
	Fsync           bool   // etcd syncs to disk, slower but survives a power cut
	KeepVMs         bool   // leave VM processes running at a clean stop
	Plain           bool   // run VM processes without namespaces even where they are permitted
	PlayVMs         bool   // no process for a VM: it only says that it runs
	APIProxy        bool   // kubeconfigs of accounts lead through the proxy that makes API faults
	StopOnStdinEOF  bool   // stop when standard input closes
	LogLevel        string // trace, debug, info, warn, error
	MemoryLimitMiB  int    // soft memory limit of the process, 0 for none
	KubernetesTrace bool   // show the control plane's own log lines at info level

	Switched func(map[string]string) // hears the fault switches as they are read; not a flag
}

type repeated struct {
	set func(string) error
}

func (r repeated) String() string     { return "" }
func (r repeated) Set(s string) error { return r.set(s) }

// ErrHelp says that usage was asked for and printed.
var ErrHelp = flag.ErrHelp

// ParseUp reads the arguments after `up`. Usage goes to out only when asked for.
func ParseUp(args []string, out io.Writer) (Options, error) {
	var o Options
	fs := flag.NewFlagSet("up", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.StringVar(&o.Dir, "dir", "", "state folder (required)")
	fs.IntVar(&o.Port, "port", 0, "port of the API server on 127.0.0.1; 0 takes a free one and remembers it in the state folder")
	fs.Var(repeated{func(s string) error {
		p, err := ParsePool(s)
		o.Pools = append(o.Pools, p)
		return err
	}}, "pool", "simulated nodes: name=,nodes=,gpus=,resource=[,pci=][,cpus=][,memory=]; repeatable")
	fs.StringVar(&o.AgentDir, "agent-dir", "", "local folder that simulated VMs see as the agent disk at /run/cosmicac/agent")
	fs.StringVar(&o.Manifests, "manifests", "", "folder whose *.yaml files are applied at start")
	fs.Var(repeated{func(s string) error {
		a, err := parseAccount(s)
		o.Accounts = append(o.Accounts, a)
		return err
	}}, "kubeconfig-for", "NAMESPACE/SERVICEACCOUNT=FILE, writes a kubeconfig with a token of that account; repeatable")
	fs.Var(repeated{func(s string) error {
		if !filepath.IsAbs(s) {
			return fmt.Errorf("want an absolute folder, got %q", s)
		}
		o.Binds = append(o.Binds, filepath.Clean(s))
		return nil
	}}, "vm-bind", "host folder shown read-only at the same path in every simulated VM; repeatable")
	fs.DurationVar(&o.ImportTime, "import-time", 1500*time.Millisecond, "simulated duration of a disk import")
	fs.DurationVar(&o.BootTime, "boot-time", time.Second, "simulated duration of a VM's boot")
	fs.DurationVar(&o.PodTime, "pod-time", 200*time.Millisecond, "simulated duration of a pod's start")
	fs.IntVar(&o.QPS, "qps", 0, "requests a second the simulator may send; 0 for no limit")
	fs.BoolVar(&o.Fsync, "fsync", false, "let etcd sync to disk; without it a power cut may lose data, a kill does not")
	fs.BoolVar(&o.KeepVMs, "keep-vms", false, "leave simulated VMs running at a clean stop; without it they power off and come back at the next start")
	fs.BoolVar(&o.Plain, "plain-vms", false, "run simulated VMs as plain processes even where namespaces are permitted")
	fs.BoolVar(&o.PlayVMs, "play-vms", false, "simulated VMs have no process: they say Running, and no agent runs in them; for hundreds of VMs on a small machine")
	fs.BoolVar(&o.APIProxy, "api-proxy", false, "let the kubeconfigs of --kubeconfig-for lead through a proxy that makes API faults")
	fs.BoolVar(&o.StopOnStdinEOF, "stop-on-stdin-close", false, "stop when standard input closes")
	fs.StringVar(&o.LogLevel, "log-level", "info", "trace, debug, info, warn or error")
	fs.IntVar(&o.MemoryLimitMiB, "memory-limit", autoMemory, "soft memory limit in MiB; 0 for none, -1 for one that grows with the number of nodes")
	fs.BoolVar(&o.KubernetesTrace, "kubernetes-log", false, "show the control plane's own log lines at info level")

	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(out, "usage: cosmicac-devcluster up --dir DIR [flags]")
			fs.SetOutput(out)
			fs.PrintDefaults()
			return Options{}, ErrHelp
		}
		return Options{}, tidy(err)
	}
	if fs.NArg() > 0 {
		return Options{}, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	return o.checked()
}

// tidy turns the flag package's words into ours: two hyphens, and nothing about the Go type that refused.
func tidy(err error) error {
	s := err.Error()
	if rest, ok := strings.CutPrefix(s, "flag provided but not defined: -"); ok {
		return fmt.Errorf("unknown flag --%s", strings.TrimPrefix(rest, "-"))
	}
	for _, kind := range []string{"invalid value ", "invalid boolean value "} {
		rest, ok := strings.CutPrefix(s, kind)
		if !ok {
			continue
		}
		if i := strings.Index(rest, " for flag -"); i >= 0 {
			value, rest := rest[:i], rest[i+len(" for flag -"):]
			name, why, _ := strings.Cut(rest, ": ")
			if why == "" || why == "parse error" {
				why = "cannot be read"
			}
			return fmt.Errorf("--%s %s: %s", name, value, why)
		}
	}
	return errors.New(strings.Replace(s, "flag needs an argument: -", "a value is missing for --", 1))
}

func (o Options) checked() (Options, error) {
	if o.Dir == "" {
		return o, errors.New("--dir is required")
	}
	abs, err := filepath.Abs(o.Dir)
	if err != nil {
		return o, fmt.Errorf("--dir %q: %w", o.Dir, err)
	}
	o.Dir = abs
	if o.Port < 0 || o.Port > 65535 {
		return o, fmt.Errorf("--port must be from 0 to 65535, got %d", o.Port)
	}
	if len(o.Pools) == 0 {
		o.Pools = DefaultPools()
	}
	if err := checkPools(o.Pools); err != nil {
		return o, fmt.Errorf("--pool: %w", err)
	}
	for _, d := range []struct {
		flag string
		path *string
	}{{"--agent-dir", &o.AgentDir}, {"--manifests", &o.Manifests}} {
		if *d.path == "" {
			continue
		}
		if *d.path, err = filepath.Abs(*d.path); err != nil {
			return o, fmt.Errorf("%s: %w", d.flag, err)
		}
		if fi, err := os.Stat(*d.path); err != nil || !fi.IsDir() {
			return o, fmt.Errorf("%s must be an existing folder, got %q", d.flag, *d.path)
		}
	}
	for _, b := range o.Binds {
		if fi, err := os.Stat(b); err != nil || !fi.IsDir() {
			return o, fmt.Errorf("--vm-bind must be an existing folder, got %q", b)
		}
	}
	for _, d := range []struct {
		flag  string
		value time.Duration
	}{{"--import-time", o.ImportTime}, {"--boot-time", o.BootTime}, {"--pod-time", o.PodTime}} {
		if d.value < 0 || d.value > time.Hour {
			return o, fmt.Errorf("%s must be from 0 to 1h, got %s", d.flag, d.value)
		}
	}
	if o.QPS < 0 || o.QPS > 1_000_000 {
		return o, fmt.Errorf("--qps must be from 0 to 1000000, got %d", o.QPS)
	}
	if o.MemoryLimitMiB == autoMemory {
		o.MemoryLimitMiB = memoryFor(o.Pools)
	}
	if o.MemoryLimitMiB != 0 && (o.MemoryLimitMiB < 256 || o.MemoryLimitMiB > 1<<20) {
		return o, fmt.Errorf("--memory-limit must be -1, 0 or from 256 to %d, got %d", 1<<20, o.MemoryLimitMiB)
	}
	switch o.LogLevel {
	case "trace", "debug", "info", "warn", "error":
	default:
		return o, fmt.Errorf("--log-level must be trace, debug, info, warn or error, got %q", o.LogLevel)
	}
	return o, nil
}

// autoMemory asks for a limit that fits the pools.
const autoMemory = -1

// memoryFor leaves room for the watch caches of VMs on every node: a limit below the live heap would make the
// collector run all the time.
func memoryFor(pools []Pool) int {
	nodes := 0
	for _, p := range pools {
		nodes += p.Nodes
	}
	return 640 + 5*max(0, nodes-20)
}

func parseAccount(s string) (Account, error) {
	key, file, ok := strings.Cut(s, "=")
	ns, name, ok2 := strings.Cut(key, "/")
	if !ok || !ok2 || ns == "" || name == "" || file == "" || strings.Contains(name, "/") {
		return Account{}, fmt.Errorf("want NAMESPACE/SERVICEACCOUNT=FILE, got %q", s)
	}
	abs, err := filepath.Abs(file)
	if err != nil {
		return Account{}, err
	}
	return Account{Namespace: ns, Name: name, File: abs}, nil
}
