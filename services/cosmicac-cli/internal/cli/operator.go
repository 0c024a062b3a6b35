package cli

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// operatorDirectory holds operator.key, root.key (where it is kept online) and
// network/.
func operatorDirectory(flag string) (string, error) {
	if flag != "" {
		return flag, nil
	}
	if d := os.Getenv("COSMICAC_OPERATOR_DIR"); d != "" {
		return d, nil
	}
	if _, err := os.Stat("/etc/cosmicac/operator/network"); err == nil {
		return "/etc/cosmicac/operator", nil
	}
	home, err := os.UserConfigDir()
	if err != nil {
		return "", fault.Wrap(fault.Invalid, err, "no configuration folder; set COSMICAC_OPERATOR_DIR")
	}
	return filepath.Join(home, "cosmicac", "operator"), nil
}

// operatorNode joins the mesh as the operator. The caller closes it.
func operatorNode(ctx context.Context, directory string) (*mesh.Node, error) {
	key, err := identity.Load(filepath.Join(directory, "operator.key"))
	if err != nil {
		return nil, err
	}
	network, err := trust.OpenDirectory(filepath.Join(directory, "network"))
	if err != nil {
		return nil, err
	}
	node, err := mesh.New(ctx, mesh.Options{Key: key, Network: network, Role: meshv1.Role_ROLE_OPERATOR, Name: "operator", Version: daemon.Version,
		StateDirectory: directory, DHT: mesh.DHTClient})
	if err != nil {
		return nil, err
	}
	if err := node.Start(ctx); err != nil {
		return nil, err
	}
	return node, nil
}

// withOperator runs f with an operator's node.
func withOperator(ctx context.Context, flag string, f func(node *mesh.Node, directory string) error) error {
	directory, err := operatorDirectory(flag)
	if err != nil {
		return err
	}
	node, err := operatorNode(ctx, directory)
	if err != nil {
		return err
	}
	defer func() {
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = node.Close(stop)
	}()
	return f(node, directory)
}

// findDaemon turns a roster name, role, peer id or hex key into members.
func findDaemons(network *trust.Network, what string) ([]*meshv1.Member, error) {
	roster := network.Roster()
	if roster == nil {
		return nil, fault.New(fault.FailedPrecondition, "no roster is held here")
	}
	var found []*meshv1.Member
	for _, m := range roster.GetMembers() {
		if m.GetName() == what || m.GetKey() == what {
			return []*meshv1.Member{m}, nil
		}
		for _, r := range m.GetRoles() {
			if roleText(r) == what {
				found = append(found, m)
			}
		}
	}
	if len(found) > 0 {
		return found, nil
	}
	if p, err := identity.ParseID(what); err == nil {
		if m, ok := network.Member(p); ok {
			return []*meshv1.Member{m}, nil
		}
	}
	var names []string
	for _, m := range roster.GetMembers() {
		names = append(names, m.GetName())
	}
	return nil, fault.New(fault.NotFound, "no member is called %q; the roster has: %s", what, strings.Join(names, ", "))
}

// roleText is a role as people write it: "app-node".
func roleText(r meshv1.Role) string {
	return strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(r.String(), "ROLE_")), "_", "-")
}

func parseRole(s string) (meshv1.Role, error) {
	v, ok := meshv1.Role_value["ROLE_"+strings.ToUpper(strings.ReplaceAll(s, "-", "_"))]
	if !ok || v == 0 {
		var all []string
		for i := int32(1); i < int32(len(meshv1.Role_name)); i++ {
			all = append(all, roleText(meshv1.Role(i)))
		}
		return 0, fault.New(fault.Invalid, "role %q is not known", s).With(fault.Detail{Field: "roles", Rule: "one of " + strings.Join(all, ", ")})
	}
	return meshv1.Role(v), nil
}

func peerOf(m *meshv1.Member) (peer.ID, error) { return identity.ParseID(m.GetKey()) }
