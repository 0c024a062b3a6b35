package log

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// Bounds of a ring.
const (
	// RingLines is how many lines a ring keeps by default.
	RingLines = 5000
	// MaxLineBytes is the longest line kept; the rest of it is cut.
	MaxLineBytes = 16 << 10
	// maxRingBytes bounds all the text of a ring.
	maxRingBytes = 8 << 20
)

// Ring keeps the last lines of a process, each with a position. Positions grow
// with each line of one ring and mean nothing in another, so a reader that comes
// back after a restart is told of the gap. Lines are kept in the order of Add;
// the oldest are lost when the ring is full. Add never blocks on a reader. It is
// safe for concurrent use.
type Ring struct {
	instance string
	limit    int

	mu       sync.Mutex
	lines    []*meshv1.LogLine // ring order: lines[(first+i)%limit]
	first    int
	next     uint64 // sequence of the next line, from 1
	bytes    int
	watchers map[chan struct{}]struct{}
}

// NewRing makes a ring of so many lines; 0 is RingLines.
func NewRing(lines int) *Ring {
	if lines <= 0 {
		lines = RingLines
	}
	var b [8]byte
	_, _ = rand.Read(b[:])
	return &Ring{instance: hex.EncodeToString(b[:]), limit: lines, next: 1, watchers: make(map[chan struct{}]struct{})}
}

// Instance names this ring; it is new in each process.
func (r *Ring) Instance() string { return r.instance }

// Add appends one line without its end. Source is "daemon", or for an agent
// "agent", "console" or "engine".
func (r *Ring) Add(source string, at time.Time, text []byte) {
	text = bytes.Clone(bytes.TrimRight(text, "\r\n"))
	if len(text) > MaxLineBytes {
		text = text[:MaxLineBytes]
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	line := &meshv1.LogLine{Position: fmt.Sprintf("%s-%016x", r.instance, r.next), Time: timestamppb.New(at), Source: source, Text: text}
	r.next++
	if len(r.lines)-r.first >= r.limit {
		r.drop()
	}
	r.lines = append(r.lines, line)
	for r.bytes += len(text); r.bytes > maxRingBytes; {
		r.drop()
	}
	for ch := range r.watchers {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// drop forgets the oldest line; the slice is moved down now and then.
func (r *Ring) drop() {
	r.bytes -= len(r.lines[r.first].GetText())
	r.lines[r.first] = nil
	r.first++
	if r.first >= r.limit {
		r.lines = append(r.lines[:0:0], r.lines[r.first:]...)
		r.first = 0
	}
}

// After returns up to most lines after a position, oldest first. An empty position
// gives the last tail lines, 0 for all that are kept. When lines between the
// position and the first returned one are lost, that one is marked as a gap. The
// messages are shared and must not be changed.
func (r *Ring) After(position string, tail, most int) []*meshv1.LogLine {
	r.mu.Lock()
	defer r.mu.Unlock()
	kept := r.lines[r.first:]
	oldest := r.next - uint64(len(kept))
	if position == "" {
		if tail > 0 && tail < len(kept) {
			kept = kept[len(kept)-tail:]
		}
		return append([]*meshv1.LogLine(nil), kept[:min(most, len(kept))]...)
	}
	seq, ok := r.parse(position)
	gap := !ok || seq+1 < oldest
	if !gap {
		kept = kept[min(seq+1-oldest, uint64(len(kept))):]
	}
	out := append([]*meshv1.LogLine(nil), kept[:min(most, len(kept))]...)
	if gap && len(out) > 0 {
		first := out[0]
		out[0] = &meshv1.LogLine{Position: first.GetPosition(), Time: first.GetTime(), Source: first.GetSource(), Text: first.GetText(), Gap: true}
	}
	return out
}

// parse reads a position of this ring.
func (r *Ring) parse(position string) (uint64, bool) {
	digits, ok := strings.CutPrefix(position, r.instance+"-")
	if !ok || len(digits) != 16 {
		return 0, false
	}
	seq, err := strconv.ParseUint(digits, 16, 64)
	return seq, err == nil && seq < r.next
}

// Subscribe returns a channel that gets a signal after new lines, coalesced.
func (r *Ring) Subscribe() (added <-chan struct{}, cancel func()) {
	ch := make(chan struct{}, 1)
	r.mu.Lock()
	r.watchers[ch] = struct{}{}
	r.mu.Unlock()
	return ch, func() {
		r.mu.Lock()
		delete(r.watchers, ch)
		r.mu.Unlock()
	}
}
