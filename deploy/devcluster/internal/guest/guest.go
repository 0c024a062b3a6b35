// Package guest runs simulated virtual machines as local processes. A machine is a small init process (the same binary,
// see Init) that starts the one agent unit of its seed and nothing else. Where the kernel permits, it has mount, UTS,
// IPC and PID namespaces and a root folder of its own; the network is the host's.
//
// It is no security boundary: the processes run as this user, mostly root, and share the kernel, the network and the
// devices. There are no GPUs. It knows nothing of Kubernetes; package sim tells it what to run.
//
// Machines outlive this process. Each has a folder named by its id with all that is known of it, so that a later
// process finds them again by reading the folder.
package guest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/cloudinit"
)

// Machine says what to run. It is kept in the machine's folder and read back by Init.
type Machine struct {
	ID       string          `json:"id"` // the VMI's uid
	Name     string          `json:"name"`
	Hostname string          `json:"hostname"`
	User     string          `json:"user"`           // the image's default user
	Unit     *cloudinit.Unit `json:"unit,omitempty"` // nil: the machine only sleeps
	Disk     string          `json:"disk,omitempty"` // id of the root disk, which outlives the machine; empty for none
	AgentDir string          `json:"agentDir,omitempty"`
	Volumes  []Volume        `json:"volumes,omitempty"`
	Binds    []string        `json:"binds,omitempty"`
	Isolated bool            `json:"isolated"`
	Played   bool            `json:"played,omitempty"` // has no process

	Files []cloudinit.File `json:"-"` // written at the start, not kept
}

// State is what is known of a machine now.
type State struct {
	Exists  bool
	Running bool
	Code    int    // exit code when not running; 0 is a clean power-off
	Reason  string // in words, when not running
}

// Runtime holds the machines of one state folder.
type Runtime struct {
	dir      string // holds vms and disks
	agentDir string
	binds    []string
	isolated bool
	played   bool
	self     string
	log      hclog.Logger

	mu      sync.Mutex
	vms     map[string]*vm
	changed chan string
	closed  chan struct{}
	wg      sync.WaitGroup
}

type vm struct {
	m        Machine
	proc     process
	running  bool
	exit     exitRecord
	stopping bool
	kill     *time.Timer
}

// exitRecord is written by a machine's init as its last act. A machine without one was killed.
type exitRecord struct {
	Code   int    `json:"code"`
	Reason string `json:"reason"`
}

const (
	specFile      = "vm.json"
	processFile   = "process.json"
	exitFile      = "exit.json"
	suspendedFile = "suspended" // a clean stop of the cluster switched the machine off; it comes back
	rootName      = "root"
	consoleFile   = "console.log"
)

// Options of a Runtime.
type Options struct {
	Dir      string   // state folder
	AgentDir string   // served as the agent disk
	Binds    []string // host folders shown read-only in machines
	Plain    bool     // no namespaces
	Played   bool     // no process at all: a machine only says that it runs
	Log      hclog.Logger
}

// New opens the machines of a state folder and finds those that still run.
func New(o Options) (*Runtime, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find own binary: %w", err)
	}
	r := &Runtime{
		dir: o.Dir, agentDir: o.AgentDir, binds: o.Binds, self: self, played: o.Played, log: o.Log,
		vms: map[string]*vm{}, changed: make(chan string, 4096), closed: make(chan struct{}),
	}
	for _, d := range []string{"vms", "disks"} {
		if err := os.MkdirAll(filepath.Join(o.Dir, d), 0o711); err != nil {
			return nil, fmt.Errorf("make the machine folder: %w", err)
		}
	}
	if o.Played {
		r.log.Info("simulated vms are only played, as asked: they have no process, and no agent runs in them")
	} else if o.Plain {
		r.log.Info("simulated vms run as plain processes, as asked")
	} else if err := probe(self); err != nil {
		r.log.Warn("simulated vms run as plain processes with rewritten paths: namespaces are not permitted here", "error", err)
	} else {
		r.isolated = true
	}
	if err := r.adopt(); err != nil {
		return nil, err
	}
	r.wg.Add(1)
	go r.watch()
	return r, nil
}

// Changed yields the ids of machines that started or ended. A burst may drop ids: it is a hint, State is the truth.
func (r *Runtime) Changed() <-chan string { return r.changed }

