package trust

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/renameio/v2"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// The files of a network's folder.
const (
	genesisFile = "genesis.bin"
	rosterFile  = "roster.bin"
	infoFile    = "network-info.bin"
	keyFile     = "network.key"
)

const networkKeyBytes = 32

// RosterLife is how long a roster is good by default.
const RosterLife = 90 * 24 * time.Hour

// OpenDirectory reads the network that a folder holds. Without a genesis there it
// is fault.NotFound. Everything read is verified again; a file that does not
// verify is an error that names it, never skipped.
func OpenDirectory(dir string) (*Network, error) {
	genesis, err := read(dir, genesisFile, MaxRecordBytes)
	if err != nil {
		return nil, err
	}
	if genesis == nil {
		return nil, fault.New(fault.NotFound, "%s holds no network: found one with `cosmicac network init` or join one with `cosmicac join`", dir)
	}
	g, err := OpenGenesis(genesis)
	if err != nil {
		return nil, inFile(dir, genesisFile, err)
	}
	id, err := ParseNetworkID(g.GetNetworkId())
	if err != nil {
		return nil, inFile(dir, genesisFile, err)
	}
	n := newNetwork(id, dir, g.GetRootKeys())
	n.genesis = genesis
	roster, err := read(dir, rosterFile, MaxRosterBytes)
	if err != nil {
		return nil, err
	}
	info, err := read(dir, infoFile, MaxInfoBytes)
	if err != nil {
		return nil, err
	}
	if file, err := n.load(g, roster, info); err != nil {
		return nil, inFile(dir, file, err)
	}
	if n.networkKey, err = readNetworkKey(dir); err != nil {
		return nil, err
	}
	n.expired = n.state.roster != nil && !n.state.inForce(n.now())
	return n, nil
}

// load verifies a roster and NetworkInfo that were taken before; either may be
// empty. After a rotation the roster may still be one that an earlier root key
// signed, and its time may be over. An error comes with the file it is in.
func (n *Network) load(g *meshv1.Genesis, roster, info []byte) (file string, err error) {
	roots := slices.Clone(g.GetRootKeys())
	if len(info) > 0 {
		m, _, err := openNetworkInfo(info)
		if err != nil {
			return infoFile, err
		}
		for _, env := range m.GetRotationEnvelopes() {
			r, _, err := openGenesis(env)
			if err != nil {
				return infoFile, err
			}
			roots = append(roots, r.GetRootKeys()...)
		}
		if _, err := follow(n.id, g.GetRootKeys(), m.GetRotationEnvelopes()); err != nil {
			return infoFile, err
		}
	}
	now := n.now()
	if len(roster) > 0 {
		if _, err := n.state.takeRoster(n.id, 0, roots, roster, now, true); err != nil {
			return rosterFile, err
		}
	}
	next, _, err := n.state.advance(n.id, 0, nil, info, now, true)
	if err != nil {
		return infoFile, err
	}
	n.state = next
	return "", nil
}

// OpenRecords verifies records that lie in a file and holds them in memory. A
// roster whose time is over is held too, as after OpenDirectory.
func OpenRecords(r *meshv1.NetworkRecords) (*Network, error) {
	g, err := OpenGenesis(r.GetGenesisEnvelope())
	if err != nil {
		return nil, err
	}
	id, err := ParseNetworkID(g.GetNetworkId())
	if err != nil {
		return nil, err
	}
	n := newNetwork(id, "", g.GetRootKeys())
	n.genesis = bytes.Clone(r.GetGenesisEnvelope())
	if _, err := n.load(g, r.GetRosterEnvelope(), r.GetNetworkInfoEnvelope()); err != nil {
		return nil, err
	}
	return n, nil
}

// Records are the signed records held, to lie in a file.
func (n *Network) Records() *meshv1.NetworkRecords {
	s := n.snapshot()
	return &meshv1.NetworkRecords{GenesisEnvelope: n.Genesis(), RosterEnvelope: s.rosterEnv, NetworkInfoEnvelope: s.infoEnv}
}

// Restore makes a network's folder of records in a file, and of the network key if
// one is given. In a folder that holds the same network it takes what is newer;
// a folder of another network is refused.
func Restore(dir string, r *meshv1.NetworkRecords, networkKey []byte) (*Network, error) {
	restored, err := OpenRecords(r)
	if err != nil {
		return nil, err
	}
	if n := len(networkKey); n != 0 && n != networkKeyBytes {
		return nil, fault.New(fault.Invalid, "a network key of %d bytes, want %d", n, networkKeyBytes)
	}
	n, err := OpenDirectory(dir)
	switch {
	case fault.Is(err, fault.NotFound):
		n = restored
		n.dir = dir
		if len(networkKey) > 0 {
			n.networkKey = bytes.Clone(networkKey)
		}
		n.mu.Lock()
		defer n.mu.Unlock()
		return n, n.save()
	case err != nil:
		return nil, err
	case n.id != restored.id:
		return nil, fault.New(fault.Conflict, "%s holds network %s, the records are of network %s: choose another folder", dir, n.id, restored.id)
	}
	if _, err := n.Adopt(r.GetRosterEnvelope(), r.GetNetworkInfoEnvelope()); err != nil {
		return nil, err
	}
	if len(networkKey) > 0 {
		return n, n.SetNetworkKey(networkKey)
	}
	return n, nil
}

