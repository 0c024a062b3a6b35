package demo

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// process is one supervised child: started again whenever it ends, until its
// context is done. It stands in for systemd's Restart=always.
type process struct {
	name string
	// command builds a fresh command for each start.
	command func() *exec.Cmd

	mu       sync.Mutex
	pid      int
	restarts int
	lastExit string
}

// run keeps the child alive until ctx is done, then asks it to stop, waits
// for grace, and kills what is left. It blocks; its owner waits for it.
func (p *process) run(ctx context.Context, grace time.Duration, say func(format string, a ...any)) {
	// Pdeathsig follows the thread that forked, so this goroutine keeps its own.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	delay := 100 * time.Millisecond
	for ctx.Err() == nil {
		cmd := p.command()
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
		started := time.Now()
		if err := cmd.Start(); err != nil {
			p.note(0, err.Error())
			say("%s does not start: %v", p.name, err)
		} else {
			p.note(cmd.Process.Pid, "")
			done := make(chan error, 1)
			go func() { done <- cmd.Wait() }()
			var err error
			select {
			case err = <-done:
			case <-ctx.Done():
				_ = cmd.Process.Signal(syscall.SIGTERM)
				select {
				case <-done:
				case <-time.After(grace):
					say("%s did not stop within %s, killing it", p.name, grace)
					_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
					<-done
				}
				p.note(0, "stopped")
				return
			}
			why := "exit status 0"
			if err != nil {
				why = err.Error()
			}
			p.note(0, why)
			say("%s ended (%s), starting it again", p.name, why)
		}
		p.mu.Lock()
		p.restarts++
		p.mu.Unlock()
		if time.Since(started) > 10*time.Second {
			delay = 100 * time.Millisecond
		}
		select {
		case <-ctx.Done():
		case <-time.After(delay):
		}
		if delay *= 2; delay > 2*time.Second {
			delay = 2 * time.Second
		}
	}
}

func (p *process) note(pid int, exit string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pid = pid
	if exit != "" {
		p.lastExit = exit
	}
}

// PID is the running child's process id, 0 while it is down.
func (p *process) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pid
}

// group runs processes and waits for all of them. Later ones stop first.
type group struct {
	say   func(format string, a ...any)
	parts []*member
}

type member struct {
	process *process
	cancel  context.CancelFunc
	done    chan struct{}
}

func (g *group) start(p *process, grace time.Duration) {
	ctx, cancel := context.WithCancel(context.Background())
	m := &member{process: p, cancel: cancel, done: make(chan struct{})}
	g.parts = append(g.parts, m)
	go func() {
		defer close(m.done)
		p.run(ctx, grace, g.say)
	}()
}

// stop ends the processes in reverse order of their start.
func (g *group) stop() {
	for i := len(g.parts) - 1; i >= 0; i-- {
		g.parts[i].cancel()
		<-g.parts[i].done
	}
	g.parts = nil
}

// residentBytes reads a process's memory from the kernel.
func residentBytes(pid int) int64 {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0
	}
	var size, resident int64
	if _, err := fmt.Sscan(string(raw), &size, &resident); err != nil {
		return 0
	}
	return resident * int64(os.Getpagesize())
}

// tail returns about the last n bytes of a file, for error messages.
func tail(path string, n int64) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > n {
		_, _ = f.Seek(-n, io.SeekEnd)
	}
	raw, _ := io.ReadAll(io.LimitReader(f, n))
	return string(raw)
}
