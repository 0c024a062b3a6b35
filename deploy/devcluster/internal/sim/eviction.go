package sim

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	registrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/utils/ptr"
	kubevirtv1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/fault"
)

// evictions plays the webhook with which virt-api keeps virt-launcher pods from being evicted, and the administrator of
// the switch node-drained. Bare pods and VMs without an eviction strategy are evicted by the real API server. KubeVirt's
// disruption budgets are left out: the webhook answers before they would.
type evictions struct {
	*world
	listener net.Listener
	cert     tls.Certificate
	ca       []byte
}

const (
	evictionPath = "/launcher-eviction-validate"
	evictionHook = "virt-launcher-eviction-interceptor.kubevirt.io"
	// drainedBySwitch marks a node that was cordoned for node-drained.
	drainedBySwitch = "cosmicac.dev/drained-by-switch"
	drainEvery      = 2 * time.Second
)

func newEvictions(w *world) (*evictions, error) {
	cert, key, err := certutil.GenerateSelfSignedCertKey("127.0.0.1", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	if err != nil {
		return nil, fmt.Errorf("make a certificate for the simulated webhook: %w", err)
	}
	e := &evictions{world: w, ca: cert}
	if e.cert, err = tls.X509KeyPair(cert, key); err != nil {
		return nil, fmt.Errorf("make a certificate for the simulated webhook: %w", err)
	}
	e.listener, err = net.Listen("tcp4", "127.0.0.1:0")
	return e, err
}

// Start serves the webhook and drains nodes until ctx ends.
func (e *evictions) Start(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+evictionPath, e.review)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, TLSConfig: &tls.Config{Certificates: []tls.Certificate{e.cert}, MinVersion: tls.VersionTLS12}}
	served := make(chan error, 1)
	go func() { served <- server.ServeTLS(e.listener, "", "") }()
	err := e.register(ctx)
	if err == nil {
		e.drains(ctx)
	}
	err = errors.Join(err, server.Close())
	if was := <-served; !errors.Is(was, http.ErrServerClosed) {
		err = errors.Join(err, was)
	}
	return err
}

// register tells the API server where the webhook is. As KubeVirt's, it lets evictions pass while it cannot be reached.
func (e *evictions) register(ctx context.Context) error {
	hook := &registrationv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "simulated-virt-api-eviction", Labels: map[string]string{Simulated: "true"}}}
	err := e.live.Get(ctx, client.ObjectKeyFromObject(hook), hook)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("register the simulated webhook: %w", err)
	}
	hook.Webhooks = []registrationv1.ValidatingWebhook{{
		Name: evictionHook, AdmissionReviewVersions: []string{"v1"},
		ClientConfig: registrationv1.WebhookClientConfig{URL: ptr.To("https://" + e.listener.Addr().String() + evictionPath), CABundle: e.ca},
		SideEffects:  ptr.To(registrationv1.SideEffectClassNoneOnDryRun), FailurePolicy: ptr.To(registrationv1.Ignore), TimeoutSeconds: ptr.To(int32(10)),
		Rules: []registrationv1.RuleWithOperations{{
			Operations: []registrationv1.OperationType{registrationv1.Create},
			Rule:       registrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods/eviction"}},
		}},
	}}
	if err != nil {
		err = e.Create(ctx, hook)
	} else {
		err = e.Update(ctx, hook)
	}
	if err != nil {
		return fmt.Errorf("register the simulated webhook: %w", err)
	}
	return nil
}

func (e *evictions) review(w http.ResponseWriter, r *http.Request) {
	var review admissionv1.AdmissionReview
	if err := json.NewDecoder(io.LimitReader(r.Body, 1<<20)).Decode(&review); err != nil || review.Request == nil {
		http.Error(w, "want an AdmissionReview", http.StatusBadRequest)
		return
	}
	q := review.Request
	review.Response = &admissionv1.AdmissionResponse{UID: q.UID, Allowed: true}
	words, err := e.admit(r.Context(), types.NamespacedName{Namespace: q.Namespace, Name: q.Name}, ptr.Deref(q.DryRun, false))
	if err != nil {
		words = fmt.Sprintf("kubevirt failed: %v", err) // whoever evicts tries again
	}
	if words != "" {
		review.Response.Allowed = false
		review.Response.Result = &metav1.Status{Code: http.StatusTooManyRequests, Reason: metav1.StatusReasonTooManyRequests, Message: words}
	}
	review.Request = nil
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(review); err != nil {
		e.log.Debug("simulated webhook is not heard", "error", err)
	}
}

// admit says in virt-api's words why a pod is not evicted, and marks its VMI for whoever is to take it down. Empty lets
// the eviction pass.
func (e *evictions) admit(ctx context.Context, name types.NamespacedName, dryRun bool) (string, error) {
	pod := &corev1.Pod{}
	if err := e.live.Get(ctx, name, pod); err != nil {
		return "", client.IgnoreNotFound(err)
	}
	if pod.Labels[kubevirtv1.AppLabel] != "virt-launcher" || temporary(pod) || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return "", nil
	}
	vmi := &kubevirtv1.VirtualMachineInstance{}
	if err := e.live.Get(ctx, types.NamespacedName{Namespace: pod.Namespace, Name: pod.Annotations[kubevirtv1.DomainAnnotation]}, vmi); err != nil {
		return "", client.IgnoreNotFound(err)
	}
	switch strategy, err := e.strategy(ctx, vmi); {
	case err != nil:
		return "", err
	case strategy == kubevirtv1.EvictionStrategyLiveMigrate && !vmi.IsMigratable():
		return fmt.Sprintf("VMI %s is configured with an eviction strategy but is not live-migratable", vmi.Name), nil
	case strategy == kubevirtv1.EvictionStrategyExternal, strategy == kubevirtv1.EvictionStrategyLiveMigrate:
	default: // LiveMigrateIfPossible too: no simulated VM is migratable
		return "", nil
	}
	triggered := fmt.Sprintf("Eviction triggered evacuation of VMI \"%s/%s\"", vmi.Namespace, vmi.Name)
	switch {
	case vmi.IsMarkedForEviction():
		return "Evacuation in progress: " + triggered, nil
	case vmi.Status.NodeName != pod.Spec.NodeName:
		return "Eviction request for target Pod", nil
	case dryRun:
		return triggered, nil
	}
	return triggered, e.mark(ctx, vmi, pod.Spec.NodeName)
}

