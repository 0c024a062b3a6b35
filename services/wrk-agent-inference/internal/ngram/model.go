package ngram

import (
	_ "embed"
	"math"
	"slices"
	"strings"
	"sync"
)

// order is the longest context plus one.
const order = 5

//go:embed corpus/corpus.txt
var corpusText string

// Model is an immutable model; it is safe for concurrent use.
type Model struct {
	words  map[string]Token
	texts  []string // of tokens from firstWord
	size   int      // of the vocabulary
	corpus []Token
	// passage[i] is the number of the passage that corpus[i] belongs to.
	passage  []int32
	passages int
	// suffixes are the positions of the corpus, ordered by the tokens that begin there.
	suffixes []int32
	// topics[w] lists the passages that hold a word, by its lower-case stem.
	topics map[string][]int32
}

// Default is the model of the corpus in this binary; it is built at the first call.
var Default = sync.OnceValue(func() *Model { return New(corpusText) })

// New builds a model of a text whose passages are parted by empty lines. A line
// that begins with '#' is a comment.
func New(text string) *Model {
	m := &Model{words: map[string]Token{}, topics: map[string][]int32{}}
	for block := range strings.SplitSeq(strings.ReplaceAll(text, "\r\n", "\n"), "\n\n") {
		var lines []string
		for line := range strings.SplitSeq(block, "\n") {
			if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
				lines = append(lines, line)
			}
		}
		if passage := strings.Join(lines, " "); passage != "" {
			m.add(passage)
		}
	}
	m.size = int(firstWord) + len(m.texts)
	m.suffixes = make([]int32, len(m.corpus))
	for i := range m.suffixes {
		m.suffixes[i] = int32(i)
	}
	slices.SortFunc(m.suffixes, func(a, b int32) int {
		return slices.Compare(m.window(a), m.window(b))
	})
	return m
}

func (m *Model) window(at int32) []Token {
	return m.corpus[at:min(int(at)+order, len(m.corpus))]
}

func (m *Model) add(passage string) {
	number := int32(m.passages)
	m.passages++
	seen := map[string]bool{}
	put := func(t Token) {
		m.corpus = append(m.corpus, t)
		m.passage = append(m.passage, number)
	}
	put(Assistant) // a passage is what an answer looks like
	pieces(passage, func(piece string) {
		t, ok := m.words[piece]
		if !ok {
			t = firstWord + Token(len(m.texts))
			m.words[piece] = t
			m.texts = append(m.texts, piece)
		}
		put(t)
		if s := stem(piece); s != "" && !seen[s] {
			seen[s] = true
			m.topics[s] = append(m.topics[s], number)
		}
	})
	put(End)
}

// Vocabulary is the number of tokens.
func (m *Model) Vocabulary() int { return m.size }

// CorpusTokens is the number of tokens that the model was made of.
func (m *Model) CorpusTokens() int { return len(m.corpus) }

// stem makes "Replicas," and "replica" one word of interest; short words are none.
func stem(piece string) string {
	s := strings.ToLower(strings.TrimSpace(piece))
	if len(s) < 3 || !isASCIILetter(s[0]) || common[s] {
		return ""
	}
	for _, ending := range []string{"ing", "ies", "es", "ed", "s"} {
		if strings.HasSuffix(s, ending) && len(s)-len(ending) >= 3 {
			return s[:len(s)-len(ending)]
		}
	}
	return strings.TrimSuffix(s, "e")
}

var common = func() map[string]bool {
	m := map[string]bool{}
	for _, w := range strings.Fields(`the and are for with that this from what how does why who when where which can you your its not
		but has have had was were will would should could may please tell explain about into than then them they their there here
		one each every any all only also very more most some such our out over under own same other be is it as at by do if in of on or to up we an am me my so no`) {
		m[w] = true
	}
	return m
}()

// Weights says how much each passage has to do with a prompt, at least 1. It is
// what makes two prompts with the same last words differ.
func (m *Model) Weights(prompt string) []float64 {
	weights := make([]float64, m.passages)
	asked := map[string]bool{}
	pieces(prompt, func(piece string) {
		if s := stem(piece); s != "" {
			asked[s] = true
		}
	})
	for s := range asked { // sums of the same terms: exact below in order of passages
		holders := m.topics[s]
		if len(holders) == 0 {
			continue
		}
		rarity := math.Round(16*math.Log(1+float64(m.passages)/float64(len(holders)))) / 16
		for _, p := range holders {
			weights[p] += rarity
		}
	}
	best := slices.Max(weights)
	for i, w := range weights {
		if best > 0 {
			weights[i] = 1 + 400*math.Pow(w/best, 6)
		} else {
			weights[i] = 1
		}
	}
	return weights
}

// find returns the range of suffixes that begin with context.
func (m *Model) find(context []Token) (from, to int) {
	from, _ = slices.BinarySearchFunc(m.suffixes, context, func(at int32, c []Token) int { return slices.Compare(m.prefix(at, len(c)), c) })
	to, _ = slices.BinarySearchFunc(m.suffixes, context, func(at int32, c []Token) int {
		if slices.Compare(m.prefix(at, len(c)), c) <= 0 {
			return -1
		}
		return 1
	})
	return from, to
}

func (m *Model) prefix(at int32, n int) []Token {
	return m.corpus[at:min(int(at)+n, len(m.corpus))]
}
