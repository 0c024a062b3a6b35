package supervise

import (
	"bytes"
	"io"
	"strings"
	"sync"
)

// hubWords are what vLLM and the hub's client print where a model does not exist or
// may not be had. Time-outs, 429 and 5xx are not among them: those are tried again.
var hubWords = []string{
	"RepositoryNotFoundError", "Repository Not Found for url", "is not a valid model identifier",
	"GatedRepoError", "Cannot access gated repo", "You are trying to access a gated repo", "401 Client Error", "403 Client Error",
}

// mostLine bounds a line that is looked at, in bytes.
const mostLine = 4096

// hub passes an engine's output on and keeps the first line that says that its model
// cannot be had. It is safe for concurrent use.
type hub struct {
	to io.Writer

	mu   sync.Mutex
	line []byte
	word string
}

func (h *hub) Write(p []byte) (int, error) {
	h.mu.Lock()
	for rest := p; len(rest) > 0 && h.word == ""; {
		part, after, whole := bytes.Cut(rest, []byte("\n"))
		h.line = append(h.line, part[:min(len(part), mostLine-len(h.line))]...)
		if whole {
			h.read()
		}
		rest = after
	}
	h.mu.Unlock()
	return h.to.Write(p)
}

// read judges the line that is whole. The caller holds the lock.
func (h *hub) read() {
	text := string(h.line)
	h.line = h.line[:0]
	for _, w := range hubWords {
		if strings.Contains(text, w) {
			h.word = strings.TrimSpace(text)
			return
		}
	}
}

// refusal is the hub's word, "" for none.
func (h *hub) refusal() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.word == "" {
		h.read() // a last line without an end
	}
	return h.word
}
