package openai

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestFieldsAreFoundWhereverTheyStand(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]Request{
		`{"model":"m"}`: {Model: "m"},
		` { "stream" : true , "x":{"model":"inner","stream":false}, "model" : "a\/b\u0041" } `: {Model: "a/bA", Stream: true},
		`{"mod\u0065l":"m","stream":null,"model":"last"}`:                                      {Model: "last"},
		`{"messages":[{"role":"user"}],"prompt_cache_key":"k"}`:                                {CacheKey: "k", Prompt: []byte(`[{"role":"user"}]`)},
		`{}`: {},
	} {
		r, err := Scan([]byte(body))
		if err != nil {
			t.Errorf("%s: %v", body, err)
			continue
		}
		if r.Model != want.Model || r.Stream != want.Stream || r.CacheKey != want.CacheKey || !bytes.Equal(r.Prompt, want.Prompt) {
			t.Errorf("%s: %+v", body, r)
		}
	}
}

func TestBadBodiesAreNamedWithoutTheirText(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]string{
		``:                                    "is empty",
		`[]`:                                  "must be a JSON object",
		`{"model":"m"`:                        "ends after 12 bytes",
		`{"model":"m",}`:                      "expected a quoted name at byte 13",
		`{"model":"secret" "x":1}`:            "comma or a closing brace at byte 18",
		`{"a":01}`:                            "at byte 6",
		`{"a":"` + "\n" + `"}`:                "control character",
		`{"a":1} x`:                           "expected the end of the body at byte 8",
		`{"model":7}`:                         "'model' must be a string",
		`{"stream":"yes"}`:                    "'stream' must be true or false",
		`{"a":` + strings.Repeat("[", 100000): "deeper than",
		`{"a":"\u12g4"}`:                      "hexadecimal",
		`{"a":"\x"}`:                          "known escape",
		`{"a":truth}`:                         "expected true",
		`{"a":-}`:                             "a digit",
		`{"STREAM":true}`:                     "letter case alone",
		`{"Model":"m"}`:                       "letter case alone",
		`{"stream":true,"stream_options":{"include_usage":true},"Stream_Options":{}}`: "letter case alone",
		`{"stream":true,"stream_options":{"INCLUDE_USAGE":false}}`:                    "letter case alone",
	} {
		_, err := Scan([]byte(body))
		if err == nil || err.Status != 400 || !strings.Contains(err.Message, want) || strings.Contains(err.Message, "secret") {
			t.Errorf("%.40s: %v, want %q", body, err, want)
		}
	}
}

func TestUsageIsAskedForWithoutTouchingTheRest(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]string{
		`{"stream":true}`:                                                             `{"stream_options":{"include_usage":true},"stream":true}`,
		` {"stream":true,"stream_options":null} `:                                     ` {"stream":true,"stream_options":{"include_usage":true}} `,
		`{"stream_options":{ },"stream":true}`:                                        `{"stream_options":{"include_usage":true },"stream":true}`,
		`{"stream_options":{"a":1},"stream":true}`:                                    `{"stream_options":{"include_usage":true,"a":1},"stream":true}`,
		`{"stream_options":{"include_usage":false,"b":2},"stream":true}`:              `{"stream_options":{"include_usage":true,"b":2},"stream":true}`,
		`{"stream_options":{"include_usage":true},"stream":true}`:                     ``,
		`{"stream_options":"odd","stream":true}`:                                      ``,
		`{"stream":false}`:                                                            ``,
		`{"stream":true,"stream_options":{"include_usage":true},"stream_options":{}}`: `{"stream":true,"stream_options":{"include_usage":true},"stream_options":{"include_usage":true}}`,
	} {
		r, err := Scan([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		pieces, added := r.WithUsage([]byte(body))
		got := string(bytes.Join(pieces, nil))
		if added != (want != "") {
			t.Errorf("%s: added = %v", body, added)
		}
		if want == "" {
			want = body
		}
		if got != want {
			t.Errorf("%s\n got %s\nwant %s", body, got, want)
		}
	}
}

// Whatever encoding/json takes as an object the scanner takes, and the other way round.
func TestScannerAgreesWithTheStandardLibrary(t *testing.T) {
	t.Parallel()
	piece := rapid.SampledFrom([]string{"{", "}", "[", "]", ":", ",", `"a"`, `"model"`, `"\u00e9"`, `"\q"`, "1", "-0.5e+3", "00", "true", "null", "nul", " ", "\n", `"`, "\\", "é"})
	rapid.Check(t, func(t *rapid.T) {
		body := []byte("{" + strings.Join(rapid.SliceOfN(piece, 0, 12).Draw(t, "pieces"), ""))
		_, err := Scan(body)
		invalid := err != nil && err.Code == "invalid_json"
		if valid := json.Valid(body); valid == invalid {
			t.Fatalf("%q: encoding/json says %v, scanner says %v", body, valid, err)
		}
	})
}

func TestUsageOfABodyIsFoundInAnyPieces(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]Usage{
		`{"id":"x","choices":[{"usage":{"prompt_tokens":9},"t":"\"usage\":{"}],"usage":{"prompt_tokens":3,"completion_tokens":4,"d":{"x":[1,2]}},"z":1}`: {3, 4},
		`{"text":"hi","usage":{"type":"tokens","input_tokens":14,"output_tokens":45}}`:                                                                   {14, 45},
		`{"usage" : {"prompt_tokens":1e99}}`: {maximumTokens, 0},
	} {
		for size := 1; size <= len(body); size++ {
			var u BodyUsage
			for from := 0; from < len(body); from += size {
				u.Feed([]byte(body[from:min(from+size, len(body))]))
			}
			if got, ok := u.Usage(); !ok || got != want {
				t.Fatalf("%s in pieces of %d: %+v %v", body, size, got, ok)
			}
		}
	}
	for _, body := range []string{`{"usage":null}`, `{"a":{"usage":{"prompt_tokens":1}}}`, `{"usage":{"type":"duration","seconds":3}}`, `not json`,
		`{"usage":{"prompt_tokens":1,"x":"` + strings.Repeat("y", maximumUsage) + `"}}`} {
		var u BodyUsage
		u.Feed([]byte(body))
		if got, ok := u.Usage(); ok {
			t.Errorf("%.40s: %+v", body, got)
		}
	}
}
