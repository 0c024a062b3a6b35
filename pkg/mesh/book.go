package mesh

import (
	"encoding/json"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/google/renameio/v2"
	"github.com/hashicorp/go-hclog"
	"github.com/libp2p/go-libp2p/core/peer"
	ma "github.com/multiformats/go-multiaddr"
)

// bookEntries bounds the book; the longest unused entry goes first.
const bookEntries = 512

// book remembers on disk where members were last dialed with success, so that a
// node finds its network again when the bootstraps are down. It is a cache: losing
// it loses nothing, and a wrong entry costs one dial.
type book struct {
	path string // "" keeps nothing on disk
	log  hclog.Logger

	mu      sync.Mutex
	entries map[string]bookEntry
	dirty   bool
}

type bookEntry struct {
	Address string    `json:"address"`
	Used    time.Time `json:"used"`
}

func openBook(dir string, log hclog.Logger) *book {
	b := &book{log: log, entries: make(map[string]bookEntry)}
	if dir == "" {
		return b
	}
	b.path = filepath.Join(dir, "peers.json")
	data, err := os.ReadFile(b.path)
	if err != nil {
		if !os.IsNotExist(err) {
			log.Warn("the last good addresses are not readable", "file", b.path, "reason", err)
		}
		return b
	}
	if err := json.Unmarshal(data, &b.entries); err != nil || b.entries == nil {
		log.Warn("the last good addresses are damaged and will be made anew", "file", b.path)
		b.entries = make(map[string]bookEntry)
	}
	return b
}

// good notes an address that worked.
func (b *book) good(p peer.ID, a ma.Multiaddr, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	key := p.String()
	if _, ok := b.entries[key]; !ok && len(b.entries) >= bookEntries {
		oldest, at := "", now.Add(time.Hour)
		for k, e := range b.entries {
			if e.Used.Before(at) {
				oldest, at = k, e.Used
			}
		}
		delete(b.entries, oldest)
	}
	b.entries[key] = bookEntry{a.String(), now.UTC().Truncate(time.Second)}
	b.dirty = true
}

func (b *book) recall(p peer.ID) ma.Multiaddr {
	b.mu.Lock()
	defer b.mu.Unlock()
	e, ok := b.entries[p.String()]
	if !ok {
		return nil
	}
	a, err := ma.NewMultiaddr(e.Address)
	if err != nil {
		return nil
	}
	return a
}

// known lists the keys in the book.
func (b *book) known() []peer.ID {
	b.mu.Lock()
	defer b.mu.Unlock()
	var list []peer.ID
	for k := range b.entries {
		if p, err := peer.Decode(k); err == nil {
			list = append(list, p)
		}
	}
	return list
}

// save writes the book if it changed, whole or not at all.
func (b *book) save() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.dirty || b.path == "" {
		return
	}
	data, err := json.MarshalIndent(b.entries, "", "  ")
	if err == nil {
		err = renameio.WriteFile(b.path, append(data, '\n'), 0o600)
	}
	if err != nil {
		b.log.Warn("the last good addresses could not be saved", "file", b.path, "reason", err)
		return
	}
	b.dirty = false
}
