package graph

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubevirt "kubevirt.io/api/core/v1"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/overlay"
)

const keyNetwork = "network"

// join gives the machines of a record over several nodes their adapters and a network
// of their own. Where the nodes have none in common the record says so by none, and its
// check refuses it.
func (s *Settings) join(rack *capacity.Rack, rec *claim.Record) {
	if len(rec.Nodes) < 2 {
		return
	}
	names := make([]string, 0, len(rec.Nodes))
	for _, n := range rec.Nodes {
		names = append(names, n.Node)
	}
	if rec.Adapter = rack.Joins(names); rec.Adapter == "" {
		return
	}
	for k := range rec.Nodes {
		n := &rec.Nodes[k]
		n.Adapters = rack.Nodes[n.Node].Share(rec.Adapter, rec.Model, n.GPUs)
	}
	rec.Overlay = s.Overlay.Plan()
}

// hostDevices are the adapters of the k-th machine, whole ones.
func hostDevices(rec *claim.Record, k int) []kubevirt.HostDevice {
	var out []kubevirt.HostDevice
	for i := range rec.Nodes[k].Adapters {
		out = append(out, kubevirt.HostDevice{Name: "ib" + strconv.Itoa(i), DeviceName: rec.Adapter})
	}
	return out
}

// place puts the k-th machine into the attempt's own network, if it has one.
func (s *Settings) place(rec *claim.Record, k int, spec *kubevirt.VirtualMachineInstanceSpec) {
	if rec.Overlay == nil {
		return
	}
	p := s.Overlay.Render(rec.Overlay, rec.AttemptID, k)
	spec.Domain.Devices.Interfaces, spec.Networks = p.Interfaces, p.Networks
}

// notGranted carries a refusal out of the writing of an anchor.
type notGranted struct{ refusal claim.Refusal }

func (n *notGranted) Error() string { return n.refusal.Message }

// allocate takes the attempt's network before its anchor is written, which remembers
// it. What a crash in between leaves is found by a second try, or swept away.
func (e *Engine) allocate(ctx context.Context, rec *claim.Record) error {
	if rec.Overlay == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	name, err := e.s.Overlay.Allocate(ctx, rec.AttemptID, rec.Overlay, e.s.attemptLabels(rec))
	var full *overlay.Exhausted
	switch {
	case errors.As(err, &full):
		return &notGranted{claim.Refusal{Reason: orkv1.Reason_REASON_BUSY, Message: full.Words}}
	case err != nil && cluster.Refused(err):
		return &notGranted{claim.Refusal{Reason: orkv1.Reason_REASON_CLUSTER_REFUSED, Message: "the cluster refuses the network of its own: " + cluster.Words(err)}}
	case err != nil:
		return err
	}
	rec.Overlay.Network = name
	return nil
}

// join sees that the attempt's own network is there.
func (p *pass) join(ctx context.Context) bool {
	a := p.a
	if a.rec.Overlay == nil {
		return true
	}
	if !a.network {
		ctx, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		_, err := p.e.s.Overlay.Allocate(ctx, a.rec.AttemptID, a.rec.Overlay, p.e.s.attemptLabels(a.rec))
		var lost *overlay.Lost
		if errors.As(err, &lost) {
			err = &refusal{failure(orkv1.Reason_REASON_CLUSTER_REFUSED, "%s", lost.Words)}
		}
		if err != nil {
			return p.did(keyNetwork, err, 0)
		}
		a.network = true
	}
	return p.did(keyNetwork, nil, 0)
}

// removeNetwork gives the attempt's own network back and says what remains. It comes
// after its machines and pods: what is in the network must be gone.
func (e *Engine) removeNetwork(ctx context.Context, a *attempt, now time.Time) (string, error) {
	if a.rec.Overlay == nil {
		return "", nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	left, err := e.s.Overlay.Release(ctx, a.rec.AttemptID)
	if err != nil {
		return "", err
	}
	if len(left) > 0 {
		return "NetworkAttachmentDefinition " + strings.Join(left, ", "), nil
	}
	a.see(now, keyNetwork, finding{state: stateGone, stage: "gone"})
	return "", nil
}

// sweepNetworks looks for networks of ours without an anchor. One goes only when
// nothing is in it: another attempt will have it next. Those whose quarantine is over
// go, too, also when the overlay is off by now.
func (e *Engine) sweepNetworks(ctx context.Context, consider considered) {
	if e.s.Overlay == nil {
		return
	}
	sweepCtx, done := context.WithTimeout(ctx, callTimeout)
	if err := e.s.Overlay.Sweep(sweepCtx, e.s.Network); err != nil {
		e.o.Log.Warn("cannot remove networks whose quarantine is over, the next sweep tries again", "error", cluster.Words(err))
	}
	done()
	if e.s.Overlay.Plan() == nil {
		return
	}
	ns := e.o.Client.Namespace
	callCtx, cancel := context.WithTimeout(ctx, callTimeout)
	found, err := e.o.Client.Networks.NetworkAttachmentDefinitions(ns).List(callCtx, metav1.ListOptions{
		LabelSelector: label.Rack + "=" + e.s.Rack + "," + label.Network + "=" + e.s.Network + "," + label.Attempt,
	})
	cancel()
	if err != nil {
		return // the next sweep looks again
	}
	for i := range found.Items {
		o := &found.Items[i]
		attempt := o.Labels[label.Attempt]
		consider("NetworkAttachmentDefinition", o.Name, attempt, o.UID, o.DeletionTimestamp != nil, func(ctx context.Context) error {
			of := metav1.ListOptions{LabelSelector: label.Attempt + "=" + attempt, Limit: 1}
			vmis, err := e.o.Client.KubeVirt.VirtualMachineInstances(ns).List(ctx, of)
			if err != nil {
				return err
			}
			pods, err := e.o.Client.Core.Pods(ns).List(ctx, of)
			if err != nil {
				return err
			}
			if len(vmis.Items)+len(pods.Items) > 0 {
				return fmt.Errorf("machines of attempt %s are still there", attempt)
			}
			_, err = e.s.Overlay.Release(ctx, attempt) // what is left of it is seen by the next sweep
			return err
		})
	}
}
