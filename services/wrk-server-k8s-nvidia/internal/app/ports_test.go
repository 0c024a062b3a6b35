package app

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

func withPorts(req *workerv1.ApplyAttemptRequest) *workerv1.ApplyAttemptRequest {
	req.Spec.Ports = []*orkv1.PublicPort{{Port: 8080, Protocol: "tcp", Name: "web"}, {Port: 53, Protocol: "udp", Name: "udp-53"}}
	return req
}

func TestDeclaredPortsAreOpenedAndNoOthers(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "ports").serves()
	job, attempt := id(t, "j"), id(t, "a")
	w.claim(withPorts(request("ports", job, attempt, 1)))
	st := w.until(attempt, up1)
	svc, err := d.admin.Core.Services(namespace).Get(t.Context(), attempt+"-n0-ports", metav1.GetOptions{})
	if err != nil || svc.Spec.Type != corev1.ServiceTypeNodePort || len(svc.OwnerReferences) != 1 || svc.OwnerReferences[0].Name != attempt {
		t.Fatalf("service %v, %v", svc, err)
	}
	node, err := d.admin.Core.Nodes().Get(t.Context(), "ports-gpu-00", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	address := ""
	for _, a := range node.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			address = a.Address
		}
	}
	ports := st.Nodes[0].Ports
	if len(ports) != 2 {
		t.Fatalf("ports %v", ports)
	}
	for i, want := range svc.Spec.Ports {
		p := ports[i]
		if p.PublicPort != uint32(want.NodePort) || p.PublicPort < 30000 || p.Port.Port != uint32(want.Port) || p.Port.Name != want.Name || !slices.Equal(p.Hosts, []string{address}) {
			t.Errorf("port %v is not that of the cluster: %v at %s", p, want, address)
		}
	}
	// The Service leads to its machine's pod, and to no other.
	selector := metav1.FormatLabelSelector(&metav1.LabelSelector{MatchLabels: svc.Spec.Selector})
	pods, err := d.admin.Core.Pods(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: selector})
	if err != nil || len(pods.Items) != 1 || pods.Items[0].Labels[label.KubeVirtCreatedBy] != st.Nodes[0].VmiUid {
		t.Errorf("%s picks %d pods, %v", selector, len(pods.Items), err)
	}
	policy, err := d.admin.Networking.NetworkPolicies(namespace).Get(t.Context(), attempt, metav1.GetOptions{})
	if err != nil || len(policy.Spec.Ingress) != 1 || len(policy.Spec.Ingress[0].From) != 0 {
		t.Fatalf("policy %v, %v", policy, err)
	}
	var open []string
	for _, p := range policy.Spec.Ingress[0].Ports {
		open = append(open, fmt.Sprintf("%s/%s", p.Port, *p.Protocol))
	}
	if !slices.Equal(open, []string{"8080/TCP", "53/UDP"}) {
		t.Errorf("open are %v", open)
	}
	if g := st.Nodes[0].Graph; g[len(g)-1].Kind != "Service" || g[len(g)-1].State != "ready" {
		t.Errorf("graph %v", g)
	}

	// A worker that starts anew says the same, and takes all of it down.
	w.end()
	w = begin(t, d, "ports").serves()
	eventually(t, "the ports are known again", func() string {
		st := w.status(attempt)
		if len(st.GetNodes()) > 0 && len(st.Nodes[0].Ports) == 2 && st.Nodes[0].Ports[0].PublicPort == ports[0].PublicPort {
			return ""
		}
		return fmt.Sprint(st)
	})
	w.remove(attempt)
	w.gone(attempt)
	if left := d.left(t, of(attempt)); len(left) > 0 {
		t.Fatalf("left: %v", left)
	}

	// None declared, no Service and nothing comes in.
	attempt = id(t, "a")
	w.claim(request("ports", job, attempt, 1))
	st = w.until(attempt, up1)
	services, err := d.admin.Core.Services(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: of(attempt)})
	if err != nil || len(services.Items) > 0 || len(st.Nodes[0].Ports) > 0 {
		t.Errorf("services %v, ports %v, %v", services.Items, st.Nodes[0].Ports, err)
	}
	policy, err = d.admin.Networking.NetworkPolicies(namespace).Get(t.Context(), attempt, metav1.GetOptions{})
	if err != nil || len(policy.Spec.Ingress) != 0 {
		t.Errorf("policy %v, %v", policy, err)
	}
	w.remove(attempt)
	w.gone(attempt)
}

func TestALoadBalancersAddressIsShownOnceTheClusterGivesIt(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "ports", func(s *Setup) {
		s.Config.Rack.ID, s.Config.Ports.Service = "ports-balanced", "LoadBalancer"
	})
	w.Entry.Put(&orkv1.RackEntry{Id: "ports-balanced"})
	w.serves()
	job, attempt := id(t, "j"), id(t, "a")
	w.claim(withPorts(request("ports", job, attempt, 1)))
	st := w.until(attempt, up1) // the machine does not wait for it
	if p := st.Nodes[0].Ports[0]; len(p.Hosts) != 0 || p.PublicPort != 8080 {
		t.Errorf("before the load balancer is there: %v", p)
	}
	if g := st.Nodes[0].Graph; !strings.Contains(g[len(g)-1].Message, "load balancer") {
		t.Errorf("graph %v", g)
	}
	svc, err := d.admin.Core.Services(namespace).Get(t.Context(), attempt+"-n0-ports", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.9"}, {Hostname: "lb.example"}}
	if _, err := d.admin.Core.Services(namespace).UpdateStatus(t.Context(), svc, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the address is shown", func() string {
		if p := w.status(attempt).GetNodes()[0].Ports[0]; !slices.Equal(p.Hosts, []string{"203.0.113.9", "lb.example"}) {
			return p.String()
		}
		return ""
	})
	w.remove(attempt)
	w.gone(attempt)
}

func TestAServiceWithoutItsAnchorIsSweptAway(t *testing.T) {
	t.Parallel()
	d := start(t)
	attempt := id(t, "a")
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: attempt + "-n0-ports", Labels: map[string]string{
			label.Network: network, label.Rack: "ports-swept", label.Attempt: attempt, label.Job: "j-1",
		}},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Port: 80}}},
	}
	if _, err := d.admin.Core.Services(namespace).Create(t.Context(), svc, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	w := begin(t, d, "ports", func(s *Setup) {
		s.Config.Rack.ID, s.Config.Deadlines.Orphan = "ports-swept", 4*time.Second
	})
	w.Entry.Put(&orkv1.RackEntry{Id: "ports-swept"})
	w.serves()
	eventually(t, "it is gone", func() string { return strings.Join(d.left(t, of(attempt)), ", ") })
}
