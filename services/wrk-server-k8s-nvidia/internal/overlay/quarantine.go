package overlay

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	nad "github.com/k8snetworkplumbingwg/network-attachment-definition-client/pkg/apis/k8s.cni.cncf.io/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// A VLAN in quarantine is an attachment that is no attempt's and says until when it
// rests. It keeps its name, so that every worker of the namespace finds it taken.

// Quarantined says whether an attachment is a VLAN in quarantine: it was given back and
// is held by nobody.
func Quarantined(o *nad.NetworkAttachmentDefinition) bool {
	return o.Annotations[label.QuarantinedUntil] != "" && o.Labels[label.Attempt] == ""
}

// until is when an attachment's quarantine ends. One that says so in a way that cannot
// be read stays: its VLAN is free once somebody has looked.
func until(o *nad.NetworkAttachmentDefinition) (end time.Time, ok bool) {
	if !Quarantined(o) {
		return time.Time{}, false
	}
	end, err := time.Parse(time.RFC3339, o.Annotations[label.QuarantinedUntil])
	return end, err == nil
}

// rested says that an attachment of this network has rested long enough.
func (d *OVS) rested(o *nad.NetworkAttachmentDefinition, network string) bool {
	end, ok := until(o)
	return ok && o.Labels[label.Network] == network && !d.o.Now().Before(end)
}

// rest makes an attachment nobody's. The patch holds for exactly what was read: a
// conflict says that somebody changed it since.
func (d *OVS) rest(ctx context.Context, o *nad.NetworkAttachmentDefinition) error {
	labels := map[string]any{}
	for k := range o.Labels {
		switch k {
		case label.ManagedBy, label.Network, label.Rack:
		default:
			labels[k] = nil
		}
	}
	end := d.o.Now().Add(d.o.Quarantine).UTC().Add(time.Second - 1).Truncate(time.Second) // never shorter than asked for
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"resourceVersion": o.ResourceVersion, "labels": labels, "annotations": map[string]string{label.QuarantinedUntil: end.Format(time.RFC3339)},
	}})
	if err != nil {
		return err
	}
	_, err = d.attachments.Patch(ctx, o.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: label.Manager})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("put network attachment %s into quarantine: %w", o.Name, err)
	}
	return nil
}

// remove deletes exactly this attachment. One that is gone, or another by now, is no
// error.
func (d *OVS) remove(ctx context.Context, o *nad.NetworkAttachmentDefinition) error {
	err := d.attachments.Delete(ctx, o.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &o.UID}})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete network attachment %s: %w", o.Name, err)
	}
	return nil
}

// Sweep implements Driver.
func (d *OVS) Sweep(ctx context.Context, network string) error {
	list, err := d.attachments.List(ctx, metav1.ListOptions{LabelSelector: label.Network + "=" + network})
	if apierrors.IsNotFound(err) {
		return nil // the cluster has no such kind
	}
	if err != nil {
		return fmt.Errorf("list the network attachments in quarantine: %w", err)
	}
	for i := range list.Items {
		if o := &list.Items[i]; o.DeletionTimestamp == nil && d.rested(o, network) {
			if err := d.remove(ctx, o); err != nil {
				return err
			}
		}
	}
	return nil
}

// use counts the VLANs of the range that are taken, how many of them are in quarantine
// still, and when the next of those comes free.
func (d *OVS) use(all []nad.NetworkAttachmentDefinition) (taken, resting int, next time.Time) {
	for i := range all {
		var vlan int
		if _, err := fmt.Sscanf(strings.TrimPrefix(all[i].Name, prefixOf(d.o.Bridge)), "%d", &vlan); err != nil ||
			all[i].Name != fmt.Sprint(prefixOf(d.o.Bridge), vlan) || vlan < d.o.First || vlan > d.o.Last {
			continue
		}
		end, ok := until(&all[i])
		if ok && !d.o.Now().Before(end) {
			continue
		}
		taken++
		if Quarantined(&all[i]) {
			resting++
			if ok && (next.IsZero() || end.Before(next)) {
				next = end
			}
		}
	}
	return taken, resting, next
}

// exhausted says what all the VLANs are taken by.
func (d *OVS) exhausted(all []nad.NetworkAttachmentDefinition) *Exhausted {
	words := "are in use"
	if _, resting, next := d.use(all); resting > 0 {
		words = fmt.Sprintf("are taken, %d of them in quarantine", resting)
		if !next.IsZero() {
			words += " (the next is free at " + next.UTC().Format(time.RFC3339) + ")"
		}
	}
	return &Exhausted{fmt.Sprintf("all %d VLANs of bridge %s, %d to %d, %s: wait, or widen overlay.vlans of the rack's worker", d.size(), d.o.Bridge, d.o.First, d.o.Last, words)}
}