// adopt reads every machine folder. A machine that runs is taken over as it is. One that was switched off with the
// cluster, or vanished with the host, is started again with the same root; one that ended keeps its end.
func (r *Runtime) adopt() error {
	entries, err := os.ReadDir(filepath.Join(r.dir, "vms"))
	if err != nil {
		return fmt.Errorf("read the machine folder: %w", err)
	}
	for _, e := range entries {
		dir := filepath.Join(r.dir, "vms", e.Name())
		var m Machine
		if err := readJSON(filepath.Join(dir, specFile), &m); err != nil || m.ID != e.Name() {
			// A start that was cut short before its record was whole; there is no process behind it.
			r.log.Warn("simulated vm folder without a record is removed", "dir", dir)
			os.RemoveAll(dir)
			continue
		}
		v := &vm{m: m}
		r.vms[m.ID] = v
		if m.Played {
			v.running = readJSON(filepath.Join(dir, exitFile), &v.exit) != nil
			continue
		}
		if readJSON(filepath.Join(dir, processFile), &v.proc) == nil && v.proc.alive() {
			v.running = true
			r.log.Info("simulated vm still runs and is adopted", "vm", m.Name, "pid", v.proc.PID)
			continue
		}
		_, suspended := os.Stat(filepath.Join(dir, suspendedFile))
		if suspended != nil && readJSON(filepath.Join(dir, exitFile), &v.exit) == nil {
			continue
		}
		r.log.Info("simulated vm is started again with the same state", "vm", m.Name)
		if err := r.launch(v); err != nil {
			r.log.Error("simulated vm does not start", "vm", m.Name, "error", err)
			v.exit = exitRecord{Code: 1, Reason: err.Error()}
		}
	}
	return nil
}

// Start runs a machine. It is idempotent: a machine that was started before, running or ended, is left alone.
func (r *Runtime) Start(m Machine) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.vms[m.ID]; ok {
		return nil
	}
	if r.played {
		return r.play(m)
	}
	m.Isolated, m.Binds = r.isolated, r.binds
	if m.AgentDir != "" {
		m.AgentDir = r.agentDir
	}
	dir := r.folder(m.ID)
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return fmt.Errorf("make the folder of vm %s: %w", m.Name, err)
	}
	if err := r.makeRoot(m); err != nil {
		return fmt.Errorf("make the root of vm %s: %w", m.Name, err)
	}
	if err := r.makeVolumes(&m); err != nil {
		return fmt.Errorf("make the volumes of vm %s: %w", m.Name, err)
	}
	if err := writeJSON(filepath.Join(dir, specFile), m); err != nil {
		return err
	}
	v := &vm{m: m}
	if err := r.launch(v); err != nil {
		return fmt.Errorf("start vm %s: %w", m.Name, err)
	}
	r.vms[m.ID] = v
	r.log.Info("simulated vm started", "vm", m.Name, "pid", v.proc.PID, "agent", m.Unit != nil)
	r.hint(m.ID)
	return nil
}

// launch starts the init process of a machine whose folder is whole. The child waits on a pipe until its process
// record is on disk, and ends if the pipe closes first: however this process dies, there is either a record or no
// machine.
func (r *Runtime) launch(v *vm) error {
	dir := r.folder(v.m.ID)
	for _, f := range []string{exitFile, suspendedFile, processFile} {
		if err := os.Remove(filepath.Join(dir, f)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := prepareRoot(filepath.Join(dir, rootName), v.m, r.log); err != nil {
		return err
	}
	gateR, gateW, err := os.Pipe()
	if err != nil {
		return err
	}
	defer gateW.Close()
	console, err := os.OpenFile(filepath.Join(dir, consoleFile), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		gateR.Close()
		return err
	}
	defer console.Close()
	cmd := exec.Command(r.self, "vm-init", dir)
	cmd.Args[0] = "cosmicac-simulated-vm"
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "GOGC=20", "GOMAXPROCS=2"}
	cmd.Stdout, cmd.Stderr = console, console
	cmd.ExtraFiles = []*os.File{gateR}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if v.m.Isolated {
		cmd.SysProcAttr.Cloneflags = namespaces
	}
	err = cmd.Start()
	gateR.Close()
	if err != nil {
		return err
	}
	go cmd.Wait() // reaps; the watch sees the end by itself, as it must for adopted machines
	p, err := identify(cmd.Process.Pid)
	if err != nil {
		return err
	}
	if err := writeJSON(filepath.Join(dir, processFile), p); err != nil {
		return err
	}
	if _, err := gateW.Write([]byte{1}); err != nil {
		return fmt.Errorf("let the machine go: %w", err)
	}
	v.proc, v.running, v.stopping, v.exit = p, true, false, exitRecord{}
	return nil
}

// State says how a machine is.
func (r *Runtime) State(id string) State {
	r.mu.Lock()
	defer r.mu.Unlock()
	v, ok := r.vms[id]
	if !ok {
		return State{}
	}
	return State{Exists: true, Running: v.running, Code: v.exit.Code, Reason: v.exit.Reason}
}

// Name is what a machine was called at its start; empty for none of this id.
func (r *Runtime) Name(id string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if v, ok := r.vms[id]; ok {
		return v.m.Name
	}
	return ""
}

// IDs lists all machines, running or ended.
func (r *Runtime) IDs() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var ids []string
	for id := range r.vms {
		ids = append(ids, id)
	}
	return ids
}

