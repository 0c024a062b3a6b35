package graph

import (
	"context"
	"fmt"
	"sort"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"google.golang.org/protobuf/types/known/timestamppb"

	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/cluster"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/overlay"
)

// holdingsMost bounds one answer.
const holdingsMost = 20_000

// Holdings asks the cluster for every object with this network's label, by live
// lists, and adds the claims in memory. Objects of other racks are among them:
// they share the namespace, and a rack that is no more cannot list its own.
// Secrets cannot be listed with the worker's rights; each is owned by the anchor
// of its attempt.
func (e *Engine) Holdings(ctx context.Context) *workerv1.ListHoldingsResponse {
	out := &workerv1.ListHoldingsResponse{RackId: e.s.Rack}
	add := func(kind string, o metav1.Object, node string, gpus int) {
		l := o.GetLabels()
		out.Holdings = append(out.Holdings, &workerv1.Holding{
			Kind: kind, Name: o.GetName(), RackId: l[label.Rack], JobId: l[label.Job], AttemptId: l[label.Attempt], VolumeId: l[label.Volume], NodeName: node, GpuCount: uint32(gpus),
			Deleting: o.GetDeletionTimestamp() != nil, CreatedAt: timestamppb.New(o.GetCreationTimestamp().Time), Probe: l[label.Probe] != "",
		})
	}
	ns, list := e.o.Client.Namespace, metav1.ListOptions{LabelSelector: label.Network + "=" + e.s.Network}
	for _, kind := range []struct {
		name string
		read func(context.Context) error
	}{
		{"ConfigMap", func(ctx context.Context) error {
			l, err := e.o.Client.Core.ConfigMaps(ns).List(ctx, list)
			if err == nil {
				for i := range l.Items {
					add("ConfigMap", &l.Items[i], "", anchoredGPUs(&l.Items[i]))
				}
			}
			return err
		}},
		{"VirtualMachineInstance", func(ctx context.Context) error {
			l, err := e.o.Client.KubeVirt.VirtualMachineInstances(ns).List(ctx, list)
			if err == nil {
				for i := range l.Items {
					add("VirtualMachineInstance", &l.Items[i], l.Items[i].Status.NodeName, len(l.Items[i].Spec.Domain.Devices.GPUs))
				}
			}
			return err
		}},
		{"Pod", func(ctx context.Context) error {
			l, err := e.o.Client.Core.Pods(ns).List(ctx, list)
			if err == nil {
				for i := range l.Items {
					add("Pod", &l.Items[i], l.Items[i].Spec.NodeName, 0)
				}
			}
			return err
		}},
		{"DataVolume", func(ctx context.Context) error {
			l, err := e.o.Client.CDI.DataVolumes(ns).List(ctx, list)
			if err == nil {
				for i := range l.Items {
					add("DataVolume", &l.Items[i], "", 0)
				}
			}
			return err
		}},
		{"PersistentVolumeClaim", func(ctx context.Context) error {
			l, err := e.o.Client.Core.PersistentVolumeClaims(ns).List(ctx, list)
			if err == nil {
				for i := range l.Items {
					add("PersistentVolumeClaim", &l.Items[i], "", 0)
				}
			}
			return err
		}},
		{"NetworkPolicy", func(ctx context.Context) error {
			l, err := e.o.Client.Networking.NetworkPolicies(ns).List(ctx, list)
			if err == nil {
				for i := range l.Items {
					add("NetworkPolicy", &l.Items[i], "", 0)
				}
			}
			return err
		}},
		{"NetworkAttachmentDefinition", func(ctx context.Context) error {
			l, err := e.o.Client.Networks.NetworkAttachmentDefinitions(ns).List(ctx, list)
			if apierrors.IsNotFound(err) {
				return nil // no Multus, no networks
			}
			if err == nil {
				for i := range l.Items {
					if !overlay.Quarantined(&l.Items[i]) { // held by nobody
						add("NetworkAttachmentDefinition", &l.Items[i], "", 0)
					}
				}
			}
			return err
		}},
		{"Service", func(ctx context.Context) error {
			l, err := e.o.Client.Core.Services(ns).List(ctx, list)
			if err == nil {
				for i := range l.Items {
					add("Service", &l.Items[i], "", 0)
				}
			}
			return err
		}},
	} {
		if err := kind.read(ctx); err != nil {
			out.Unread = append(out.Unread, cluster.Wordsf("%s: %s", kind.name, cluster.Words(err)))
		}
	}
	for _, c := range e.o.Book.Claims() {
		h := &workerv1.Holding{Kind: "Claim", Name: c.AttemptID, RackId: e.s.Rack, AttemptId: c.AttemptID}
		if a := e.find(c.AttemptID); a != nil {
			h.JobId, h.CreatedAt, h.Probe = a.rec.JobID, timestamppb.New(a.rec.ClaimedAt), a.rec.Probe
		}
		for i, n := range c.Nodes {
			h.GpuCount += uint32(n.GPUs)
			if i == 0 {
				h.NodeName = n.Node
			}
		}
		out.Holdings = append(out.Holdings, h)
	}
	sort.Slice(out.Holdings, func(i, j int) bool {
		a, b := out.Holdings[i], out.Holdings[j]
		return fmt.Sprint(a.Kind, "/", a.Name) < fmt.Sprint(b.Kind, "/", b.Name)
	})
	if len(out.Holdings) > holdingsMost {
		out.Holdings, out.Truncated = out.Holdings[:holdingsMost], true
	}
	return out
}

// anchoredGPUs is how many GPUs an anchor claims; zero where it cannot be read.
func anchoredGPUs(cm *corev1.ConfigMap) int {
	read, err := claim.ReadAnchor(cm)
	if err != nil {
		return 0
	}
	n := 0
	for _, node := range read.Record.Nodes {
		n += node.GPUs
	}
	return n
}
