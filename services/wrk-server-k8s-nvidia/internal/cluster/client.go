package cluster

import (
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	authorizationv1 "k8s.io/client-go/kubernetes/typed/authorization/v1"
	coordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	networkingv1 "k8s.io/client-go/kubernetes/typed/networking/v1"
	storagev1 "k8s.io/client-go/kubernetes/typed/storage/v1"
	"k8s.io/client-go/rest"
	cdiv1beta1 "kubevirt.io/client-go/containerizeddataimporter/typed/core/v1beta1"
	kubevirtv1 "kubevirt.io/client-go/kubevirt/typed/core/v1"
	networksv1 "kubevirt.io/client-go/networkattachmentdefinitionclient/typed/k8s.cni.cncf.io/v1"
)

// Requests a second that the worker sends at most to each group of the API, and
// its bursts: what KubeVirt's own controller takes by default.
const (
	RequestsPerSecond = 200
	RequestBurst      = 400
)

// Client holds the narrow typed clients that the worker uses, all over one
// Connection. Calls take their deadline from their context: there is no other.
type Client struct {
	// Namespace is where attempts' objects live.
	Namespace     string
	Core          corev1.CoreV1Interface
	Networking    networkingv1.NetworkingV1Interface
	Coordination  coordinationv1.CoordinationV1Interface
	Authorization authorizationv1.AuthorizationV1Interface
	Storage       storagev1.StorageV1Interface
	KubeVirt      kubevirtv1.KubevirtV1Interface
	CDI           cdiv1beta1.CdiV1beta1Interface
	// Networks are Multus'; a cluster without it answers not found.
	Networks networksv1.K8sCniCncfIoV1Interface
}

// NewClient makes the clients. It does not dial.
func NewClient(conn *Connection, namespace, userAgent string) (*Client, error) {
	config := &rest.Config{
		Host:      "https://cluster.invalid", // replaced by Connection
		Transport: conn,
		QPS:       RequestsPerSecond,
		Burst:     RequestBurst,
		UserAgent: userAgent,
	}
	// JSON is what the API server checks for unknown fields; the compact form is
	// taken where it is served.
	config.ContentType = runtime.ContentTypeJSON
	own := rest.CopyConfig(config)
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	http, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	c := &Client{Namespace: namespace}
	if c.Core, err = corev1.NewForConfigAndClient(config, http); err != nil {
		return nil, err
	}
	if c.Networking, err = networkingv1.NewForConfigAndClient(config, http); err != nil {
		return nil, err
	}
	if c.Coordination, err = coordinationv1.NewForConfigAndClient(config, http); err != nil {
		return nil, err
	}
	if c.Authorization, err = authorizationv1.NewForConfigAndClient(config, http); err != nil {
		return nil, err
	}
	if c.Storage, err = storagev1.NewForConfigAndClient(config, http); err != nil {
		return nil, err
	}
	if c.KubeVirt, err = kubevirtv1.NewForConfigAndClient(own, http); err != nil {
		return nil, err
	}
	if c.CDI, err = cdiv1beta1.NewForConfigAndClient(own, http); err != nil {
		return nil, err
	}
	if c.Networks, err = networksv1.NewForConfigAndClient(own, http); err != nil {
		return nil, err
	}
	return c, nil
}

// Refused says that the cluster will not take this object however often it is
// sent: it is malformed, forbidden, or its kind does not exist here. A quota is
// not such a refusal, it can free itself.
func Refused(err error) bool {
	switch {
	case apierrors.IsForbidden(err):
		return !strings.Contains(err.Error(), "exceeded quota")
	case apierrors.IsInternalError(err):
		return false
	default:
		return apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsNotFound(err) ||
			apierrors.IsMethodNotSupported(err) || apierrors.IsRequestEntityTooLargeError(err) ||
			apierrors.IsNotAcceptable(err) || apierrors.IsUnsupportedMediaType(err)
	}
}

// Words are the cluster's own words of an error, on one line, at most 500 bytes.
func Words(err error) string {
	if err == nil {
		return ""
	}
	return oneLine(err.Error())
}

// Wordsf is fmt.Sprintf made fit for a report like Words.
func Wordsf(format string, a ...any) string { return oneLine(fmt.Sprintf(format, a...)) }
