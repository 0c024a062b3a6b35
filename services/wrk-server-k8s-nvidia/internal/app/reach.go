package app

import (
	"context"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// reachPeriod is how often it is looked where the orchestrator is.
const reachPeriod = time.Minute

// followMesh tells the graph where bootstraps and orchestrators are, whenever the
// network's records change and once a period, until ctx ends. While a card cannot
// be found, what it said last stands.
func followMesh(ctx context.Context, network *trust.Network, card func(context.Context, peer.ID) (*meshv1.Card, error), set func([]string)) error {
	changed, cancel := network.Subscribe()
	defer cancel()
	last := map[string][]string{}
	for {
		var all []string
		for _, b := range network.Info().GetBootstraps() {
			all = append(all, b.GetAddresses()...)
		}
		for _, m := range network.ByRole(meshv1.Role_ROLE_ORK) {
			if p, err := identity.ParseID(m.Key); err == nil {
				callCtx, cancel := context.WithTimeout(ctx, registerCall)
				c, err := card(callCtx, p)
				cancel()
				if err == nil {
					last[m.Key] = c.GetAddresses()
				}
			}
			all = append(all, last[m.Key]...)
		}
		set(all)
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-time.After(reachPeriod):
		}
	}
}
