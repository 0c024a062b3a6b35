package ngram

import (
	"cmp"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
)

// Sampling says how tokens are drawn.
type Sampling struct {
	// Temperature 0 takes the likeliest token each time.
	Temperature float64
	// TopP keeps the likeliest tokens that together hold this much, 0 < TopP <= 1.
	TopP float64
	// TopK keeps so many tokens; 0 keeps all.
	TopK int
	// PresencePenalty and FrequencyPenalty lower what was generated before.
	PresencePenalty, FrequencyPenalty float64
	// NoEnd never draws the end of the answer.
	NoEnd bool
	// Seed of the draws.
	Seed uint64
}

// Generator makes one sequence. It is for one goroutine.
type Generator struct {
	model    *Model
	sampling Sampling
	weights  []float64
	context  []Token
	random   *rand.Rand
	counts   map[Token]int
	p        []float64 // probability of each token, reused
	level    []float64 // counts of one order, reused
	touched  []Token
}

// NewGenerator continues prompt; topic is the text whose words choose passages.
func (m *Model) NewGenerator(prompt []Token, topic string, s Sampling) *Generator {
	// The prompt is a part of the seed, so that two prompts that mean the same to
	// the model do not get the same words.
	h := fnv.New64a()
	for _, t := range prompt {
		h.Write([]byte{byte(t), byte(t >> 8), byte(t >> 16), byte(t >> 24)})
	}
	return &Generator{
		model: m, sampling: s, weights: m.Weights(topic), context: slices.Clone(prompt[max(0, len(prompt)-order+1):]),
		random: rand.New(rand.NewPCG(s.Seed, h.Sum64())), counts: map[Token]int{},
		p: make([]float64, m.size), level: make([]float64, m.size),
	}
}

// Next draws the next token and takes it into the context. At the end of the
// answer it is End, after which Next goes on with another passage.
func (g *Generator) Next() Token {
	g.distribute()
	t := g.draw()
	g.counts[t]++
	next := t
	if t == End {
		next = Assistant
	}
	g.context = append(g.context, next)
	if len(g.context) >= order {
		g.context = slices.Delete(g.context, 0, len(g.context)-order+1)
	}
	return t
}

// distribute fills p: from no context up to the longest, each level mixes what
// it saw with the level below, the more so the more different tokens it saw
// (Witten-Bell).
func (g *Generator) distribute() {
	m := g.model
	clear(g.p)
	// Below the shortest level every word is possible, hardly.
	words := 1e-6 / float64(len(m.texts))
	for i := int(firstWord); i < m.size; i++ {
		g.p[i] = words
	}
	for n := 0; n <= len(g.context); n++ {
		from, to := m.find(g.context[len(g.context)-n:])
		if from == to && n > 0 {
			break // a longer context cannot have been seen either
		}
		var total float64
		kinds := 0
		g.touched = g.touched[:0]
		for _, at := range m.suffixes[from:to] {
			i := int(at) + n
			if i >= len(m.corpus) {
				continue
			}
			t := m.corpus[i]
			if t == Assistant { // begins a passage, and is never said
				continue
			}
			w := g.weights[m.passage[i]]
			if g.level[t] == 0 {
				kinds++
				g.touched = append(g.touched, t)
			}
			g.level[t] += w
			total += w
		}
		if kinds == 0 {
			continue
		}
		mean := total / float64(kinds)
		below := 0.25 * float64(kinds) * mean
		if n == 0 {
			below = 1e-6 * total
		}
		for i := range g.p {
			g.p[i] *= below / (total + below)
		}
		slices.Sort(g.touched) // sums in one order, so that equal seeds give equal bits
		for _, t := range g.touched {
			g.p[t] += g.level[t] / (total + below)
			g.level[t] = 0
		}
	}
	if g.sampling.NoEnd {
		g.p[End] = 0
	}
}

type choice struct {
	token  Token
	weight float64
}

func (g *Generator) draw() Token {
	s := g.sampling
	var list []choice
	for t, p := range g.p {
		if p <= 0 {
			continue
		}
		logit := math.Log(p)
		if n := g.counts[Token(t)]; n > 0 {
			logit -= s.PresencePenalty + s.FrequencyPenalty*float64(n)
		}
		list = append(list, choice{Token(t), logit})
	}
	slices.SortFunc(list, func(a, b choice) int {
		return cmp.Or(cmp.Compare(b.weight, a.weight), cmp.Compare(a.token, b.token))
	})
	if s.Temperature <= 0 {
		return list[0].token
	}
	if s.TopK > 0 {
		list = list[:min(s.TopK, len(list))]
	}
	highest, total := list[0].weight, 0.0
	for i := range list {
		list[i].weight = math.Exp((list[i].weight - highest) / s.Temperature)
		total += list[i].weight
	}
	if s.TopP < 1 {
		var kept float64
		for i := range list {
			kept += list[i].weight
			if kept >= s.TopP*total {
				list, total = list[:i+1], kept
				break
			}
		}
	}
	at := g.random.Float64() * total
	for _, c := range list {
		if at -= c.weight; at < 0 {
			return c.token
		}
	}
	return list[len(list)-1].token
}
