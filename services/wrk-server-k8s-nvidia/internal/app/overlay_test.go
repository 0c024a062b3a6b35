package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	nad "github.com/k8snetworkplumbingwg/network-attachment-definition-client/pkg/apis/k8s.cni.cncf.io/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/overlay"
)

// networkOf is the only network of an attempt.
func networkOf(t *testing.T, d *devcluster, attempt string) *nad.NetworkAttachmentDefinition {
	t.Helper()
	list, err := d.admin.Networks.NetworkAttachmentDefinitions(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: of(attempt)})
	if err != nil || len(list.Items) != 1 {
		t.Fatalf("networks of %s: %v, %v", attempt, list, err)
	}
	return &list.Items[0]
}

func TestEachGangHasANetworkOfItsOwnUntilItsMachinesAreGone(t *testing.T) {
	t.Parallel()
	d := start(t)
	two := func(s *Setup) { joinedBy(s); s.Config.Overlay.VLANs = "300-301" }
	w := begin(t, d, "overlay", two).serves()
	nodes := []string{"overlay-gpu-00", "overlay-gpu-01", "overlay-gpu-02", "overlay-gpu-03"}
	first, second := id(t, "a"), id(t, "b")
	w.claim(vllm(id(t, "j"), first, 1, nodes[:2]...))
	w.claim(vllm(id(t, "k"), second, 1, nodes[2:]...))
	st := w.until(first, up1)
	w.until(second, up1)
	if g := st.Nodes[0].Graph[2]; g.Kind != "NetworkAttachmentDefinition" || g.State != "ready" || g.Name != networkOf(t, d, first).Name {
		t.Errorf("graph %v", st.Nodes[0].Graph)
	}
	vlans := map[int]string{}
	for _, attempt := range []string{first, second} {
		network := networkOf(t, d, attempt)
		var config struct {
			Type, Bridge string
			VLAN, MTU    int
		}
		if err := json.Unmarshal([]byte(network.Spec.Config), &config); err != nil || config.Type != "ovs" || config.Bridge != "br-cosmicac" ||
			config.MTU != 1450 || config.VLAN < 300 || config.VLAN > 301 || vlans[config.VLAN] != "" {
			t.Errorf("network %s: %s, %v", network.Name, network.Spec.Config, err)
		}
		vlans[config.VLAN] = attempt
		if len(network.OwnerReferences) > 0 || network.Annotations["k8s.v1.cni.cncf.io/resourceName"] != "ovs-cni.network.kubevirt.io/br-cosmicac" {
			t.Errorf("network %s: %v %v", network.Name, network.OwnerReferences, network.Annotations)
		}
		for k := range 2 {
			name := fmt.Sprintf("%s-n%d", attempt, k)
			vmi, err := d.admin.KubeVirt.VirtualMachineInstances(namespace).Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			interfaces, networks := vmi.Spec.Domain.Devices.Interfaces, vmi.Spec.Networks
			if len(interfaces) != 2 || interfaces[1].Bridge == nil || len(networks) != 2 || networks[0].Pod == nil || networks[1].Multus.NetworkName != network.Name {
				t.Errorf("machine %s: %v %v", name, interfaces, networks)
			}
			secret, err := d.admin.Core.Secrets(namespace).Get(t.Context(), name+"-seed", metav1.GetOptions{})
			if text := string(secret.Data["networkdata"]); err != nil || !strings.Contains(text, fmt.Sprintf("10.64.0.%d/24", 10+k)) || !strings.Contains(text, interfaces[1].MacAddress) {
				t.Errorf("machine %s: network data %q, %v", name, text, err)
			}
		}
	}

	// No third VLAN: refused in words, and nothing is made.
	third := id(t, "c")
	crowd := vllm(id(t, "l"), third, 1, nodes[0], nodes[2])
	if res := w.apply(crowd); res.Claimed || res.Reason != orkv1.Reason_REASON_BUSY || !strings.Contains(res.Message, "all 2 VLANs of bridge br-cosmicac, 300 to 301, are in use") {
		t.Errorf("a third: %v", res)
	}
	if left := d.left(t, of(third)); len(left) > 0 {
		t.Errorf("made for a refused gang: %v", left)
	}

	// A worker that starts anew, even with the overlay off, takes nothing away and
	// gives everything back.
	w.end()
	w = begin(t, d, "overlay").serves()
	w.until(first, up1)
	if r, _ := w.Hub.Latest(); r.Fabric {
		t.Error("a rack without an overlay reports a fabric")
	}
	w.remove(first)
	eventually(t, "the network outlives every machine in it", func() string {
		list, err := d.admin.Networks.NetworkAttachmentDefinitions(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: of(first)})
		if err != nil {
			return err.Error()
		}
		pods, err := d.admin.Core.Pods(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: of(first)})
		switch {
		case err != nil:
			return err.Error()
		case len(list.Items) == 0 && len(pods.Items) > 0:
			t.Fatal("the network is gone and a machine is not")
		case len(list.Items) > 0:
			return "it is there"
		}
		return ""
	})
	w.gone(first)
	if left := d.left(t, of(first)); len(left) > 0 {
		t.Fatalf("left: %v", left)
	}

	// The VLAN that came free is in quarantine: no leak, and nobody's until that is over.
	w.end()
	w = begin(t, d, "overlay", two).serves()
	if res := w.apply(crowd); res.Claimed || !strings.Contains(res.Message, "1 of them in quarantine (the next is free at ") {
		t.Errorf("a third beside a quarantine: %v", res)
	}
	resting := inQuarantine(t, d, "300", "301")
	if len(resting) != 1 || resting[0].Labels[label.Rack] != "overlay" || resting[0].Labels[label.Job] != "" {
		t.Fatalf("in quarantine: %v", resting)
	}
	res, err := w.Server.ListHoldings(t.Context(), &workerv1.ListHoldingsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range res.Holdings {
		if h.Name == resting[0].Name {
			t.Errorf("listed as held: %v", h)
		}
	}
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:"2020-01-01T00:00:00Z"}}}`, label.QuarantinedUntil)
	if _, err := d.admin.Networks.NetworkAttachmentDefinitions(namespace).Patch(t.Context(), resting[0].Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	w.claim(crowd)
	w.until(third, up1)
	if networkOf(t, d, third).Name == networkOf(t, d, second).Name {
		t.Error("two attempts share a network")
	}
	for _, a := range []string{second, third} {
		w.remove(a)
		w.gone(a)
		if left := d.left(t, of(a)); len(left) > 0 {
			t.Fatalf("left: %v", left)
		}
	}
}

// inQuarantine are the attachments of these VLANs that are nobody's.
func inQuarantine(t *testing.T, d *devcluster, vlans ...string) (out []*nad.NetworkAttachmentDefinition) {
	t.Helper()
	list, err := d.admin.Networks.NetworkAttachmentDefinitions(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range list.Items {
		o := &list.Items[i]
		if overlay.Quarantined(o) && slices.Contains(vlans, o.Name[strings.LastIndex(o.Name, "-")+1:]) {
			out = append(out, o)
		}
	}
	return out
}

// ovs is a driver over the real API server, as one worker has it.
func ovs(d *devcluster, first, last int) *overlay.OVS {
	return overlay.NewOVS(d.admin.Networks.NetworkAttachmentDefinitions(namespace), overlay.Options{
		Bridge: "br-cosmicac", First: first, Last: last, MTU: 1450, Subnet: netip.MustParsePrefix("10.64.0.0/24"), Now: time.Now,
	})
}

func TestWorkersThatRaceForVLANsNeverShareOne(t *testing.T) {
	t.Parallel()
	d := start(t)
	racers := []*overlay.OVS{ovs(d, 400, 411), ovs(d, 400, 411)}
	var wg sync.WaitGroup
	var mu sync.Mutex
	given, refused := map[string]string{}, 0
	for i := range 20 {
		attempt := fmt.Sprintf("a-vlan%d", i)
		wg.Go(func() {
			name, err := racers[i%2].Allocate(context.Background(), attempt, racers[i%2].Plan(), map[string]string{label.Network: network})
			mu.Lock()
			defer mu.Unlock()
			var full *overlay.Exhausted
			switch {
			case errors.As(err, &full):
				refused++
			case err != nil:
				t.Errorf("%s: %v", attempt, err)
			case given[name] != "":
				t.Errorf("%s is given to %s and %s", name, given[name], attempt)
			default:
				given[name] = attempt
			}
		})
	}
	wg.Wait()
	if len(given) != 12 || refused != 8 {
		t.Errorf("%d given, %d refused", len(given), refused)
	}
	// Another life of a worker knows who has what.
	again := ovs(d, 400, 411)
	for name, attempt := range given {
		if got, err := again.Allocate(t.Context(), attempt, again.Plan(), nil); err != nil || got != name {
			t.Errorf("%s had %s and is told %s, %v", attempt, name, got, err)
		}
		if left, err := again.Release(t.Context(), attempt); err != nil || len(left) > 0 {
			t.Errorf("%s left %v, %v", attempt, left, err)
		}
	}
}

func TestAWorkerThatDiedBetweenNetworkAndAnchorGoesOnWithTheSameNetwork(t *testing.T) {
	t.Parallel()
	d := start(t)
	within := func(s *Setup) {
		joinedBy(s)
		s.Config.Rack.ID, s.Config.Overlay.VLANs, s.Config.Deadlines.Orphan = "overlay-died", "500-509", 6*time.Second
	}
	// What dead workers left: one attempt is asked for again, the other never.
	again, never := id(t, "a"), id(t, "b")
	dead := ovs(d, 500, 509)
	labels := map[string]string{label.Network: network, label.Rack: "overlay-died"}
	name, err := dead.Allocate(t.Context(), again, dead.Plan(), labels)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dead.Allocate(t.Context(), never, dead.Plan(), labels); err != nil {
		t.Fatal(err)
	}
	w := begin(t, d, "overlay", within)
	w.Entry.Put(&orkv1.RackEntry{Id: "overlay-died"})
	w.serves()
	w.claim(vllm(id(t, "j"), again, 1, "overlay-gpu-00", "overlay-gpu-01"))
	w.until(again, up1)
	if got := networkOf(t, d, again).Name; got != name {
		t.Errorf("it has %s, and %s was taken for it", got, name)
	}
	eventually(t, "what nobody asks for is swept away", func() string { return strings.Join(d.left(t, of(never)), ", ") })
	networkOf(t, d, again)
	w.remove(again)
	w.gone(again)
	if left := d.left(t, of(again)); len(left) > 0 {
		t.Fatalf("left: %v", left)
	}
}
