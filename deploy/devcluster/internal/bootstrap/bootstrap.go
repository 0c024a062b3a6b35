// Package bootstrap fills a fresh control plane with what an operator would have installed: the definitions of
// KubeVirt, CDI and Multus, their custom resources that say they are deployed, a storage class, the admission rules
// of KubeVirt's API, the caller's manifests, and kubeconfigs. Everything is applied again at every start. Nothing in
// here reacts to objects later; that is package sim.
package bootstrap

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"time"

	"github.com/hashicorp/go-hclog"
	authv1 "k8s.io/api/authentication/v1"
	apiext "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/config"
	"github.com/cosmicac/cosmicac/deploy/devcluster/internal/crds"
)

type runtimeObject = runtime.Object

const (
	// StorageClass is the default class; the simulator provisions it.
	StorageClass = "simulated"
	// WaitingStorageClass makes its volumes on the node of their first consumer, as node-local storage does.
	WaitingStorageClass = "simulated-wait"
	// Provisioner is the name under which the simulator provisions volumes.
	Provisioner = "simulated.cosmicac.dev"

	kubevirtVersion = "v1.7.0"
	cdiVersion      = "v1.62.0"
	tokenLife       = 365 * 24 * time.Hour
)

//go:embed policies.yaml
var policies []byte

// Bootstrap applies objects to one cluster.
type Bootstrap struct {
	cfg     *rest.Config
	dynamic dynamic.Interface
	client  kubernetes.Interface
	mapper  *restmapper.DeferredDiscoveryRESTMapper
	log     hclog.Logger
}

// New makes a Bootstrap that acts as the user of cfg.
func New(cfg *rest.Config, log hclog.Logger) (*Bootstrap, error) {
	dyn, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(client.Discovery()))
	return &Bootstrap{cfg: cfg, dynamic: dyn, client: client, mapper: mapper, log: log}, nil
}

// Base installs the definitions and the objects that stand on them, and returns when they are served.
func (b *Bootstrap) Base(ctx context.Context, pools []config.Pool) error {
	all, err := crds.All()
	if err != nil {
		return err
	}
	for _, d := range all {
		obj, err := toUnstructured(d, "apiextensions.k8s.io/v1", "CustomResourceDefinition")
		if err != nil {
			return err
		}
		if err := b.applySoon(ctx, obj); err != nil {
			return fmt.Errorf("apply definition %s: %w", d.Name, err)
		}
	}
	for _, d := range all {
		if err := eventually(ctx, time.Minute, func() error { return b.served(ctx, d) }); err != nil {
			return fmt.Errorf("wait for definition %s: %w", d.Name, err)
		}
	}
	b.mapper.Reset()

	objs, err := decode(policies)
	if err != nil {
		return fmt.Errorf("read embedded policies: %w", err)
	}
	objs = append(objs, b.operators(pools)...)
	for _, o := range objs {
		status, hasStatus := o.Object["status"]
		delete(o.Object, "status")
		// A kind without the status subresource takes its status with the object.
		if hasStatus && o.GetKind() == "CDI" {
			o.Object["status"] = status
			hasStatus = false
		}
		if err := b.applySoon(ctx, o); err != nil {
			return fmt.Errorf("apply %s %s: %w", o.GetKind(), o.GetName(), err)
		}
		if hasStatus {
			o.Object["status"] = status
			delete(o.Object, "spec")
			if err := b.applySoon(ctx, o, "status"); err != nil {
				return fmt.Errorf("apply the status of %s %s: %w", o.GetKind(), o.GetName(), err)
			}
		}
	}
	// The namespace controllers follow with some delay, and pods are refused until this account is there.
	return eventually(ctx, time.Minute, func() error {
		_, err := b.client.CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{})
		return err
	})
}

// served asks for a list, since a definition is Established somewhat before its path answers.
func (b *Bootstrap) served(ctx context.Context, d *apiext.CustomResourceDefinition) error {
	gvr := schema.GroupVersionResource{Group: d.Spec.Group, Version: d.Spec.Versions[0].Name, Resource: d.Spec.Names.Plural}
	_, err := b.dynamic.Resource(gvr).List(ctx, metav1.ListOptions{Limit: 1})
	return err
}