// Shutdown presses the power button: SIGTERM now, SIGKILL after grace. It returns at once and may be repeated; the
// first call sets the time.
func (r *Runtime) Shutdown(id string, grace time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v, ok := r.vms[id]
	if !ok || !v.running || v.stopping {
		return
	}
	if v.m.Played {
		r.stopPlaying(v)
		return
	}
	v.stopping = true
	r.log.Info("simulated vm is asked to power off", "vm", v.m.Name, "grace", grace)
	proc, isolated := v.proc, v.m.Isolated
	proc.signal(syscall.SIGTERM)
	v.kill = time.AfterFunc(grace, func() {
		if proc.alive() {
			r.log.Warn("simulated vm did not power off in its grace time and is killed", "vm", v.m.Name)
			proc.kill(isolated)
		}
	})
}

// Remove kills a machine if it still runs, and forgets it with its folder. Its root disk, if it had one, stays.
func (r *Runtime) Remove(id string) error {
	r.mu.Lock()
	v, ok := r.vms[id]
	delete(r.vms, id)
	r.mu.Unlock()
	if !ok {
		return nil
	}
	if v.kill != nil {
		v.kill.Stop()
	}
	if v.proc.alive() {
		v.proc.kill(v.m.Isolated)
		for i := 0; i < 100 && v.proc.alive(); i++ {
			time.Sleep(20 * time.Millisecond)
		}
	}
	r.log.Info("simulated vm is gone", "vm", v.m.Name)
	if err := os.RemoveAll(r.folder(id)); err != nil {
		return fmt.Errorf("remove the folder of vm %s: %w", v.m.Name, err)
	}
	return nil
}

// RemoveDisk drops a root disk.
func (r *Runtime) RemoveDisk(id string) error {
	if id == "" || filepath.Base(id) != id {
		return fmt.Errorf("disk id %q is not a name", id)
	}
	return os.RemoveAll(filepath.Join(r.dir, "disks", id))
}

// watch notices the end of machines, our own children and adopted ones alike.
func (r *Runtime) watch() {
	defer r.wg.Done()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-r.closed:
			return
		case <-tick.C:
		}
		r.mu.Lock()
		for id, v := range r.vms {
			if !v.running || v.m.Played || v.proc.alive() {
				continue
			}
			v.running = false
			if v.kill != nil {
				v.kill.Stop()
			}
			if readJSON(filepath.Join(r.folder(id), exitFile), &v.exit) != nil {
				v.exit = exitRecord{Code: -1, Reason: "killed"}
				// Kept, so that a later process does not take it for one that vanished with the host.
				if err := writeJSON(filepath.Join(r.folder(id), exitFile), v.exit); err != nil {
					r.log.Error("simulated vm's end is not kept", "vm", v.m.Name, "error", err)
				}
			}
			r.log.Info("simulated vm ended", "vm", v.m.Name, "code", v.exit.Code, "reason", v.exit.Reason)
			r.hint(id)
		}
		r.mu.Unlock()
	}
}

func (r *Runtime) hint(id string) {
	select {
	case r.changed <- id:
	default:
	}
}

// Close ends the watch. With keep set the machines run on; otherwise they are switched off, killed after grace, and
// marked so that the next process starts them again.
func (r *Runtime) Close(keep bool, grace time.Duration) {
	close(r.closed)
	r.wg.Wait()
	if keep {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var wg sync.WaitGroup
	for id, v := range r.vms {
		if v.kill != nil {
			v.kill.Stop()
		}
		// A machine that is already on its way out must not come back.
		if v.m.Played || !v.running || v.stopping && !v.proc.alive() {
			continue
		}
		wg.Go(func() {
			if err := os.WriteFile(filepath.Join(r.folder(id), suspendedFile), nil, 0o600); err != nil {
				r.log.Error("simulated vm is not marked for a later start", "vm", v.m.Name, "error", err)
			}
			v.proc.signal(syscall.SIGTERM)
			for end := time.Now().Add(grace); time.Now().Before(end) && v.proc.alive(); {
				time.Sleep(50 * time.Millisecond)
			}
			if v.proc.alive() {
				v.proc.kill(v.m.Isolated)
			}
		})
	}
	wg.Wait()
}

func (r *Runtime) folder(id string) string { return filepath.Join(r.dir, "vms", id) }

func readJSON(file string, v any) error {
	raw, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return json.Unmarshal(raw, v)
}

// writeJSON leaves either the old file or the whole new one.
func writeJSON(file string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := os.WriteFile(file+".new", raw, 0o600); err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	return os.Rename(file+".new", file)
}
