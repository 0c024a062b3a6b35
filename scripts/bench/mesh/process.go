package main

import (
	"errors"
	"fmt"
	"io"
	"net/rpc"
	"net/rpc/jsonrpc"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// asProgram, set in the environment, makes this binary a process of the bench.
const asProgram = "COSMICAC_BENCH_PROGRAM"

// process is a process of the bench: this binary, or Node for Holepunch. It is
// asked in JSON-RPC over its standard input and output and ends with its input.
type process struct {
	name string
	cmd  *exec.Cmd
	rpc  *rpc.Client
}

type pipes struct {
	io.ReadCloser // its output
	io.WriteCloser
}

func (p pipes) Close() error { return errors.Join(p.WriteCloser.Close(), p.ReadCloser.Close()) }

// startProgram runs this binary once more.
func startProgram(name string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	return startProcess(name, cmd)
}

// startHolepunch runs the Node program with the modules installed in a folder.
func (b *bench) startHolepunch(name string) (*process, error) {
	cmd := exec.Command("node", filepath.Join(b.holepunch, "program.js"))
	return startProcess(name, cmd)
}

func startProcess(name string, cmd *exec.Cmd) (*process, error) {
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &process{name: name, cmd: cmd, rpc: jsonrpc.NewClient(pipes{out, in})}
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// call asks the process and waits at most limit.
func (p *process) call(limit time.Duration, method string, args, reply any) error {
	c := p.rpc.Go("Program."+method, args, reply, make(chan *rpc.Call, 1))
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-c.Done:
		if c.Error != nil {
			return fmt.Errorf("%s of %s: %w", method, p.name, c.Error)
		}
		return nil
	case <-t.C:
		return fmt.Errorf("%s of %s: no answer in %s", method, p.name, limit)
	}
}

// kill ends the process as kill -9 does.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.rpc.Close()
	_ = p.cmd.Wait()
}

// usage is the processor time that the process has used so far.
func (p *process) usage() (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.pid()))
	if err != nil {
		return 0, fmt.Errorf("processor time of %s: %w", p.name, err)
	}
	// The name in parentheses may hold spaces; times are in hundredths of a second.
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(f) < 13 {
		return 0, fmt.Errorf("processor time of %s: %q", p.name, b)
	}
	user, err1 := strconv.ParseInt(f[11], 10, 64)
	system, err2 := strconv.ParseInt(f[12], 10, 64)
	return time.Duration(user+system) * 10 * time.Millisecond, errors.Join(err1, err2)
}