// operators are the objects that say KubeVirt, CDI and storage are installed.
func (b *Bootstrap) operators(pools []config.Pool) []*unstructured.Unstructured {
	devices := map[string]string{}
	for _, p := range pools {
		devices[p.Resource] = p.PCI
		if p.HostDevice != "" {
			devices[p.HostDevice] = "15B3:101E" // an InfiniBand virtual function
		}
	}
	names := make([]string, 0, len(devices))
	for name := range devices {
		names = append(names, name)
	}
	sort.Strings(names)
	var permitted []any
	for _, name := range names {
		permitted = append(permitted, map[string]any{
			"pciVendorSelector": devices[name], "resourceName": name, "externalResourceProvider": true,
		})
	}
	simulated := map[string]any{"cosmicac.dev/simulated": "true"}
	object := func(apiVersion, kind, namespace, name string, rest map[string]any) *unstructured.Unstructured {
		m := map[string]any{"name": name, "labels": simulated}
		if namespace != "" {
			m["namespace"] = namespace
		}
		rest["apiVersion"], rest["kind"], rest["metadata"] = apiVersion, kind, m
		return &unstructured.Unstructured{Object: rest}
	}
	class := object("storage.k8s.io/v1", "StorageClass", "", StorageClass, map[string]any{
		"provisioner": Provisioner, "reclaimPolicy": "Delete", "volumeBindingMode": "Immediate", "allowVolumeExpansion": true,
	})
	class.SetAnnotations(map[string]string{
		"storageclass.kubernetes.io/is-default-class": "true", "storageclass.kubevirt.io/is-default-virt-class": "true",
	})
	waiting := object("storage.k8s.io/v1", "StorageClass", "", WaitingStorageClass, map[string]any{
		"provisioner": Provisioner, "reclaimPolicy": "Delete", "volumeBindingMode": "WaitForFirstConsumer", "allowVolumeExpansion": true,
	})
	profile := func(class string) *unstructured.Unstructured {
		return object("cdi.kubevirt.io/v1beta1", "StorageProfile", "", class, map[string]any{
			"spec": map[string]any{},
			"status": map[string]any{
				"storageClass": class, "provisioner": Provisioner, "cloneStrategy": "copy",
				"claimPropertySets": []any{map[string]any{"accessModes": []any{"ReadWriteOnce"}, "volumeMode": "Block"}},
			},
		})
	}
	return []*unstructured.Unstructured{
		waiting, profile(StorageClass), profile(WaitingStorageClass),
		object("v1", "Namespace", "", "kubevirt", map[string]any{}),
		object("v1", "Namespace", "", "cdi", map[string]any{}),
		class,
		object("kubevirt.io/v1", "KubeVirt", "kubevirt", "kubevirt", map[string]any{
			"spec": map[string]any{"configuration": map[string]any{
				"developerConfiguration": map[string]any{"featureGates": []any{"HostDevices"}},
				"permittedHostDevices":   map[string]any{"pciHostDevices": permitted},
			}},
			"status": map[string]any{
				"phase": "Deployed", "observedKubeVirtVersion": kubevirtVersion, "targetKubeVirtVersion": kubevirtVersion,
				"operatorVersion": kubevirtVersion,
				"conditions":      []any{map[string]any{"type": "Available", "status": "True", "reason": "AllComponentsReady", "message": "simulated"}},
			},
		}),
		object("cdi.kubevirt.io/v1beta1", "CDI", "", "cdi", map[string]any{
			"spec":   map[string]any{},
			"status": map[string]any{"phase": "Deployed", "observedVersion": cdiVersion, "targetVersion": cdiVersion, "operatorVersion": cdiVersion},
		}),
		object("cdi.kubevirt.io/v1beta1", "CDIConfig", "", "config", map[string]any{
			"spec":   map[string]any{},
			"status": map[string]any{"scratchSpaceStorageClass": StorageClass, "filesystemOverhead": map[string]any{"global": "0.06"}},
		}),
	}
}

// Kubeconfig writes a kubeconfig for a token at a server, readable by the owner alone. The CA goes inside so that the file can be
// moved.
func (b *Bootstrap) Kubeconfig(file, server, user, token, namespace string) error {
	ca, err := os.ReadFile(b.cfg.CAFile)
	if err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	const name = "cosmicac-devcluster"
	c := clientcmdapi.NewConfig()
	c.Clusters[name] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: ca}
	c.AuthInfos[user] = &clientcmdapi.AuthInfo{Token: token}
	c.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: user, Namespace: namespace}
	c.CurrentContext = name
	raw, err := clientcmd.Write(*c)
	if err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	if err := os.WriteFile(file+".new", raw, 0o600); err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	return os.Rename(file+".new", file)
}

// Accounts writes a kubeconfig for every wanted service account, to reach the API server by this URL. The account must come with the manifests.
func (b *Bootstrap) Accounts(ctx context.Context, server string, accounts []config.Account) (map[string]string, error) {
	out := map[string]string{}
	for _, a := range accounts {
		seconds := int64(tokenLife.Seconds())
		var token string
		err := eventually(ctx, 30*time.Second, func() error {
			r, err := b.client.CoreV1().ServiceAccounts(a.Namespace).CreateToken(ctx, a.Name,
				&authv1.TokenRequest{Spec: authv1.TokenRequestSpec{ExpirationSeconds: &seconds}}, metav1.CreateOptions{})
			if err == nil {
				token = r.Status.Token
			}
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("--kubeconfig-for %s: %w", a.Key(), err)
		}
		if err := b.Kubeconfig(a.File, server, a.Name, token, a.Namespace); err != nil {
			return nil, fmt.Errorf("--kubeconfig-for %s: %w", a.Key(), err)
		}
		out[a.Key()] = a.File
	}
	return out, nil
}

func toUnstructured(v any, apiVersion, kind string) (*unstructured.Unstructured, error) {
	m, err := runtime.DefaultUnstructuredConverter.ToUnstructured(v)
	if err != nil {
		return nil, err
	}
	obj := &unstructured.Unstructured{Object: m}
	obj.SetAPIVersion(apiVersion)
	obj.SetKind(kind)
	delete(m, "status")
	unstructured.RemoveNestedField(m, "metadata", "creationTimestamp")
	return obj, nil
}
