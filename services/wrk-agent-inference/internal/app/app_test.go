package app

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/agent"
	"github.com/cosmicac/cosmicac/pkg/agent/agenttest"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/engine"
	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/supervise"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == engine.Command {
		os.Exit(engine.Main(os.Args[2:], "test", os.Stderr))
	}
	goleak.VerifyTestMain(m)
}

var eventually = agenttest.Eventually

func seedOf(lab *agenttest.Lab) *agentv1.Seed {
	seed := lab.Seed()
	seed.Engine = &agentv1.Engine{Runtime: RuntimeEmbedded, ServedNames: []string{"demo"}, MaximumContextTokens: 1 << 30}
	return seed
}

func run(t *testing.T, lab *agenttest.Lab, seed *agentv1.Seed) (*agent.Agent, *Inference) {
	t.Helper()
	a, err := agent.New(agent.Options{Name: "wrk-agent-inference", Version: "test", Seed: seed, StateDirectory: t.TempDir(), ReportEvery: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	w, err := newInference(a, supervise.Timing{Poll: 50 * time.Millisecond, Pause: 50 * time.Millisecond, Grace: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx, w) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	return a, w
}

func ready(lab *agenttest.Lab) func() bool {
	return func() bool {
		return lab.Ork.Report().GetPhase() == agentv1.Phase_PHASE_READY && lab.Ork.Card() != nil
	}
}

// proxy is an HTTP client over pooled mesh streams, as proxy-inference is one.
func proxy(t *testing.T, lab *agenttest.Lab, n *mesh.Node, agent peer.ID) *http.Client {
	t.Helper()
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return n.OpenStream(ctx, agent, StreamName, lab.Ork.Card().GetAddresses()...)
		},
	}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func TestProxyReachesTheModelOverTheMesh(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	a, _ := run(t, lab, seedOf(lab))
	eventually(t, "ready", ready(lab))
	client := proxy(t, lab, lab.Proxy(), a.ID())
	c := openai.NewClient(option.WithBaseURL("http://replica/v1"), option.WithAPIKey("unused"), option.WithHTTPClient(client), option.WithMaxRetries(0))
	p := openai.ChatCompletionNewParams{Model: "demo", Seed: openai.Int(4), Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("What is an agent?")}}
	whole, err := c.Chat.Completions.New(context.Background(), p)
	if err != nil || whole.Choices[0].Message.Content == "" || whole.Usage.CompletionTokens == 0 {
		t.Fatalf("%+v, %v", whole, err)
	}
	var streamed strings.Builder
	s := c.Chat.Completions.NewStreaming(context.Background(), p)
	for s.Next() {
		if len(s.Current().Choices) > 0 {
			streamed.WriteString(s.Current().Choices[0].Delta.Content)
		}
	}
	if err := s.Err(); err != nil || streamed.String() != whole.Choices[0].Message.Content {
		t.Fatalf("%q, %v, want %q", streamed.String(), err, whole.Choices[0].Message.Content)
	}
}

func TestLoadIsReportedAndAClientThatLeavesStopsTheEngine(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	a, w := run(t, lab, seedOf(lab))
	eventually(t, "ready", ready(lab))
	client := proxy(t, lab, lab.Proxy(), a.ID())
	ctx, cancel := context.WithCancel(context.Background())
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://replica/v1/completions",
		strings.NewReader(`{"model":"demo","prompt":"A job","max_tokens":100000000,"ignore_eos":true,"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	var asking sync.WaitGroup
	asking.Go(func() {
		if answer, err := client.Do(r); err == nil {
			_, _ = io.Copy(io.Discard, answer.Body)
			answer.Body.Close()
		}
	})
	eventually(t, "the request is reported", func() bool { return lab.Ork.Report().GetRequestsRunning() == 1 })
	cancel()
	asking.Wait()
	eventually(t, "nothing runs", func() bool { return lab.Ork.Report().GetRequestsRunning() == 0 })
	has := false
	families, err := w.Gatherer().Gather()
	for _, f := range families {
		has = has || f.GetName() == "vllm:generation_tokens_total"
	}
	if err != nil || !has {
		t.Fatalf("the engine's metrics are missing: %v, %v", families, err)
	}
}

func TestDrainFinishesAnswersAndRefusesNewStreams(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	a, _ := run(t, lab, seedOf(lab))
	eventually(t, "ready", ready(lab))
	n := lab.Proxy()
	client := proxy(t, lab, n, a.ID())
	answered := make(chan error, 1)
	began := make(chan struct{})
	go func() {
		r, err := client.Post("http://replica/v1/completions", "application/json",
			strings.NewReader(`{"model":"demo","prompt":"A job","max_tokens":1500,"ignore_eos":true,"stream":true}`))
		if err != nil {
			close(began)
			answered <- err
			return
		}
		defer r.Body.Close()
		first := make([]byte, 1)
		_, err = io.ReadFull(r.Body, first)
		close(began)
		if err == nil {
			var rest []byte
			if rest, err = io.ReadAll(r.Body); err == nil && !bytes.HasSuffix(rest, []byte("data: [DONE]\n\n")) {
				err = io.ErrUnexpectedEOF
			}
		}
		answered <- err
	}()
	<-began
	lab.Ork.Order(&orkv1.AttendResponse{Drain: true, DrainDeadline: timestamppb.New(time.Now().Add(time.Hour))})
	eventually(t, "draining is reported", func() bool { return lab.Ork.Report().GetPhase() == agentv1.Phase_PHASE_DRAINING })
	fresh := proxy(t, lab, n, a.ID())
	if r, err := fresh.Get("http://replica/health"); err == nil {
		r.Body.Close()
		t.Error("a draining replica took a new stream")
	}
	if err := <-answered; err != nil {
		t.Fatalf("the answer under way: %v", err)
	}
}

func TestKilledEngineIsServedAgain(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	a, w := run(t, lab, seedOf(lab))
	eventually(t, "ready", ready(lab))
	mark := []byte(supervise.MarkVariable + "=" + lab.Seed().GetAttemptId() + "." + a.ID().String())
	killed := false
	names, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, name := range names {
		if raw, err := os.ReadFile(name); err == nil && bytes.Contains(raw, mark) {
			pid, _ := strconv.Atoi(strings.Split(name, "/")[2])
			killed = syscall.Kill(pid, syscall.SIGKILL) == nil || killed
		}
	}
	if !killed {
		t.Fatal("no engine was found")
	}
	eventually(t, "its end is noticed", func() bool { return w.engine.Status().Ended == 1 })
	eventually(t, "ready again", ready(lab))
	client := proxy(t, lab, lab.Proxy(), a.ID())
	eventually(t, "it answers", func() bool {
		r, err := client.Get("http://replica/v1/models")
		if err != nil {
			return false
		}
		defer r.Body.Close()
		_, _ = io.Copy(io.Discard, r.Body)
		return r.StatusCode == http.StatusOK
	})
	if lab.Ork.Report().GetExitCode() != 128+9 {
		t.Errorf("exit code %d is reported", lab.Ork.Report().GetExitCode())
	}
}

func TestRuntimeThatCannotBeServedSaysWhy(t *testing.T) {
	t.Parallel()
	lab := agenttest.New(t)
	seed := seedOf(lab)
	seed.Engine.Runtime = "parakeet"
	run(t, lab, seed)
	eventually(t, "the failure is reported", func() bool {
		r := lab.Ork.Report()
		return r.GetPhase() == agentv1.Phase_PHASE_FAILED && strings.Contains(r.GetMessage(), "parakeet")
	})
}

func TestVLLMCommandLine(t *testing.T) {
	t.Parallel()
	seed := &agentv1.Seed{GpuCount: 4, Engine: &agentv1.Engine{
		Runtime: RuntimeVLLM, Model: "org/model", ServedNames: []string{"model"}, MaximumContextTokens: 4096, Arguments: []string{"--enforce-eager"},
	}}
	got := strings.Join(vllmArguments(seed, "1234", servedNames(seed.GetEngine())), " ")
	want := "serve org/model --host 127.0.0.1 --port 1234 --served-model-name model --max-model-len 4096 --tensor-parallel-size 4 --enforce-eager"
	if got != want {
		t.Fatalf("got  %s\nwant %s", got, want)
	}
	seed.Engine.Arguments = []string{"--tensor-parallel-size=2", "--max-model-len", "100"}
	if got := strings.Join(vllmArguments(seed, "1", nil), " "); strings.Count(got, "parallel") != 1 || strings.Count(got, "max-model-len") != 1 {
		t.Fatalf("the job's own arguments were doubled: %s", got)
	}
}

func TestCommandGetsItsPort(t *testing.T) {
	t.Parallel()
	l, err := prepare(&agentv1.Seed{Engine: &agentv1.Engine{Runtime: RuntimeCommand, Arguments: []string{"/bin/sh", "--listen", "127.0.0.1:{port}"}}}, "")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(l.Address)
	if l.Path != "/bin/sh" || l.Arguments[1] != "127.0.0.1:"+port || !strings.Contains(strings.Join(l.Environment, "\n"), "\nPORT="+port) {
		t.Fatalf("%+v", l)
	}
}
