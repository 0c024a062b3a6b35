// Package health is the closed list of things that can be wrong with a daemon,
// in words for the person who runs it, and the set of those that are wrong now.
//
// Each warning is a declared value: a stable code, a severity, a text, and a
// remedy that says what to do. `cosmicac doctor`, the API and the UI print the
// same ones. Codes are append-only.
//
// It does not check anything by itself, does not log, does not keep history, and
// decides nothing: a warning never stops a daemon. What a Set holds is gone with
// its process.
package health

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// Severity says how much a warning matters.
type Severity string

// The severities, from least to worst.
const (
	// Info: worth knowing, nothing is broken.
	Info Severity = "info"
	// Warn: it works now, and will not forever.
	Warn Severity = "warning"
	// Error: something does not work.
	Error Severity = "error"
)

// Code names a declared warning. It is stable.
type Code string

// Warning is a declaration. Text and Remedy hold one %s for each argument, Text's
// first.
type Warning struct {
	Code     Code
	Severity Severity
	Text     string
	Remedy   string
}

// maxArgument bounds each argument's text, since it may come from a peer.
const maxArgument = 300

// Set is the warnings of one process that hold now. It is safe for concurrent use.
type Set struct {
	now func() time.Time

	mu       sync.Mutex
	raised   map[key]*meshv1.Warning
	watchers map[chan struct{}]struct{}
}

type key struct {
	code    Code
	subject string
}

// NewSet makes an empty set. A nil clock is time.Now.
func NewSet(now func() time.Time) *Set {
	if now == nil {
		now = time.Now
	}
	return &Set{now: now, raised: make(map[key]*meshv1.Warning), watchers: make(map[chan struct{}]struct{})}
}

// Raise says that a warning holds. Raised again it takes the new words and keeps
// the time of the first. A code that is not declared raises `undeclared`.
func (s *Set) Raise(code Code, args ...any) { s.RaiseFor(code, "", args...) }

// RaiseFor is Raise for one subject of several, such as one peer: each subject has
// its own warning under the same code.
func (s *Set) RaiseFor(code Code, subject string, args ...any) {
	w, ok := byCode[code]
	if !ok {
		w, args = byCode[Undeclared], []any{code}
	}
	n := strings.Count(w.Text, "%s")
	fill := func(format string, from int) string {
		values := make([]any, strings.Count(format, "%s"))
		for i := range values {
			values[i] = "?"
			if from+i < len(args) {
				values[i] = clean(args[from+i])
			}
		}
		return fmt.Sprintf(format, values...)
	}
	next := &meshv1.Warning{Code: string(w.Code), Severity: string(w.Severity), Text: fill(w.Text, 0), Remedy: fill(w.Remedy, n)}
	k := key{w.Code, subject}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, ok := s.raised[k]; ok {
		if old.GetText() == next.GetText() && old.GetRemedy() == next.GetRemedy() {
			return
		}
		next.Since = old.GetSince()
	} else {
		next.Since = timestamppb.New(s.now())
	}
	s.raised[k] = next
	s.signal()
}

// Clear says that a warning no longer holds, for every subject.
func (s *Set) Clear(code Code) {
	s.clear(func(k key) bool { return k.code == code })
}

// ClearFor clears the warning of one subject.
func (s *Set) ClearFor(code Code, subject string) {
	s.clear(func(k key) bool { return k == key{code, subject} })
}

func (s *Set) clear(match func(key) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := len(s.raised)
	for k := range s.raised {
		if match(k) {
			delete(s.raised, k)
		}
	}
	if len(s.raised) != before {
		s.signal()
	}
}

// Has tells whether a warning of this code holds for any subject.
func (s *Set) Has(code Code) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k := range s.raised {
		if k.code == code {
			return true
		}
	}
	return false
}

// List returns the warnings that hold, worst first, then by code and text. The
// messages are shared and must not be changed.
func (s *Set) List() []*meshv1.Warning {
	s.mu.Lock()
	list := make([]*meshv1.Warning, 0, len(s.raised))
	for _, w := range s.raised {
		list = append(list, w)
	}
	s.mu.Unlock()
	slices.SortFunc(list, Compare)
	return list
}

// Compare orders warnings worst first, then by code and text.
func Compare(a, b *meshv1.Warning) int {
	return cmp.Or(
		cmp.Compare(rank(b.GetSeverity()), rank(a.GetSeverity())),
		cmp.Compare(a.GetCode(), b.GetCode()),
		cmp.Compare(a.GetText(), b.GetText()),
	)
}

func rank(s string) int {
	return slices.Index([]Severity{Info, Warn, Error}, Severity(s))
}

// Subscribe returns a channel that gets a signal after changes, coalesced.
func (s *Set) Subscribe() (changes <-chan struct{}, cancel func()) {
	ch := make(chan struct{}, 1)
	s.mu.Lock()
	s.watchers[ch] = struct{}{}
	s.mu.Unlock()
	return ch, func() {
		s.mu.Lock()
		delete(s.watchers, ch)
		s.mu.Unlock()
	}
}

func (s *Set) signal() {
	for ch := range s.watchers {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// clean makes an argument one bounded line.
func clean(v any) string {
	text := strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(fmt.Sprint(v), "?"))
	if r := []rune(text); len(r) > maxArgument {
		text = string(r[:maxArgument]) + "..."
	}
	return text
}
