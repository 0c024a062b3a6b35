package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"unicode/utf8"
)

// span is a half-open range of a body; empty when end is zero.
type span struct{ start, end int }

func (s span) found() bool { return s.end > 0 }

// Request is what a gateway needs to know of a JSON request body. When a field
// occurs twice the last one counts, as it does for the engines.
type Request struct {
	// Model is empty when the body names none.
	Model  string
	Stream bool
	// CacheKey is "prompt_cache_key": the client's own word on what belongs together.
	CacheKey string
	// Prompt is the raw text of "messages", "prompt" or "input", a part of the body.
	Prompt []byte

	open          int // index after the first brace
	empty         bool
	streamOptions span
	includeUsage  span // the value, inside streamOptions
	optionsEmpty  bool
	asksUsage     bool
}

// maximumDepth is how deep a body may nest; engines in Python stop near 1,000.
const maximumDepth = 500

// Scan checks that body is one JSON object and finds the fields of Request in
// it. It reads the body once, keeps slices of it and copies next to nothing.
// The error says what is wrong at which byte, never the bytes themselves.
func Scan(body []byte) (*Request, *Error) {
	s := scanner{b: body}
	r := &Request{empty: true}
	s.space()
	if s.i >= len(body) {
		return nil, Invalid("invalid_json", "", "the request body is empty: it must be a JSON object")
	}
	if body[s.i] != '{' {
		return nil, Invalid("invalid_json", "", "the request body must be a JSON object")
	}
	var refused *Error
	r.open = s.i + 1
	err := s.object(0, func(key []byte, v span) {
		r.empty = false
		if e := r.field(s.b, key, v); e != nil && refused == nil {
			refused = e
		}
	})
	if err == nil {
		s.space()
		if s.i < len(body) {
			err = s.fail("the end of the body")
		}
	}
	if err != nil {
		return nil, Invalid("invalid_json", "", "the request body is not valid JSON: "+err.Error())
	}
	if refused != nil {
		return nil, refused
	}
	return r, nil
}

// foldedName refuses a name that differs from one of ours in letter case alone:
// an engine that ignores case would read it, and what this gateway adds or counts
// would not be what the engine does.
func foldedName(key []byte, names ...string) *Error {
	for _, name := range names {
		if string(key) != name && bytes.EqualFold(key, []byte(name)) {
			return Invalid("unknown_parameter", name, "a member differs from '"+name+"' in letter case alone: write it as it is")
		}
	}
	return nil
}

func (r *Request) field(body, key []byte, v span) *Error {
	if e := foldedName(key, "model", "stream", "stream_options"); e != nil {
		return e
	}
	value := body[v.start:v.end]
	switch string(key) {
	case "model":
		if value[0] != '"' {
			if string(value) == "null" {
				r.Model = ""
				return nil
			}
			return Invalid("invalid_type", "model", "'model' must be a string")
		}
		r.Model = text(value)
	case "stream":
		switch string(value) {
		case "true":
			r.Stream = true
		case "false", "null":
			r.Stream = false
		default:
			return Invalid("invalid_type", "stream", "'stream' must be true or false")
		}
	case "prompt_cache_key":
		if value[0] == '"' {
			r.CacheKey = text(value)
		}
	case "messages", "prompt", "input":
		r.Prompt = value
	case "stream_options":
		return r.options(body, v)
	}
	return nil
}

func (r *Request) options(body []byte, v span) (refused *Error) {
	r.streamOptions, r.includeUsage, r.asksUsage, r.optionsEmpty = v, span{}, false, true
	if body[v.start] != '{' {
		return nil
	}
	s := scanner{b: body, i: v.start}
	s.object(1, func(key []byte, v span) { // was checked as a part of the body
		r.optionsEmpty = false
		if e := foldedName(key, "include_usage"); e != nil && refused == nil {
			refused = e
		}
		if string(key) == "include_usage" {
			r.includeUsage = v
			r.asksUsage = string(body[v.start:v.end]) == "true"
		}
	})
	return refused
}

// AsksUsage tells whether the client asked for the usage chunk of its stream.
func (r *Request) AsksUsage() bool { return r.asksUsage }

// WithUsage returns the body in pieces that ask a stream for its usage, and
// whether anything was added. The body is never changed: pieces of it stand
// around the addition. A stream_options that is no object is left for the
// engine to refuse.
func (r *Request) WithUsage(body []byte) (pieces [][]byte, added bool) {
	whole := [][]byte{body}
	if !r.Stream || r.asksUsage {
		return whole, false
	}
	cut := func(from, to int, with string) ([][]byte, bool) {
		return [][]byte{body[:from], []byte(with), body[to:]}, true
	}
	switch o := r.streamOptions; {
	case !o.found():
		with := `"stream_options":{"include_usage":true}`
		if !r.empty {
			with += ","
		}
		return cut(r.open, r.open, with)
	case string(body[o.start:o.end]) == "null":
		return cut(o.start, o.end, `{"include_usage":true}`)
	case body[o.start] != '{':
		return whole, false
	case r.includeUsage.found():
		return cut(r.includeUsage.start, r.includeUsage.end, "true")
	case r.optionsEmpty:
		return cut(o.start+1, o.start+1, `"include_usage":true`)
	default:
		return cut(o.start+1, o.start+1, `"include_usage":true,`)
	}
}

