package graph

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/claim"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// Bounds of what is opened and shown.
const (
	maximumPorts = 16
	maximumHosts = 8
)

// ServiceName is the name of the Service that opens the declared ports of an
// attempt's k-th virtual machine.
func ServiceName(attempt string, k int) string { return VMIName(attempt, k) + "-ports" }

func keyService(k int) string { return "service/" + strconv.Itoa(k) }

// recordPorts turns declared ports into what the anchor says of them.
func recordPorts(all []*orkv1.PublicPort) (out []claim.RecordPort, bad []fault.Detail) {
	if len(all) > maximumPorts {
		return nil, []fault.Detail{{Field: "spec.ports", Rule: fmt.Sprintf("must be at most %d", maximumPorts)}}
	}
	for i, p := range all {
		if p.GetPort() < 1 || p.GetPort() > 65535 || p.GetProtocol() != "tcp" && p.GetProtocol() != "udp" {
			bad = append(bad, fault.Detail{Field: fmt.Sprintf("spec.ports[%d]", i), Rule: "must be 1 to 65535, tcp or udp"})
			continue
		}
		out = append(out, claim.RecordPort{Name: p.GetName(), Port: int32(p.GetPort()), Protocol: p.GetProtocol()})
	}
	return out, bad
}

func protocol(p claim.RecordPort) corev1.Protocol {
	return corev1.Protocol(strings.ToUpper(p.Protocol))
}

// openPorts lets anybody reach the declared ports; none are, and nobody may, unless
// the job says so.
func openPorts(rec *claim.Record) []networkingv1.NetworkPolicyIngressRule {
	if len(rec.Ports) == 0 {
		return nil
	}
	var rule networkingv1.NetworkPolicyIngressRule
	for _, p := range rec.Ports {
		proto, port := protocol(p), intstr.FromInt32(p.Port)
		rule.Ports = append(rule.Ports, networkingv1.NetworkPolicyPort{Protocol: &proto, Port: &port})
	}
	return []networkingv1.NetworkPolicyIngressRule{rule}
}

// Service opens the declared ports of the k-th machine.
func (s *Settings) Service(rec *claim.Record, anchor types.UID, k int) *corev1.Service {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Name: ServiceName(rec.AttemptID, k), Labels: s.attemptLabels(rec), Annotations: annotations(rec), OwnerReferences: owner(rec, anchor),
		},
		Spec: corev1.ServiceSpec{
			Type: s.PortService,
			Selector: map[string]string{
				label.Network: s.Network, label.Attempt: rec.AttemptID, label.Node: strconv.Itoa(k),
			},
		},
	}
	for _, p := range rec.Ports {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{
			Name: p.Name, Port: p.Port, Protocol: protocol(p), TargetPort: intstr.FromInt32(p.Port),
		})
	}
	return svc
}

// ensureService makes the Service of the k-th machine, and reads it again while the
// cluster has not said where it is reached.
func (e *Engine) ensureService(ctx context.Context, a *attempt, k int) error {
	known := a.services[k]
	if known != nil && unreached(known) == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	services := e.o.Client.Core.Services(e.o.Client.Namespace)
	want := e.s.Service(a.rec, a.anchor, k)
	var found *corev1.Service
	var err error
	if known == nil {
		found, err = services.Create(ctx, want, strict)
	}
	if known != nil || apierrors.IsAlreadyExists(err) {
		if found, err = services.Get(ctx, want.Name, metav1.GetOptions{}); apierrors.IsNotFound(err) {
			delete(a.services, k)
			return fmt.Errorf("somebody else removed Service %s, it is made anew", want.Name)
		} else if err != nil {
			return fmt.Errorf("read Service %s: %w", want.Name, err)
		}
		if err := a.belongs("Service", found); err != nil {
			return err
		}
	}
	if err := creation("Service", want.Name, err); err != nil {
		return err
	}
	if a.services == nil {
		a.services = map[int]*corev1.Service{}
	}
	a.services[k] = found
	return nil
}

// unreached says what a Service still waits for; empty when it is reached.
func unreached(svc *corev1.Service) string {
	if svc.Spec.Type == corev1.ServiceTypeLoadBalancer && len(svc.Status.LoadBalancer.Ingress) == 0 {
		return "the cluster has given it no load balancer yet"
	}
	return ""
}

