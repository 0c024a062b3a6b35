package log

import (
	"context"
	"io"
	stdlog "log"
	"log/slog"

	"github.com/hashicorp/go-hclog"
	golog "github.com/ipfs/go-log/v2"
	"github.com/libp2p/go-libp2p/gologshim"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc/grpclog"
)

// TakeGlobals turns the process-wide loggers of the libraries we link to this
// log: libp2p, the standard log and slog are routed one level down, since what
// is an error to a library is daily life among peers; grpc and go-log are
// silenced, their errors come back as errors. Call it once, from main, before
// anything is started.
func TakeGlobals(l hclog.Logger) {
	gologshim.SetDefaultHandler(&handler{log: l.Named("libp2p")})
	golog.SetPrimaryCore(zapcore.NewNopCore())
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, io.Discard))
	slog.SetDefault(slog.New(&handler{log: l.Named("library")}))
	stdlog.SetFlags(0)
	stdlog.SetOutput(l.Named("library").StandardWriter(&hclog.StandardLoggerOptions{ForceLevel: hclog.Debug}))
}

// handler is a slog handler over hclog, one level down.
type handler struct {
	log   hclog.Logger
	group string
}

func level(l slog.Level) hclog.Level {
	switch {
	case l >= slog.LevelError:
		return hclog.Warn
	case l >= slog.LevelWarn:
		return hclog.Debug
	default:
		return hclog.Trace
	}
}

func (h *handler) Enabled(_ context.Context, l slog.Level) bool {
	return level(l) >= h.log.GetLevel()
}

func (h *handler) Handle(_ context.Context, r slog.Record) error {
	args := make([]any, 0, 2*r.NumAttrs())
	r.Attrs(func(a slog.Attr) bool {
		args = append(args, h.group+a.Key, a.Value.Resolve().Any())
		return true
	})
	h.log.Log(level(r.Level), r.Message, args...)
	return nil
}

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	args := make([]any, 0, 2*len(attrs))
	for _, a := range attrs {
		args = append(args, h.group+a.Key, a.Value.Resolve().Any())
	}
	return &handler{log: h.log.With(args...), group: h.group}
}

func (h *handler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	return &handler{log: h.log, group: h.group + name + "."}
}