func (e *evictions) mark(ctx context.Context, vmi *kubevirtv1.VirtualMachineInstance, node string) error {
	marked := vmi.DeepCopy()
	marked.Status.EvacuationNodeName = node
	return e.Patch(ctx, marked, client.MergeFrom(vmi))
}

// strategy is the VMI's own, else the cluster's.
func (e *evictions) strategy(ctx context.Context, vmi *kubevirtv1.VirtualMachineInstance) (kubevirtv1.EvictionStrategy, error) {
	if s := vmi.Spec.EvictionStrategy; s != nil {
		return *s, nil
	}
	kv := &kubevirtv1.KubeVirt{}
	if err := e.Get(ctx, types.NamespacedName{Namespace: "kubevirt", Name: "kubevirt"}, kv); err != nil {
		return "", client.IgnoreNotFound(err)
	}
	return ptr.Deref(kv.Spec.Configuration.EvictionStrategy, kubevirtv1.EvictionStrategyNone), nil
}

// evictionCondition is what virt-controller says of a VMI that is marked.
func evictionCondition(vmi *kubevirtv1.VirtualMachineInstance) {
	if vmi.Status.EvacuationNodeName == "" {
		dropVMICondition(vmi, kubevirtv1.VirtualMachineInstanceEvictionRequested)
		return
	}
	setVMICondition(vmi, kubevirtv1.VirtualMachineInstanceEvictionRequested, corev1.ConditionTrue,
		kubevirtv1.VirtualMachineInstanceReasonEvictionRequested, "VMI is to leave node "+vmi.Status.EvacuationNodeName)
}

// drains plays `kubectl drain` on the nodes of node-drained: they are cordoned, and their pods evicted again and again.
// When the switch goes, the nodes are uncordoned and the marks on their VMIs taken back, as evacuate/cancel does.
func (e *evictions) drains(ctx context.Context) {
	tick := time.NewTicker(drainEvery)
	defer tick.Stop()
	for again := true; ; { // the first look ends what an earlier process began
		if again || e.faults.on(fault.NodeDrained) {
			var err error
			if again, err = e.drain(ctx); err != nil && ctx.Err() == nil {
				again = true
				e.log.Warn("simulated drain is tried again", "error", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// drain does one round, and says whether a node is still drained.
func (e *evictions) drain(ctx context.Context) (under bool, err error) {
	var nodes corev1.NodeList
	if err := e.List(ctx, &nodes, client.MatchingLabels{Simulated: "true"}); err != nil {
		return false, err
	}
	var errs []error
	for i := range nodes.Items {
		node := &nodes.Items[i]
		_, marked := node.Annotations[drainedBySwitch]
		wanted := e.faults.has(fault.NodeDrained, node.Name)
		under = under || wanted
		switch {
		case wanted && !marked:
			errs = append(errs, e.cordon(ctx, node, true))
			fallthrough
		case wanted:
			errs = append(errs, e.evict(ctx, node.Name))
		case marked:
			err := e.unmark(ctx, node.Name)
			if err == nil {
				err = e.cordon(ctx, node, false)
			}
			errs = append(errs, err)
		}
	}
	return under, errors.Join(errs...)
}

func (e *evictions) cordon(ctx context.Context, node *corev1.Node, yes bool) error {
	next := node.DeepCopy()
	next.Spec.Unschedulable = yes
	if yes {
		if next.Annotations == nil {
			next.Annotations = map[string]string{}
		}
		next.Annotations[drainedBySwitch] = "true"
	} else {
		delete(next.Annotations, drainedBySwitch)
	}
	return client.IgnoreNotFound(e.Patch(ctx, next, client.MergeFrom(node)))
}

func (e *evictions) evict(ctx context.Context, node string) error {
	var pods corev1.PodList
	if err := e.List(ctx, &pods); err != nil {
		return err
	}
	var errs []error
	for i := range pods.Items {
		pod := &pods.Items[i]
		if pod.Spec.NodeName != node || pod.DeletionTimestamp != nil {
			continue
		}
		err := e.SubResource("eviction").Create(ctx, pod, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}})
		if err != nil && !apierrors.IsTooManyRequests(err) && !apierrors.IsNotFound(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (e *evictions) unmark(ctx context.Context, node string) error {
	var all kubevirtv1.VirtualMachineInstanceList
	if err := e.List(ctx, &all); err != nil {
		return err
	}
	var errs []error
	for i := range all.Items {
		if vmi := &all.Items[i]; vmi.Status.EvacuationNodeName == node {
			errs = append(errs, client.IgnoreNotFound(e.mark(ctx, vmi, "")))
		}
	}
	return errors.Join(errs...)
}
