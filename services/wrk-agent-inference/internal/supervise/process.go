package supervise

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// MarkVariable is set in the engine and so in all its descendants. By it those
// are found that left the process group, also those of an agent that was killed.
const MarkVariable = "COSMICAC_ENGINE_OF"

// process is a running engine.
type process struct {
	cmd    *exec.Cmd
	mark   string
	exited chan struct{}
	output sync.WaitGroup
	read   *os.File
}

// launch starts the engine in a group of its own.
func launch(l Launch, mark string, output io.Writer) (*process, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a pipe: %w", err)
	}
	p := &process{mark: mark, exited: make(chan struct{}), read: read}
	p.cmd = &exec.Cmd{
		Path: l.Path, Args: append([]string{l.Path}, l.Arguments...), Env: append(l.Environment, MarkVariable+"="+mark), Dir: l.Directory,
		Stdout: write, Stderr: write,
		// The death signal covers an agent that is killed; the group and the mark cover the engine's children.
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL},
	}
	started := make(chan error, 1)
	go func() {
		// The signal comes when the thread that started the process ends, not the
		// program. So that thread is held until the process is reaped.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		write.Close()
		started <- err
		if err == nil {
			_ = p.cmd.Wait()
			close(p.exited)
		}
	}()
	if err := <-started; err != nil {
		read.Close()
		return nil, fmt.Errorf("start %s: %w", l.Path, err)
	}
	p.output.Go(func() { _, _ = io.Copy(output, read) })
	return p, nil
}

// stop ends the engine: SIGTERM to it alone, so that it can end its own children
// in order, then after grace SIGKILL to everything.
func (p *process) stop(ctx context.Context, grace time.Duration) {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-p.exited:
	case <-timer.C:
	case <-ctx.Done():
	}
	p.clear()
}

// clear kills what is left, waits for the engine to be reaped and takes in the
// last of its output. It returns how many processes of it could not be killed.
func (p *process) clear() (left int) {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.exited
	left = sweep(p.mark)
	// With every holder gone the output ends; one that could not be killed must not hold us.
	closing := time.AfterFunc(2*time.Second, func() { p.read.Close() })
	p.output.Wait()
	closing.Stop()
	p.read.Close()
	return left
}

// code is the exit code, or 128 and the signal.
func (p *process) code() int {
	if c := p.cmd.ProcessState.ExitCode(); c >= 0 {
		return c
	}
	if ws, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return 255
}

func (p *process) ending() string {
	if ws, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return "was ended by signal " + ws.Signal().String()
	}
	return "ended with exit code " + strconv.Itoa(p.code())
}

// sweep kills every process that carries the mark and waits until they are gone,
// at most 10 s. It returns how many are left.
func sweep(mark string) int {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		pids := marked(mark)
		if len(pids) == 0 || time.Now().After(end) {
			return len(pids)
		}
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// marked lists live processes with the mark in their first environment.
func marked(mark string) []int {
	want := []byte(MarkVariable + "=" + mark)
	names, _ := filepath.Glob("/proc/[0-9]*/environ")
	var pids []int
	for _, name := range names {
		raw, err := os.ReadFile(name) // empty for zombies
		if err != nil {
			continue
		}
		for pair := range bytes.SplitSeq(raw, []byte{0}) {
			if !bytes.Equal(pair, want) {
				continue
			}
			if pid, err := strconv.Atoi(strings.Split(name, "/")[2]); err == nil && pid != os.Getpid() {
				pids = append(pids, pid)
			}
			break
		}
	}
	return pids
}

// emptyGPUs waits until no process computes on a GPU of this VM, so that the next
// engine finds the memory free. No nvidia-smi is no GPU.
func emptyGPUs(ctx context.Context, limit time.Duration) error {
	path, err := exec.LookPath("nvidia-smi")
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		out, err := exec.CommandContext(ctx, path, "--query-compute-apps=pid", "--format=csv,noheader").Output()
		if err == nil && len(bytes.TrimSpace(out)) == 0 {
			return nil
		}
		timer := time.NewTimer(time.Second)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("after %s there are still processes on the GPUs: %s", limit, bytes.ReplaceAll(bytes.TrimSpace(out), []byte("\n"), []byte(" ")))
		}
	}
}
