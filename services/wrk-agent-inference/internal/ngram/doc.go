// Package ngram is a small language model in plain Go: an interpolated 5-gram
// with Witten-Bell back-off over a corpus that is part of the binary, this
// project's own writing about itself. It is the model of the runtime "embedded",
// which shows that everything around a model works where there is no GPU.
//
// It is a real model of its kind: each token is drawn from a distribution that
// depends on the tokens before it and, by the weight that each passage of the
// corpus gets from the words of the prompt, on what was asked. It knows nothing
// else, does not reason, and is often wrong: its quality is simulated, and the
// server over it says so.
//
// It holds no request state, starts no goroutine, reads no clock and has no
// randomness of its own: the same prompt, options and seed give the same tokens.
package ngram
