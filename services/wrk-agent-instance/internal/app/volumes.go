package app

import (
	"context"
	"fmt"

	"github.com/cosmicac/cosmicac/pkg/agent"
	"github.com/cosmicac/cosmicac/pkg/ssh"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	"github.com/cosmicac/cosmicac/services/wrk-agent-instance/internal/volume"
)

// mountVolumes mounts what the seed names. One that cannot be mounted is said on the
// console and keeps nobody out: a shell is what one needs then. A simulated VM has its
// volumes in place.
func (i *Instance) mountVolumes(ctx context.Context) {
	seed, log := i.agent.Seed(), i.agent.Log()
	if seed.GetSimulated() {
		return
	}
	user, group := 0, 0
	if account, err := ssh.FindAccount("/etc", seed.GetDefaultUser()); err == nil {
		user, group = int(account.UID), int(account.GID)
	}
	m := volume.New(user, group)
	m.Tidy()
	for _, v := range seed.GetVolumes() {
		i.agent.Set(agentv1.Phase_PHASE_STARTING, "mounts volume "+v.GetName())
		did, err := m.Mount(ctx, volume.Volume{Name: v.GetName(), ReadOnly: v.GetReadOnly()})
		if ctx.Err() != nil {
			return
		}
		switch {
		case err != nil:
			log.Error("a volume is not mounted", "volume", v.GetName(), "error", err)
			i.agent.Line(agent.SourceConsole, fmt.Appendf(nil, "cosmicac: volume %s is not mounted: %v", v.GetName(), err))
		case did != "":
			log.Info("volume mounted", "volume", v.GetName(), "did", did)
			i.agent.Line(agent.SourceConsole, fmt.Appendf(nil, "cosmicac: volume %s is mounted at /volumes/%s: %s", v.GetName(), v.GetName(), did))
		default:
			log.Info("volume mounted", "volume", v.GetName())
		}
	}
}
