package ngram_test

import (
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/cosmicac/cosmicac/services/wrk-agent-inference/internal/ngram"
)

func generate(m *ngram.Model, prompt string, n int, s ngram.Sampling) string {
	g := m.NewGenerator(append(m.Encode(prompt), ngram.Assistant), prompt, s)
	var b strings.Builder
	for range n {
		t := g.Next()
		if t == ngram.End {
			break
		}
		b.WriteString(m.Text(t))
	}
	return b.String()
}

func TestAnyTextIsEncodedAndDecodedExactly(t *testing.T) {
	t.Parallel()
	m := ngram.Default()
	check := func(text string) bool {
		var b strings.Builder
		for _, token := range m.Encode(text) {
			b.WriteString(m.Text(token))
		}
		return b.String() == text
	}
	for _, text := range []string{"", " ", "  two  spaces ", "a job's GPUs", "naïve 日本 \xff\xfe bytes", "tabs\t\tand\r\nlines\n\n", "don't 'quote' 12 345"} {
		if !check(text) {
			t.Errorf("%q is not the same after encoding", text)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		if text := string(rapid.SliceOf(rapid.Byte()).Draw(t, "text")); !check(text) {
			t.Fatalf("%q is not the same after encoding", text)
		}
	})
}

func TestSameSeedSameTextOtherSeedOtherText(t *testing.T) {
	t.Parallel()
	m := ngram.Default()
	s := ngram.Sampling{Temperature: 1, TopP: 1, Seed: 7}
	first := generate(m, "what is a rack", 60, s)
	for range 3 {
		if again := generate(m, "what is a rack", 60, s); again != first {
			t.Fatalf("%q became %q", first, again)
		}
	}
	texts := map[string]bool{}
	for seed := range uint64(8) {
		s.Seed = seed
		texts[generate(m, "what is a rack", 60, s)] = true
	}
	if len(texts) < 4 {
		t.Fatalf("eight seeds gave %d texts", len(texts))
	}
}

func TestAnswerDependsOnThePrompt(t *testing.T) {
	t.Parallel()
	m := ngram.Default()
	s := ngram.Sampling{Temperature: 0, TopP: 1}
	var texts []string
	for _, prompt := range []string{"What is a rack?", "How do I open a shell?", "What does temperature do?", "Tell me about the roster"} {
		texts = append(texts, generate(m, prompt, 80, s))
	}
	for i, text := range texts {
		if slices.Contains(texts[:i], text) {
			t.Errorf("two prompts gave %q", text)
		}
		if len(text) < 20 {
			t.Errorf("hardly a text: %q", text)
		}
	}
	if !strings.Contains(texts[0], "rack") || !strings.Contains(texts[1], "shell") {
		t.Errorf("answers are beside the question: %q", texts)
	}
}

func TestTextIsNotMerelyRecited(t *testing.T) {
	t.Parallel()
	m := ngram.New("the red fox runs over the hill\n\nthe blue fox sleeps under the tree\n\na red bird sings over the hill")
	mixed := false
	for seed := range uint64(4000) {
		text := generate(m, "", 20, ngram.Sampling{Temperature: 1, TopP: 1, Seed: seed})
		mixed = mixed || strings.Contains(text, "blue fox runs") || strings.Contains(text, "red fox sleeps")
	}
	if !mixed {
		t.Fatal("no sentence was ever mixed from two")
	}
}

func BenchmarkNext(b *testing.B) {
	m := ngram.Default()
	g := m.NewGenerator(append(m.Encode("what is a rack"), ngram.Assistant), "what is a rack", ngram.Sampling{Temperature: 1, TopP: 1, NoEnd: true})
	for b.Loop() {
		g.Next()
	}
}
