package agent

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
)

const (
	// SeedVersion is the one version of the seed that this agent knows.
	SeedVersion = 1
	// maxSeedBytes is more than a Secret holds.
	maxSeedBytes = 1 << 20
)

// LoadSeed reads and checks the seed. Its mode is cloud-init's business and not
// looked at. An error names every field that is wrong, and no value of a secret.
func LoadSeed(path string) (*agentv1.Seed, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fault.Wrap(fault.NotFound, err, "open seed %s: %v", path, err)
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxSeedBytes+1))
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "read seed %s: %v", path, err)
	}
	if len(raw) > maxSeedBytes {
		return nil, fault.New(fault.TooLarge, "seed %s is over %d bytes", path, maxSeedBytes)
	}
	seed := &agentv1.Seed{}
	// A newer worker may add fields of the same version; they do not concern this agent.
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(raw, seed); err != nil {
		// The parser quotes what it stumbled on, which may be the token.
		return nil, fault.New(fault.Invalid, "seed %s is no protobuf JSON of cosmicac.agent.v1.Seed", path)
	}
	if err := CheckSeed(seed); err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "seed %s: %v", path, err).With(fault.DetailsOf(err)...)
	}
	return seed, nil
}

// CheckSeed names every field of a seed that an agent could not work with.
func CheckSeed(s *agentv1.Seed) error {
	if s.GetVersion() != SeedVersion {
		return fault.New(fault.Unsupported, "version is %d, this agent knows %d: the agent disk and the worker are of different releases", s.GetVersion(), SeedVersion).
			With(fault.Detail{Field: "version", Rule: fmt.Sprintf("must be %d", SeedVersion)})
	}
	var wrong []fault.Detail
	rule := func(ok bool, field, rule string) {
		if !ok {
			wrong = append(wrong, fault.Detail{Field: field, Rule: rule})
		}
	}
	isKey := func(text string) bool { _, err := identity.ParseID(text); return err == nil }
	_, err := trust.ParseNetworkID(s.GetNetworkId())
	rule(err == nil, "network_id", "must be 16 bytes that are not all zero")
	rule(len(s.GetRootKeys()) > 0, "root_keys", "must name at least one key")
	for i, k := range s.GetRootKeys() {
		rule(isKey(k), fmt.Sprintf("root_keys[%d]", i), "must be a key")
	}
	for i, b := range s.GetBootstraps() {
		rule(isKey(b.GetKey()), fmt.Sprintf("bootstraps[%d].key", i), "must be a key")
	}
	rule(isKey(s.GetOrkKey()), "ork_key", "must be a key")
	rule(s.GetJobId() != "", "job_id", "must be set")
	rule(s.GetReplicaId() != "", "replica_id", "must be set")
	rule(s.GetAttemptId() != "", "attempt_id", "must be set")
	rule(!strings.ContainsAny(s.GetAttemptId(), "/\x00"), "attempt_id", "must not hold a slash")
	rule(s.GetMeshPort() <= 65535, "mesh_port", "must be at most 65535")
	if s.GetMeshListen() != "" {
		_, err = netip.ParseAddr(s.GetMeshListen())
		rule(err == nil, "mesh_listen", "must be an IP address")
	}
	rule(!strings.ContainsAny(s.GetDefaultUser(), ":/\n\x00"), "default_user", "must be a login name")
	for k := range s.GetEnvironment() {
		rule(k != "" && !strings.ContainsAny(k, "=\x00"), "environment", "names must not be empty or hold an equals sign")
	}
	if len(wrong) == 0 {
		return nil
	}
	texts := make([]string, len(wrong))
	for i, d := range wrong {
		texts[i] = d.Field + " " + d.Rule
	}
	return fault.New(fault.Invalid, "%s", strings.Join(texts, "; ")).With(wrong...)
}