// Create founds a network: a random id, a genesis and a first roster and
// NetworkInfo signed by root, a random network key. Second may be nil; it is for
// the safe. With an empty dir the network lives in memory; a folder that holds a
// network already is refused.
func Create(dir, name string, root, second *identity.Key, members []*meshv1.Member, bootstraps []*meshv1.BootstrapAddress) (*Network, error) {
	if dir != "" {
		if old, err := read(dir, genesisFile, MaxRecordBytes); err != nil || old != nil {
			if err == nil {
				err = fault.New(fault.Conflict, "%s holds a network already", dir)
			}
			return nil, err
		}
	}
	var id NetworkID
	if _, err := io.ReadFull(rand.Reader, id[:]); err != nil {
		return nil, fault.Wrap(fault.Internal, err, "make a network id")
	}
	key := make([]byte, networkKeyBytes)
	if _, err := io.ReadFull(rand.Reader, key); err != nil {
		return nil, fault.Wrap(fault.Internal, err, "make a network key")
	}
	roots := []string{root.ID().String()}
	if second != nil {
		roots = append(roots, second.ID().String())
	}
	now := time.Now()
	stamp := timestamppb.New(now)
	genesis, err := SealGenesis(root, &meshv1.Genesis{NetworkId: id[:], Name: name, RootKeys: roots, CreatedAt: stamp})
	if err != nil {
		return nil, err
	}
	roster, err := SealRoster(root, &meshv1.Roster{
		NetworkId: id[:], Version: 1, Members: members, IssuedAt: stamp, NotAfter: timestamppb.New(now.Add(RosterLife)),
	})
	if err != nil {
		return nil, err
	}
	info, err := SealNetworkInfo(root, &meshv1.NetworkInfo{
		NetworkId: id[:], Sequence: 1, Bootstraps: bootstraps, RootKeys: roots, IssuedAt: stamp,
	})
	if err != nil {
		return nil, err
	}
	n := newNetwork(id, dir, roots)
	n.genesis, n.networkKey = genesis, key
	if _, err := n.Adopt(roster, info); err != nil {
		return nil, err
	}
	return n, nil
}

// Join prepares a folder for the network that a token names. Nothing is written
// until AdoptGenesis and Adopt bring what an admission answers; a folder that
// holds that same network is opened, one of another network is refused.
func Join(dir string, token *meshv1.JoinToken) (*Network, error) {
	if err := checkJoinToken(token); err != nil {
		return nil, err
	}
	id, err := ParseNetworkID(token.GetNetworkId())
	if err != nil {
		return nil, err
	}
	if dir != "" {
		n, err := OpenDirectory(dir)
		if err == nil {
			if n.id != id {
				return nil, fault.New(fault.Conflict, "%s holds network %s, the token is of network %s: choose another folder", dir, n.id, id)
			}
			n.SetMinimumRosterVersion(token.GetMinimumRosterVersion())
			return n, nil
		}
		if !fault.Is(err, fault.NotFound) {
			return nil, err
		}
	}
	n := newNetwork(id, dir, token.GetRootKeys())
	n.floor = token.GetMinimumRosterVersion()
	return n, nil
}

// save writes what is held; mu is held. Each file is replaced whole. Before the
// genesis is known nothing is written, since the folder could not be read again.
func (n *Network) save() error {
	if n.dir == "" || n.genesis == nil {
		return nil
	}
	n.unsaved = true
	if err := os.MkdirAll(n.dir, 0o755); err != nil {
		return fault.Wrap(fault.Unavailable, err, "save network").With(storage)
	}
	for _, f := range []struct {
		name string
		data []byte
		mode os.FileMode
	}{
		{keyFile, n.networkKey, 0o600},
		{infoFile, n.state.infoEnv, 0o644},
		{rosterFile, n.state.rosterEnv, 0o644},
		{genesisFile, n.genesis, 0o644}, // last: a folder with a genesis is complete
	} {
		if f.data == nil {
			continue
		}
		path := filepath.Join(n.dir, f.name)
		if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, f.data) {
			continue
		}
		if err := renameio.WriteFile(path, f.data, f.mode, renameio.IgnoreUmask()); err != nil {
			return fault.Wrap(fault.Unavailable, err, "save %s", path).With(storage)
		}
	}
	n.unsaved = false
	return nil
}

var storage = fault.Detail{Field: "reason", Rule: "storage"}

func inFile(dir, name string, err error) error {
	return fault.Wrap(fault.KindOf(err), err, "%s cannot be trusted (restore it, or join the network anew)", filepath.Join(dir, name))
}

// read returns nil for a file that is not there.
func read(dir, name string, limit int) ([]byte, error) {
	f, err := os.Open(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fault.Wrap(fault.Unavailable, err, "read network").With(storage)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, int64(limit)+1))
	if err != nil {
		return nil, fault.Wrap(fault.Unavailable, err, "read network").With(storage)
	}
	if len(data) > limit {
		return nil, fault.New(fault.TooLarge, "%s has more than %d bytes", f.Name(), limit)
	}
	return data, nil
}

func readNetworkKey(dir string) ([]byte, error) {
	path := filepath.Join(dir, keyFile)
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fault.Wrap(fault.Unavailable, err, "read network key").With(storage)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fault.New(fault.Denied, "network key %s has mode %04o, others may read it; want 0600: chmod 600 %s", path, info.Mode().Perm(), path)
	}
	key, err := read(dir, keyFile, networkKeyBytes)
	if err == nil && len(key) != networkKeyBytes {
		err = fault.New(fault.Invalid, "network key %s has %d bytes, want %d", path, len(key), networkKeyBytes)
	}
	return key, err
}
