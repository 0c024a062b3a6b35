package controlplane

import (
	"context"
	"fmt"
	"os"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	quotageneric "k8s.io/apiserver/pkg/quota/v1/generic"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/util/keyutil"
	"k8s.io/controller-manager/pkg/informerfactory"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/controller/certificates/rootcacertpublisher"
	"k8s.io/kubernetes/pkg/controller/endpointslice"
	"k8s.io/kubernetes/pkg/controller/garbagecollector"
	"k8s.io/kubernetes/pkg/controller/namespace"
	"k8s.io/kubernetes/pkg/controller/podgc"
	"k8s.io/kubernetes/pkg/controller/resourcequota"
	"k8s.io/kubernetes/pkg/controller/serviceaccount"
	"k8s.io/kubernetes/pkg/controller/volume/persistentvolume"
	"k8s.io/kubernetes/pkg/controller/volume/pvcprotection"
	"k8s.io/kubernetes/pkg/controller/volume/pvprotection"
	quotainstall "k8s.io/kubernetes/pkg/quota/v1/install"
	sa "k8s.io/kubernetes/pkg/serviceaccount"
)

// newResources is how often the garbage collector and the quota controller look for new kinds. The controller
// manager's own 30 s would leave owned objects of a fresh definition behind for half a minute; below a few seconds a
// busy machine cannot sync in time.
const newResources = 5 * time.Second