// open makes the Service of the k-th machine and says whether the machine may be
// made. It does not wait for a load balancer: the machine needs none to start.
func (p *pass) open(ctx context.Context, k int) bool {
	if len(p.a.rec.Ports) == 0 {
		return true
	}
	if err := p.e.ensureService(ctx, p.a, k); err != nil {
		return p.did(keyService(k), err, 0)
	}
	f := finding{state: stateReady, stage: "ready"}
	if words := unreached(p.a.services[k]); words != "" {
		f = finding{state: stateWaiting, stage: "waiting", words: words}
	}
	p.a.see(p.now, keyService(k), f)
	return true
}

// portAddresses says where the k-th machine's ports are reached.
func (e *Engine) portAddresses(a *attempt, k int) []*orkv1.PortAddress {
	svc := a.services[k]
	if svc == nil {
		return nil
	}
	balanced := svc.Spec.Type == corev1.ServiceTypeLoadBalancer
	hosts := e.hosts(svc, a.rec.Nodes[k].Node)
	var out []*orkv1.PortAddress
	for _, p := range svc.Spec.Ports {
		at := &orkv1.PortAddress{
			Port:  &orkv1.PublicPort{Port: uint32(p.Port), Protocol: strings.ToLower(string(p.Protocol)), Name: p.Name},
			Hosts: hosts, PublicPort: uint32(p.NodePort),
		}
		if balanced {
			at.PublicPort = uint32(p.Port)
		}
		out = append(out, at)
	}
	return out
}

// hosts are the names and addresses at which a Service is reached.
func (e *Engine) hosts(svc *corev1.Service, node string) []string {
	if unreached(svc) != "" {
		return nil
	}
	if e.s.PortAddress != "" {
		return []string{e.s.PortAddress}
	}
	var hosts []string
	if svc.Spec.Type == corev1.ServiceTypeLoadBalancer {
		for _, in := range svc.Status.LoadBalancer.Ingress {
			if in.IP != "" {
				hosts = append(hosts, in.IP)
			} else if in.Hostname != "" {
				hosts = append(hosts, in.Hostname)
			}
		}
	} else if n, ok := e.o.View.Node(node); ok {
		for _, kind := range []corev1.NodeAddressType{corev1.NodeExternalIP, corev1.NodeExternalDNS, corev1.NodeInternalIP} {
			for _, a := range n.Status.Addresses {
				if a.Type == kind && len(hosts) < maximumHosts {
					hosts = append(hosts, a.Address)
				}
			}
			if len(hosts) > 0 {
				break
			}
		}
	}
	return hosts[:min(len(hosts), maximumHosts)]
}

// removeServices removes what opened the declared ports and says what remains.
func (e *Engine) removeServices(ctx context.Context, a *attempt, now time.Time) (string, error) {
	services := e.o.Client.Core.Services(e.o.Client.Namespace)
	for k := range a.rec.Nodes {
		if len(a.rec.Ports) == 0 {
			return "", nil
		}
		name := ServiceName(a.rec.AttemptID, k)
		left, err := e.removeOne(ctx, a, "Service", name,
			func(ctx context.Context) (metav1.Object, error) { return services.Get(ctx, name, metav1.GetOptions{}) },
			func(ctx context.Context, o metav1.DeleteOptions) error { return services.Delete(ctx, name, o) })
		if err != nil || left != "" {
			return left, err
		}
		delete(a.services, k)
		a.see(now, keyService(k), finding{state: stateGone, stage: "gone"})
	}
	return "", nil
}

// considered is sweep's judgement of one object without an anchor.
type considered func(kind, name, attempt string, uid types.UID, deleting bool, remove func(context.Context) error)

// sweepServices looks for Services of ours without an anchor.
func (e *Engine) sweepServices(ctx context.Context, consider considered) {
	services := e.o.Client.Core.Services(e.o.Client.Namespace)
	callCtx, cancel := context.WithTimeout(ctx, callTimeout)
	found, err := services.List(callCtx, metav1.ListOptions{
		LabelSelector: label.Rack + "=" + e.s.Rack + "," + label.Network + "=" + e.s.Network + "," + label.Attempt,
	})
	cancel()
	if err != nil {
		return // the next sweep looks again
	}
	for i := range found.Items {
		s := &found.Items[i]
		consider("Service", s.Name, s.Labels[label.Attempt], s.UID, s.DeletionTimestamp != nil, func(ctx context.Context) error {
			return services.Delete(ctx, s.Name, exactly(s.UID))
		})
	}
}
