// Package logs carries the log lines of Kubernetes libraries, which speak logr, to the program's hclog logger. It
// decides only levels: their information is our debug, their verbose lines are our trace.
package logs

import (
	"github.com/go-logr/logr"
	"github.com/hashicorp/go-hclog"
)

// New returns a logr logger that writes to l. With info set, the library's information lines keep their level.
func New(l hclog.Logger, info bool) logr.Logger {
	return logr.New(&sink{l: l, info: info})
}

type sink struct {
	l    hclog.Logger
	info bool
}

func (s *sink) Init(logr.RuntimeInfo) {}

func (s *sink) Enabled(level int) bool {
	switch {
	case level > 0:
		return s.l.IsTrace()
	case s.info:
		return s.l.IsInfo()
	default:
		return s.l.IsDebug()
	}
}

func (s *sink) Info(level int, msg string, kv ...any) {
	switch {
	case level > 0:
		s.l.Trace(msg, kv...)
	case s.info:
		s.l.Info(msg, kv...)
	default:
		s.l.Debug(msg, kv...)
	}
}

// Error keeps to warn: the control plane calls many things errors that it retries at once, such as a conflicting write.
func (s *sink) Error(err error, msg string, kv ...any) {
	if err != nil {
		kv = append(kv, "error", err)
	}
	s.l.Warn(msg, kv...)
}

func (s *sink) WithValues(kv ...any) logr.LogSink {
	return &sink{l: s.l.With(kv...), info: s.info}
}

func (s *sink) WithName(name string) logr.LogSink {
	return &sink{l: s.l.Named(name), info: s.info}
}
