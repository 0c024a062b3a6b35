package app

import (
	"context"
	"fmt"
	"maps"
	"time"

	kubevirt "kubevirt.io/api/core/v1"

	"github.com/cosmicac/cosmicac/pkg/health"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/preflight"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/tenure"
)

// Periods of an outlook.
const (
	lookPeriod  = 5 * time.Second
	checkPeriod = 10 * time.Minute
	checkAgain  = time.Minute // while a gate stands
	checkTime   = 2 * time.Minute
	// pluginPatience is how long a device plugin may report too little before
	// somebody is called: a restart of the kubelet looks the same for a while.
	pluginPatience = 10 * time.Minute
)

// outlook keeps the health warnings about the cluster itself up to date.
type outlook struct {
	s      Setup
	target preflight.Target
	view   *cluster.View
	hold   *tenure.Tenure
	rack   func() *capacity.Rack

	raised   map[string]bool      // subjects of PreflightFailed from rows of the check
	nodes    map[string]bool      // and from nodes
	degraded map[string]time.Time // since when, by node and model
}

func kubeVirt(view *cluster.View) *kubevirt.KubeVirt {
	k, _ := view.KubeVirt()
	return k
}

func (o *outlook) run(ctx context.Context) error {
	o.raised, o.nodes, o.degraded = map[string]bool{}, map[string]bool{}, map[string]time.Time{}
	tick := time.NewTicker(lookPeriod)
	defer tick.Stop()
	var next time.Time
	for {
		o.duplicate()
		if o.view.Synced() {
			o.kubeVirt()
			o.troubledNodes()
		}
		if !o.s.Now().Before(next) {
			next = o.s.Now().Add(checkAgain)
			if o.check(ctx) {
				next = o.s.Now().Add(checkPeriod)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (o *outlook) duplicate() {
	if other, ok := o.hold.Other(); ok && other.Key == o.s.Self.Key {
		o.s.Health.RaiseFor(health.DuplicateKey, o.s.Self.Key, o.s.Self.Key, other.Place+" and "+o.s.Self.Place)
	} else {
		o.s.Health.Clear(health.DuplicateKey)
	}
}

func (o *outlook) kubeVirt() {
	if words := preflight.KubeVirt(kubeVirt(o.view)); words != "" {
		o.s.Health.RaiseFor(health.PreflightFailed, "kubevirt", words, "see deploy/README.md, what the cluster must have")
	} else {
		o.s.Health.ClearFor(health.PreflightFailed, "kubevirt")
	}
}

// check runs the readiness check and says whether nothing stands in the way. The
// state of the API server and of KubeVirt has warnings of its own.
func (o *outlook) check(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	findings := preflight.Check(ctx, o.target)
	if ctx.Err() != nil || len(findings) < 2 {
		return false
	}
	now := map[string]bool{}
	for _, f := range findings {
		if f.Verdict == workerv1.CheckVerdict_CHECK_VERDICT_GATE && f.Row != "kubevirt" {
			now[f.Row] = true
			o.s.Health.RaiseFor(health.PreflightFailed, f.Row, f.Message, f.Remedy)
		}
	}
	for row := range o.raised {
		if !now[row] {
			o.s.Health.ClearFor(health.PreflightFailed, row)
		}
	}
	o.raised = now
	return !preflight.Blocked(findings)
}

// troubledNodes tells of nodes that are gone with GPUs held on them, and of
// device plugins that have reported too little for long.
func (o *outlook) troubledNodes() {
	now, degraded := map[string]bool{}, map[string]time.Time{}
	for _, n := range o.rack().Nodes {
		if n.Missing {
			now["node "+n.Name] = true
			o.s.Health.RaiseFor(health.PreflightFailed, "node "+n.Name, n.Name+": "+n.Message,
				"find out whether the machine still runs; bring the node back, or stop the jobs on it once it is off")
		}
		for _, g := range n.GPUs {
			if !g.Degraded {
				continue
			}
			key := n.Name + "/" + g.Model
			degraded[key] = o.s.Now()
			if since, ok := o.degraded[key]; ok {
				degraded[key] = since
			}
			if since := degraded[key]; o.s.Now().Sub(since) >= pluginPatience {
				now["plugin "+key] = true
				o.s.Health.RaiseFor(health.PreflightFailed, "plugin "+key, fmt.Sprintf("node %s: %s, since %s", n.Name, g.Message, since.UTC().Format(time.RFC3339)),
					"jobs there go on; restart the virt-handler pod and the device plugin of that node")
			}
		}
	}
	for subject := range o.nodes {
		if !now[subject] {
			o.s.Health.ClearFor(health.PreflightFailed, subject)
		}
	}
	o.nodes, o.degraded = maps.Clone(now), degraded
}
