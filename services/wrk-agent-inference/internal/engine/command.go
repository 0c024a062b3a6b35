package engine

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/ngram"
)

// Command is the sub-command of the agent's binary that runs the engine in a
// process of its own.
const Command = "engine"

// keepAlive is long, so that the proxy's idle connections are not closed under it.
const keepAlive = 10 * time.Minute

type names []string

func (n *names) String() string { return strings.Join(*n, ",") }
func (n *names) Set(v string) error {
	*n = append(*n, v)
	return nil
}

// Main runs the engine until SIGTERM and returns the exit code.
func Main(arguments []string, version string, stderr io.Writer) int {
	flags := flag.NewFlagSet(Command, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	listen := flags.String("listen", "127.0.0.1:0", "`address`: unix:PATH, or a loopback host:port")
	var served names
	flags.Var(&served, "served-model-name", "a `name` to serve; may be repeated")
	maxContext := flags.Int("max-model-len", 8192, "prompt and answer together, in `tokens`")
	running := flags.Int("max-num-seqs", 8, "`requests` that generate at once")
	waiting := flags.Int("max-num-queued-reqs", 256, "`requests` that may wait")
	grace := flags.Duration("shutdown-timeout", 20*time.Second, "how `long` running requests may finish at SIGTERM")
	fail := func(code int, format string, a ...any) int {
		fmt.Fprintf(stderr, "engine: "+format+"\n", a...)
		return code
	}
	if err := flags.Parse(arguments); err != nil {
		// The last line is what a job shows of an engine that ended.
		flags.SetOutput(stderr)
		flags.PrintDefaults()
		return fail(2, "%v", err)
	}
	if flags.NArg() > 0 {
		return fail(2, "no argument %q is known", flags.Arg(0))
	}
	l, err := Listen(*listen)
	if err != nil {
		return fail(2, "%v", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	model := ngram.Default()
	e := New(Options{
		Model: model, Names: served, MaxContext: *maxContext, Running: *running, Waiting: *waiting, Version: version,
		Random: rand.Reader, Now: time.Now,
	})
	fmt.Fprintf(stderr, "engine: %s: %d tokens, vocabulary %d, listening on %s\n", Label, model.CorpusTokens(), model.Vocabulary(), l.Addr())
	server := &http.Server{Handler: e.Handler(), ReadHeaderTimeout: 30 * time.Second, IdleTimeout: keepAlive}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	select {
	case err := <-ended:
		return fail(1, "serve: %v", err)
	case <-ctx.Done():
	}
	bounded, cancel := context.WithTimeout(context.Background(), *grace)
	defer cancel()
	if err := server.Shutdown(bounded); err != nil && !errors.Is(err, http.ErrServerClosed) {
		_ = server.Close()
		fmt.Fprintf(stderr, "engine: requests were cut after %s\n", *grace)
	}
	<-ended
	return 0
}

// Listen opens a unix socket that only this user may use, or a loopback port.
func Listen(address string) (net.Listener, error) {
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("remove the old socket: %w", err)
		}
		l, err := net.Listen("unix", path)
		if err != nil {
			return nil, fmt.Errorf("listen on %s: %w", path, err)
		}
		if err := os.Chmod(path, 0o600); err != nil {
			l.Close()
			return nil, fmt.Errorf("close socket %s to others: %w", path, err)
		}
		return l, nil
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("listen address %q: %w", address, err)
	}
	if ip := net.ParseIP(host); ip == nil || !ip.IsLoopback() {
		return nil, fmt.Errorf("listen address %q is not loopback: the engine checks no key", address)
	}
	return net.Listen("tcp", address)
}