// startControllers runs the controllers by hand instead of through kube-controller-manager: fewer of them, one shared
// set of informers, and a garbage collector that notices new kinds sooner.
func (c *ControlPlane) startControllers(ctx context.Context) error {
	cfg := rest.AddUserAgent(c.Config(Admin), "kube-controllers")
	protobuf := rest.CopyConfig(cfg)
	protobuf.ContentType = "application/vnd.kubernetes.protobuf"
	client, err := kubernetes.NewForConfig(protobuf)
	if err != nil {
		return fmt.Errorf("start the controllers: %w", err)
	}
	meta, err := metadata.NewForConfig(cfg)
	if err != nil {
		return fmt.Errorf("start the controllers: %w", err)
	}
	ca, err := os.ReadFile(c.CAFile)
	if err != nil {
		return fmt.Errorf("start the controllers: %w", err)
	}
	key, err := keyutil.PrivateKeyFromFile(c.creds.keyFile)
	if err != nil {
		return fmt.Errorf("start the controllers: %w", err)
	}
	generator, err := sa.JWTTokenGenerator(sa.LegacyIssuer, key)
	if err != nil {
		return fmt.Errorf("start the controllers: %w", err)
	}

	started := make(chan error, 1)
	c.background(ctx, "controllers", 2*time.Second, func(ctx context.Context) error {
		err := runControllers(ctx, client, meta, ca, generator, started)
		if err != nil {
			started <- err
		}
		return err
	})
	select {
	case err := <-started:
		if err != nil {
			return fmt.Errorf("start the controllers: %w", err)
		}
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func runControllers(ctx context.Context, client kubernetes.Interface, meta metadata.Interface, ca []byte, tokens sa.TokenGenerator, started chan<- error) error {
	log := klog.FromContext(ctx)
	shared := informers.NewSharedInformerFactory(client, 0)
	core := shared.Core().V1()
	metaInformers := metadatainformer.NewSharedInformerFactory(meta, 0)
	both := informerfactory.NewInformerFactory(shared, metaInformers)
	informersStarted := make(chan struct{})
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(client.Discovery()))
	discover := client.Discovery().ServerPreferredNamespacedResources

	gc, err := garbagecollector.NewGarbageCollector(ctx, client, meta, mapper,
		garbagecollector.DefaultIgnoredResources(), both, informersStarted)
	if err != nil {
		return fmt.Errorf("garbage collector: %w", err)
	}
	ns := namespace.NewNamespaceController(ctx, client, meta, discover, core.Namespaces(), 5*time.Minute, v1.FinalizerKubernetes)
	accounts, err := serviceaccount.NewServiceAccountsController(log, core.ServiceAccounts(), core.Namespaces(), client,
		serviceaccount.DefaultServiceAccountsControllerOptions())
	if err != nil {
		return fmt.Errorf("service accounts: %w", err)
	}
	secrets, err := serviceaccount.NewTokensController(log, core.ServiceAccounts(), core.Secrets(), client,
		serviceaccount.TokensControllerOptions{TokenGenerator: tokens, RootCA: ca})
	if err != nil {
		return fmt.Errorf("service account tokens: %w", err)
	}
	publisher, err := rootcacertpublisher.NewPublisher(core.ConfigMaps(), core.Namespaces(), client, ca)
	if err != nil {
		return fmt.Errorf("root ca publisher: %w", err)
	}
	slices := endpointslice.NewController(ctx, core.Pods(), core.Services(), core.Nodes(),
		shared.Discovery().V1().EndpointSlices(), 100, client, 200*time.Millisecond)
	volumes, err := persistentvolume.NewController(ctx, persistentvolume.ControllerParameters{
		KubeClient: client, SyncPeriod: 15 * time.Second,
		VolumeInformer: core.PersistentVolumes(), ClaimInformer: core.PersistentVolumeClaims(),
		ClassInformer: shared.Storage().V1().StorageClasses(), PodInformer: core.Pods(), NodeInformer: core.Nodes(),
		EnableDynamicProvisioning: true,
	})
	if err != nil {
		return fmt.Errorf("volume binder: %w", err)
	}
	claims, err := pvcprotection.NewPVCProtectionController(log, core.PersistentVolumeClaims(), core.Pods(), client)
	if err != nil {
		return fmt.Errorf("claim protection: %w", err)
	}
	protection, err := pvprotection.NewPVProtectionController(log, core.PersistentVolumes(), client)
	if err != nil {
		return fmt.Errorf("volume protection: %w", err)
	}
	pods := podgc.NewPodGC(ctx, client, core.Pods(), core.Nodes(), 12500)

	quotas, err := quotainstall.NewQuotaConfigurationForControllers(quotageneric.ListerFuncForResourceFunc(
		func(gvr schema.GroupVersionResource) (informers.GenericInformer, error) {
			return shared.ForResource(gvr)
		}), shared)
	if err != nil {
		return fmt.Errorf("quota: %w", err)
	}
	quota, err := resourcequota.NewController(ctx, &resourcequota.ControllerOptions{
		QuotaClient: client.CoreV1(), ResourceQuotaInformer: core.ResourceQuotas(),
		ResyncPeriod:    func() time.Duration { return 5 * time.Minute },
		InformerFactory: both, ReplenishmentResyncPeriod: func() time.Duration { return 12 * time.Hour },
		DiscoveryFunc: discover, IgnoredResourcesFunc: quotas.IgnoredResources, InformersStarted: informersStarted,
		Registry: quotageneric.NewRegistry(quotas.Evaluators()), UpdateFilter: quotainstall.DefaultUpdateFilter(),
	})
	if err != nil {
		return fmt.Errorf("quota: %w", err)
	}

	shared.Start(ctx.Done())
	metaInformers.Start(ctx.Done())
	close(informersStarted)
	for _, run := range []func(){
		func() { gc.Run(ctx, 8, newResources) },
		func() { gc.Sync(ctx, client.Discovery(), newResources) },
		func() { ns.Run(ctx, 4) },
		func() { accounts.Run(ctx, 1) },
		func() { secrets.Run(ctx, 1) },
		func() { publisher.Run(ctx, 1) },
		func() { slices.Run(ctx, 2) },
		func() { volumes.Run(ctx) },
		func() { claims.Run(ctx, 1) },
		func() { protection.Run(ctx, 1) },
		func() { pods.Run(ctx) },
		func() { quota.Run(ctx, 2) },
		func() { quota.Sync(ctx, discover, newResources) },
	} {
		go run()
	}
	started <- nil
	<-ctx.Done()
	return nil
}
