package cli

import (
	"crypto/sha256"
	_ "embed"
	"strings"

	"github.com/libp2p/go-libp2p/core/peer"
)

// wordList is the English list of BIP 39: 2048 words that differ in their first
// four letters.
//
//go:embed words.txt
var wordList string

// keyWords is a key as six words, for two people to compare by voice. They stand
// for 66 bits of its hash: too many to make a second key with the same words.
func keyWords(p peer.ID) string {
	words := strings.Fields(wordList)
	sum := sha256.Sum256([]byte("cosmicac key words " + p.String()))
	picked := make([]string, 6)
	for i := range picked {
		index := 0
		for bit := i * 11; bit < (i+1)*11; bit++ {
			index = index<<1 | int(sum[bit/8]>>(7-bit%8)&1)
		}
		picked[i] = words[index]
	}
	return strings.Join(picked, "-")
}
