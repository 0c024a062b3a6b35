package app

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// TestWhatSomebodyRemovesUnderAMachineIsPutBackOrSaid: without its policy a guest is
// open to the cluster and to its neighbours.
func TestWhatSomebodyRemovesUnderAMachineIsPutBackOrSaid(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "image", func(s *Setup) { s.Config.Rack.ID, s.Config.Deadlines.Orphan = "hands", 4*time.Second })
	w.Entry.Put(&orkv1.RackEntry{Id: "hands"})
	w.serves()
	attempt := id(t, "a")
	w.claim(request("image", id(t, "j"), attempt, 1))
	w.until(attempt, up1)
	policies := d.admin.Networking.NetworkPolicies(namespace)
	was, err := policies.Get(t.Context(), attempt, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	asItWas := func() string {
		is, err := policies.Get(t.Context(), attempt, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return "there is none"
		case err != nil:
			return err.Error()
		case !apiequality.Semantic.DeepEqual(is.Spec, was.Spec):
			return fmt.Sprint("it says ", is.Spec)
		}
		return ""
	}
	if err := policies.Delete(t.Context(), attempt, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the removed policy is made again", asItWas)
	// It selects nobody, lets everything come in and everything go out.
	patch := []byte(`{"spec":{"podSelector":{"matchLabels":{"nobody":"has"}},"ingress":[{}],"egress":[{}]}}`)
	if _, err := policies.Patch(t.Context(), attempt, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the widened policy is narrowed again", asItWas)
	w.remove(attempt)
	w.gone(attempt)
	if left := d.left(t, of(attempt)); len(left) > 0 {
		t.Errorf("left %v", left)
	}

	// A pod that somebody forced away is no fault of the VM, nor of its node.
	job := id(t, "j")
	attempt = id(t, "a")
	w.claim(request("image", job, attempt, 1))
	w.until(attempt, up1)
	// Nor is a DataVolume that is taken from over its volume a lost disk.
	alone := metav1.DeletePropagationOrphan
	if err := d.admin.CDI.DataVolumes(namespace).Delete(t.Context(), job+"-r0-n0-root", metav1.DeleteOptions{PropagationPolicy: &alone}); err != nil {
		t.Fatal(err)
	}
	now := int64(0)
	pods, err := d.admin.Core.Pods(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: label.Attempt + "=" + attempt})
	if err != nil || len(pods.Items) != 1 {
		t.Fatalf("%v %v", pods, err)
	}
	if err := d.admin.Core.Pods(namespace).Delete(t.Context(), pods.Items[0].Name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
		t.Fatal(err)
	}
	if st := w.until(attempt, ended1); st.Reason != orkv1.Reason_REASON_VM_REMOVED || !strings.Contains(st.Message, "by somebody else") || st.GuestSucceeded {
		t.Errorf("%v", st)
	} else if g := st.Nodes[0].Graph; slices.ContainsFunc(g, func(n *orkv1.GraphNode) bool { return n.Kind == "DataVolume" && n.State == "gone" }) {
		t.Errorf("its disk is said to be lost: %v", g)
	}
	w.remove(attempt)
	w.gone(attempt)
}