// text decodes a JSON string that was checked.
func text(quoted []byte) string {
	inner := quoted[1 : len(quoted)-1]
	if bytes.IndexByte(inner, '\\') < 0 && utf8.Valid(inner) {
		return string(inner)
	}
	var t string
	if json.Unmarshal(quoted, &t) != nil {
		return ""
	}
	return t
}

// scanner walks over JSON text strictly.
type scanner struct {
	b []byte
	i int
}

func (s *scanner) fail(want string) error {
	if s.i >= len(s.b) {
		return fmt.Errorf("it ends after %d bytes where %s was expected", len(s.b), want)
	}
	return fmt.Errorf("expected %s at byte %d", want, s.i)
}

func (s *scanner) space() {
	for s.i < len(s.b) {
		switch s.b[s.i] {
		case ' ', '\n', '\r', '\t':
			s.i++
		default:
			return
		}
	}
}

// object walks over an object and hands each member to f, keys decoded.
func (s *scanner) object(depth int, f func(key []byte, value span)) error {
	s.i++ // the brace
	s.space()
	if s.i < len(s.b) && s.b[s.i] == '}' {
		s.i++
		return nil
	}
	for {
		s.space()
		from := s.i
		if s.i >= len(s.b) || s.b[s.i] != '"' {
			return s.fail("a quoted name")
		}
		if err := s.str(); err != nil {
			return err
		}
		to := s.i
		s.space()
		if s.i >= len(s.b) || s.b[s.i] != ':' {
			return s.fail("a colon")
		}
		s.i++
		s.space()
		start := s.i
		if err := s.value(depth + 1); err != nil {
			return err
		}
		if f != nil {
			key := s.b[from+1 : to-1]
			if bytes.IndexByte(key, '\\') >= 0 {
				key = []byte(text(s.b[from:to]))
			}
			f(key, span{start, s.i})
		}
		s.space()
		if s.i >= len(s.b) {
			return s.fail("a comma or a closing brace")
		}
		switch s.b[s.i] {
		case ',':
			s.i++
		case '}':
			s.i++
			return nil
		default:
			return s.fail("a comma or a closing brace")
		}
	}
}

func (s *scanner) array(depth int) error {
	s.i++ // the bracket
	s.space()
	if s.i < len(s.b) && s.b[s.i] == ']' {
		s.i++
		return nil
	}
	for {
		s.space()
		if err := s.value(depth + 1); err != nil {
			return err
		}
		s.space()
		if s.i >= len(s.b) {
			return s.fail("a comma or a closing bracket")
		}
		switch s.b[s.i] {
		case ',':
			s.i++
		case ']':
			s.i++
			return nil
		default:
			return s.fail("a comma or a closing bracket")
		}
	}
}

func (s *scanner) value(depth int) error {
	if depth > maximumDepth {
		return fmt.Errorf("it nests deeper than %d at byte %d", maximumDepth, s.i)
	}
	if s.i >= len(s.b) {
		return s.fail("a value")
	}
	switch c := s.b[s.i]; {
	case c == '{':
		return s.object(depth, nil)
	case c == '[':
		return s.array(depth)
	case c == '"':
		return s.str()
	case c == 't':
		return s.word("true")
	case c == 'f':
		return s.word("false")
	case c == 'n':
		return s.word("null")
	case c == '-' || c >= '0' && c <= '9':
		return s.number()
	default:
		return s.fail("a value")
	}
}

func (s *scanner) word(w string) error {
	if !bytes.HasPrefix(s.b[s.i:], []byte(w)) {
		return s.fail(w)
	}
	s.i += len(w)
	return nil
}

func (s *scanner) number() error {
	if s.b[s.i] == '-' {
		s.i++
	}
	if s.i < len(s.b) && s.b[s.i] == '0' {
		s.i++
	} else if !s.digits() {
		return s.fail("a digit")
	}
	if s.i < len(s.b) && s.b[s.i] == '.' {
		s.i++
		if !s.digits() {
			return s.fail("a digit")
		}
	}
	if s.i < len(s.b) && (s.b[s.i] == 'e' || s.b[s.i] == 'E') {
		s.i++
		if s.i < len(s.b) && (s.b[s.i] == '+' || s.b[s.i] == '-') {
			s.i++
		}
		if !s.digits() {
			return s.fail("a digit")
		}
	}
	return nil
}

func (s *scanner) digits() bool {
	from := s.i
	for s.i < len(s.b) && s.b[s.i] >= '0' && s.b[s.i] <= '9' {
		s.i++
	}
	return s.i > from
}

// str walks over a string, from its first quote to after its last.
func (s *scanner) str() error {
	b := s.b
	for i := s.i + 1; i < len(b); i++ {
		switch c := b[i]; {
		case c == '"':
			s.i = i + 1
			return nil
		case c == '\\':
			i++
			if i >= len(b) {
				break
			}
			switch b[i] {
			case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
			case 'u':
				for range 4 {
					i++
					if i >= len(b) || !isHex(b[i]) {
						s.i = min(i, len(b))
						return s.fail("four hexadecimal digits")
					}
				}
			default:
				s.i = i
				return s.fail("a known escape")
			}
		case c < 0x20:
			s.i = i
			return s.fail("no bare control character in a string")
		}
	}
	s.i = len(b)
	return s.fail("a closing quote")
}

func isHex(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F'
}
