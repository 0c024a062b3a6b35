package ngram

import (
	"unicode"
	"unicode/utf8"
)

// Token numbers a piece of text. The first 256 are single bytes, so that any text
// can be encoded and decoded exactly; then come the special ones, then the words
// of the corpus with the space before them.
type Token int32

// Special tokens have no text.
const (
	End Token = 256 + iota // the end of a passage or an answer
	System
	User
	Assistant
	firstWord
)

// Special tells whether a token has no text.
func (t Token) Special() bool { return t >= End && t < firstWord }

// pieces calls f with each piece of text in order: a run of letters, a digit, a
// run of the same kind of mark, or white space; one space before a word or number
// belongs to it. The pieces make up the text.
func pieces(text string, f func(string)) {
	for len(text) > 0 {
		n := pieceLength(text)
		f(text[:n])
		text = text[n:]
	}
}

func pieceLength(text string) int {
	start := 0
	r, size := utf8.DecodeRuneInString(text)
	if r == ' ' && len(text) > 1 {
		next, nextSize := utf8.DecodeRuneInString(text[1:])
		if !unicode.IsSpace(next) {
			start, r, size = 1, next, nextSize
		}
	}
	end := start + size
	switch {
	case unicode.IsLetter(r):
		for end < len(text) {
			r, size := utf8.DecodeRuneInString(text[end:])
			// An apostrophe inside a word belongs to it.
			if r == '\'' && end+1 < len(text) && isASCIILetter(text[end+1]) {
				end += 1
				continue
			}
			if !unicode.IsLetter(r) {
				break
			}
			end += size
		}
	case unicode.IsSpace(r):
		for end < len(text) {
			next, size := utf8.DecodeRuneInString(text[end:])
			// The last space goes to the word behind it.
			if !unicode.IsSpace(next) || next != r {
				break
			}
			if r == ' ' && end+size < len(text) {
				if after, _ := utf8.DecodeRuneInString(text[end+size:]); !unicode.IsSpace(after) {
					break
				}
			}
			end += size
		}
	}
	return end
}

func isASCIILetter(b byte) bool { return b|0x20 >= 'a' && b|0x20 <= 'z' }

// Encode turns text into tokens. Text that the corpus does not have is spelled in bytes.
func (m *Model) Encode(text string) []Token {
	var out []Token
	pieces(text, func(piece string) {
		if t, ok := m.words[piece]; ok {
			out = append(out, t)
			return
		}
		for i := range len(piece) {
			out = append(out, Token(piece[i]))
		}
	})
	return out
}

// Text is a token's text; a single byte may be a part of a character.
func (m *Model) Text(t Token) string {
	switch {
	case t < 0 || int(t) >= m.size:
		return ""
	case t < End:
		return string([]byte{byte(t)})
	case t < firstWord:
		return ""
	}
	return m.texts[t-firstWord]
}
