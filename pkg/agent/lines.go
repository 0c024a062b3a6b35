package agent

import (
	"bytes"
	"sync"

	"github.com/cosmicac/cosmicac/pkg/log"
)

// Lines turns a program's output into lines of the log. It is safe for
// concurrent use, never fails and never blocks on a reader. A line without an
// end is kept until more comes, Flush, or 16 KiB.
type Lines struct {
	agent  *Agent
	source string

	mu   sync.Mutex
	rest []byte
	last string
}

// Lines makes a writer for one program's output.
func (a *Agent) Lines(source string) *Lines { return &Lines{agent: a, source: source} }

func (l *Lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(p)
	for len(p) > 0 {
		line, rest, ended := bytes.Cut(p, []byte{'\n'})
		if room := log.MaxLineBytes - len(l.rest); len(line) > room {
			line, rest, ended = p[:room], p[room:], true
		}
		l.rest = append(l.rest, line...)
		if ended {
			l.flush()
		}
		p = rest
	}
	return n, nil
}

// Flush adds what has no end yet as a line.
func (l *Lines) Flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.rest) > 0 {
		l.flush()
	}
}

func (l *Lines) flush() {
	l.agent.Line(l.source, l.rest)
	if text := bytes.TrimSpace(l.rest); len(text) > 0 {
		l.last = string(text[:min(len(text), 300)])
	}
	l.rest = l.rest[:0]
}

// Last is the last line that was not empty, cut to 300 bytes.
func (l *Lines) Last() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last
}
