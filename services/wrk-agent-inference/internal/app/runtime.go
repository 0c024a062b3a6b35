package app

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"github.com/cosmicac/cosmicac/pkg/agent"
	"github.com/cosmicac/cosmicac/pkg/fault"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/engine"
	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/supervise"
)

// Runtimes that this agent can launch.
const (
	RuntimeVLLM     = "vllm"
	RuntimeCommand  = "command"
	RuntimeEmbedded = "embedded"
)

// portMark is replaced by the port in the arguments of the runtime command.
const portMark = "{port}"

// checkRuntime says before anything is started why this agent cannot serve a seed.
func checkRuntime(s *agentv1.Seed) error {
	e := s.GetEngine()
	switch {
	case e == nil:
		return fault.New(fault.Invalid, "the seed has no engine: it was made for a GPU Container Job")
	case s.GetNodeIndex() > 0:
		return fault.New(fault.Unsupported, "this VM is node %d of a replica over several nodes; this agent runs engines of one node", s.GetNodeIndex())
	}
	switch e.GetRuntime() {
	case RuntimeEmbedded:
	case RuntimeVLLM:
		if e.GetModel() == "" {
			return fault.New(fault.Invalid, "the runtime vllm needs a model")
		}
	case RuntimeCommand:
		if len(e.GetArguments()) == 0 {
			return fault.New(fault.Invalid, "the runtime command needs the program as its first argument")
		}
	case "parakeet":
		return fault.New(fault.Unsupported, "this agent has no launcher for the runtime parakeet; run its server with the runtime command")
	default:
		return fault.New(fault.Unsupported, "the runtime %q is not known", e.GetRuntime())
	}
	return nil
}

// servedNames are what clients may call the model.
func servedNames(e *agentv1.Engine) []string {
	switch {
	case len(e.GetServedNames()) > 0:
		return e.GetServedNames()
	case e.GetModel() != "":
		return []string{e.GetModel()}
	}
	return []string{engine.DefaultName}
}

// prepare makes the launch of one start; each gets a fresh port.
func prepare(s *agentv1.Seed, socket string) (supervise.Launch, error) {
	e := s.GetEngine()
	l := supervise.Launch{Models: servedNames(e), Environment: environment(s), Directory: "/"}
	if e.GetRuntime() == RuntimeEmbedded {
		l.Path, l.Network, l.Address = agent.SelfPath(), "unix", socket
		l.Arguments = []string{engine.Command, "--listen", "unix:" + socket}
		for _, name := range l.Models {
			l.Arguments = append(l.Arguments, "--served-model-name", name)
		}
		if n := e.GetMaximumContextTokens(); n > 0 {
			l.Arguments = append(l.Arguments, "--max-model-len", strconv.Itoa(int(n)))
		}
		l.Arguments = append(l.Arguments, e.GetArguments()...)
		return l, nil
	}
	port, err := freePort()
	if err != nil {
		return l, err
	}
	l.Network, l.Address = "tcp", net.JoinHostPort("127.0.0.1", port)
	name, arguments := RuntimeVLLM, vllmArguments(s, port, l.Models)
	if e.GetRuntime() == RuntimeCommand {
		name, arguments = e.GetArguments()[0], slices.Clone(e.GetArguments()[1:])
		for i, a := range arguments {
			arguments[i] = strings.ReplaceAll(a, portMark, port)
		}
		l.Environment = append(l.Environment, "HOST=127.0.0.1", "PORT="+port, "MODEL="+e.GetModel(), "SERVED_MODEL_NAMES="+strings.Join(l.Models, ","))
	}
	if l.Path, err = exec.LookPath(name); err != nil {
		return l, fmt.Errorf("the program %q is not in this image: %w", name, err)
	}
	l.Arguments = arguments
	return l, nil
}

// vllmArguments is the command line of `vllm serve`. What the job says itself stands.
func vllmArguments(s *agentv1.Seed, port string, served []string) []string {
	e := s.GetEngine()
	own := e.GetArguments()
	says := func(flags ...string) bool {
		return slices.ContainsFunc(own, func(a string) bool {
			name, _, _ := strings.Cut(a, "=")
			return slices.Contains(flags, name)
		})
	}
	arguments := []string{"serve", e.GetModel(), "--host", "127.0.0.1", "--port", port}
	if len(served) > 0 && !says("--served-model-name") {
		arguments = append(append(arguments, "--served-model-name"), served...)
	}
	if n := e.GetMaximumContextTokens(); n > 0 && !says("--max-model-len") {
		arguments = append(arguments, "--max-model-len", strconv.Itoa(int(n)))
	}
	if n := s.GetGpuCount(); n > 1 && !says("--tensor-parallel-size", "-tp") {
		arguments = append(arguments, "--tensor-parallel-size", strconv.Itoa(int(n)))
	}
	return append(arguments, own...)
}

// environment is this process's own, then what the job gives every program, then
// what it gives the engine; later ones win.
func environment(s *agentv1.Seed) []string {
	env := os.Environ()
	if os.Getenv("HOME") == "" { // systemd gives a system service none, and caches of models live there
		env = append(env, "HOME=/root")
	}
	if s.GetEngine().GetRuntime() == RuntimeVLLM {
		// vLLM closes idle connections after 5 s, under the proxy's pool. The dev mode has no auth.
		env = append(env, "VLLM_HTTP_TIMEOUT_KEEP_ALIVE=600", "VLLM_SERVER_DEV_MODE=0")
	}
	for _, more := range []map[string]string{s.GetEnvironment(), s.GetEngine().GetEnvironment()} {
		for k, v := range more {
			env = append(env, k+"="+v)
		}
	}
	return env
}

// freePort is free now. Another program could take it before the engine does;
// then the engine ends, and its next start gets another.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}
