package openai

import (
	"bytes"
	"encoding/json"
)

// Usage is what an engine says that a request took.
type Usage struct {
	PromptTokens     uint64
	CompletionTokens uint64
}

// maximumTokens bounds what an engine, a tenant's program, may claim of one request.
const maximumTokens = 1 << 32

// parseUsage reads a usage object in either of OpenAI's spellings. It reports
// false for null, for an object without token counts (audio may be counted in
// seconds) and for anything else.
func parseUsage(raw []byte) (Usage, bool) {
	var u struct {
		Prompt     *float64 `json:"prompt_tokens"`
		Completion *float64 `json:"completion_tokens"`
		Input      *float64 `json:"input_tokens"`
		Output     *float64 `json:"output_tokens"`
	}
	if json.Unmarshal(raw, &u) != nil {
		return Usage{}, false
	}
	if u.Prompt == nil {
		u.Prompt = u.Input
	}
	if u.Completion == nil {
		u.Completion = u.Output
	}
	if u.Prompt == nil && u.Completion == nil {
		return Usage{}, false
	}
	return Usage{PromptTokens: tokens(u.Prompt), CompletionTokens: tokens(u.Completion)}, true
}

func tokens(f *float64) uint64 {
	switch {
	case f == nil || !(*f > 0):
		return 0
	case *f > maximumTokens:
		return maximumTokens
	default:
		return uint64(*f)
	}
}

// maximumUsage bounds the bytes kept of a usage object.
const maximumUsage = 16 << 10

// BodyUsage finds the top-level "usage" of a JSON answer while its bytes pass.
// It keeps nothing else of them, whatever their size. The zero value is ready.
type BodyUsage struct {
	depth    int
	inString bool
	escaped  bool
	atKey    bool // the next string at depth 1 is a name
	naming   bool // inside such a name
	name     []byte
	catching bool
	skipped  bool
	value    []byte
}

// Feed looks at the next bytes.
func (u *BodyUsage) Feed(p []byte) {
	for i := 0; i < len(p); i++ {
		c := p[i]
		if u.inString {
			if !u.escaped && c != '"' && c != '\\' && !u.naming && !u.catching {
				// Nothing in this string matters: jump to what can end it.
				j := bytes.IndexByte(p[i:], '"')
				k := j
				if k < 0 {
					k = len(p) - i
				}
				if e := bytes.IndexByte(p[i:i+k], '\\'); e >= 0 {
					k = e
				}
				i += k
				if i >= len(p) {
					return
				}
				c = p[i]
			}
			u.char(c)
			switch {
			case u.escaped:
				u.escaped = false
			case c == '\\':
				u.escaped = true
			case c == '"':
				u.inString, u.naming = false, false
			}
			continue
		}
		switch c {
		case '"':
			u.inString = true
			if u.depth == 1 && u.atKey {
				u.atKey, u.naming, u.name = false, true, u.name[:0]
				continue
			}
		case ':':
			if u.depth == 1 && !u.catching && string(u.name) == "usage" {
				u.catching, u.skipped, u.value, u.name = true, false, u.value[:0], u.name[:0]
				continue
			}
		case ',':
			if u.depth == 1 {
				u.catching, u.atKey, u.name = false, true, u.name[:0]
			}
		case '{', '[':
			u.depth++
			if u.depth == 1 {
				u.atKey = c == '{'
			}
		case '}', ']':
			u.depth--
			if u.depth <= 0 {
				u.catching = false
			}
		}
		u.keep(c)
	}
}

// char takes one character of a string.
func (u *BodyUsage) char(c byte) {
	if u.naming {
		if c != '"' && len(u.name) < 16 {
			u.name = append(u.name, c)
		}
		return
	}
	u.keep(c)
}

func (u *BodyUsage) keep(c byte) {
	if !u.catching || u.skipped {
		return
	}
	if len(u.value) >= maximumUsage {
		u.skipped = true
		return
	}
	u.value = append(u.value, c)
}

// Usage is what was found so far.
func (u *BodyUsage) Usage() (Usage, bool) {
	if u.skipped || len(u.value) == 0 {
		return Usage{}, false
	}
	return parseUsage(u.value)
}
