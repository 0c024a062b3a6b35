package openai

import (
	"bytes"
	"encoding/json"
)

// Stream lets server-sent events pass whole and unchanged, and looks into them
// for usage, errors and the end. Events may be split at any byte and end their
// lines with LF, CRLF or CR.
//
// A client gets an event when its last byte has come, so that a break upstream
// never leaves half an event behind. Only events beyond a bound pass in parts.
type Stream struct {
	// HideUsage drops the one event that holds usage and no choices.
	HideUsage bool

	pending   []byte
	inLine    bool // the current line has at least one byte
	afterCR   bool // an LF now belongs to the line end before
	passing   bool // the current event is over the bound and passes in parts
	dropped   bool // the event before was hidden: so is its late LF
	inEvent   bool // at least one byte of the current event has come
	usage     Usage
	hasUsage  bool
	done      bool
	hasErrors bool
}

// maximumEvent is the size of an event from which on it passes in parts,
// unseen. The largest clients take lines of 32 MiB; a usage chunk is small.
const maximumEvent = 1 << 20

// Feed takes the next bytes of the engine and appends what may go to the
// client to dst.
func (s *Stream) Feed(dst, p []byte) []byte {
	start := 0 // of what is not yet in pending or dst
	for i := 0; i < len(p); {
		if s.afterCR && p[i] == '\n' {
			s.afterCR = false
			i++
			if !s.inEvent {
				if !s.dropped {
					dst = append(dst, '\n')
				}
				start = i
			}
			continue
		}
		s.afterCR = false
		k := lineEnd(p[i:])
		if k < 0 {
			s.inLine, s.inEvent = true, true
			break
		}
		if k > 0 {
			s.inLine = true
		}
		i += k
		s.afterCR = p[i] == '\r'
		i++
		if s.inLine {
			s.inLine, s.inEvent = false, true
			continue
		}
		// An empty line ends the event.
		dst = s.finish(dst, p[start:i])
		start = i
		s.inEvent = false
	}
	rest := p[start:]
	if s.passing {
		return append(dst, rest...)
	}
	if len(s.pending)+len(rest) > maximumEvent {
		s.passing = true
		dst = append(append(dst, s.pending...), rest...)
		s.pending = nil
		return dst
	}
	s.pending = append(s.pending, rest...)
	return dst
}

// finish takes the last bytes of an event.
func (s *Stream) finish(dst, last []byte) []byte {
	if s.passing {
		s.passing, s.dropped = false, false
		return append(dst, last...)
	}
	event := last
	if len(s.pending) > 0 {
		s.pending = append(s.pending, last...)
		event = s.pending
	}
	s.dropped = s.look(event)
	if !s.dropped {
		dst = append(dst, event...)
	}
	s.pending = s.pending[:0]
	return dst
}

// End says that the engine ended the stream cleanly, and appends what was held
// back to dst. After a break do not call it: half an event helps nobody.
func (s *Stream) End(dst []byte) []byte {
	if len(s.pending) == 0 {
		return dst
	}
	if !s.look(s.pending) {
		dst = append(dst, s.pending...)
	}
	s.pending = nil
	return dst
}

// Done tells whether "[DONE]" has passed.
func (s *Stream) Done() bool { return s.done }

// Failed tells whether the engine sent an error event.
func (s *Stream) Failed() bool { return s.hasErrors }

// Usage is the newest that the engine said.
func (s *Stream) Usage() (Usage, bool) { return s.usage, s.hasUsage }

// Broken tells whether a client sits in the middle of an event that passed in parts.
func (s *Stream) Broken() bool { return s.passing }

var (
	usageName = []byte(`"usage"`)
	errorName = []byte(`"error"`)
	doneMark  = []byte("[DONE]")
	dataName  = []byte("data:")
)

// look reads what matters in one event and tells whether to hide it. Text that a
// model wrote has its quotes escaped, so names are found without decoding.
func (s *Stream) look(event []byte) (hide bool) {
	if at := bytes.Index(event, usageName); at >= 0 && !isNull(event[at+len(usageName):]) {
		var chunk struct {
			Choices *[]json.RawMessage `json:"choices"`
			Usage   json.RawMessage    `json:"usage"`
		}
		if json.Unmarshal(data(event), &chunk) == nil {
			if u, ok := parseUsage(chunk.Usage); ok {
				s.usage, s.hasUsage = u, true
				hide = s.HideUsage && chunk.Choices != nil && len(*chunk.Choices) == 0
			}
		}
		return hide
	}
	if len(event) < 64 && bytes.Contains(event, doneMark) && bytes.Equal(bytes.TrimSpace(data(event)), doneMark) {
		s.done = true
		return false
	}
	if bytes.Contains(event, errorName) {
		var chunk struct {
			Error json.RawMessage `json:"error"`
		}
		if json.Unmarshal(data(event), &chunk) == nil && len(chunk.Error) > 0 && string(chunk.Error) != "null" {
			s.hasErrors = true
		}
	}
	return false
}

// isNull tells whether ": null" follows.
func isNull(b []byte) bool {
	b = bytes.TrimLeft(b, " \t")
	if len(b) == 0 || b[0] != ':' {
		return false
	}
	return bytes.HasPrefix(bytes.TrimLeft(b[1:], " \t"), []byte("null"))
}

// data joins the data lines of an event. One line, the usual case, is not copied.
func data(event []byte) []byte {
	var first []byte
	var joined []byte
	n := 0
	for len(event) > 0 {
		k := lineEnd(event)
		line := event
		if k >= 0 {
			line = event[:k]
			if event[k] == '\r' && k+1 < len(event) && event[k+1] == '\n' {
				k++
			}
			event = event[k+1:]
		} else {
			event = nil
		}
		value, ok := bytes.CutPrefix(line, dataName)
		if !ok {
			continue
		}
		value = bytes.TrimPrefix(value, []byte(" "))
		switch n++; n {
		case 1:
			first = value
		case 2:
			joined = append(append(append(joined, first...), '\n'), value...)
		default:
			joined = append(append(joined, '\n'), value...)
		}
	}
	if n <= 1 {
		return first
	}
	return joined
}

// lineEnd is the index of the first CR or LF, or -1.
func lineEnd(b []byte) int {
	n := bytes.IndexByte(b, '\n')
	if n >= 0 {
		b = b[:n]
	}
	if r := bytes.IndexByte(b, '\r'); r >= 0 {
		return r
	}
	return n
}
