package controlplane

import (
	"context"
	"fmt"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	"k8s.io/kubernetes/pkg/scheduler"
	"k8s.io/kubernetes/pkg/scheduler/profile"
)

// startScheduler runs the real scheduler with its default profile: what it says about room, taints and selectors is
// what a large cluster would say. Its longest wait before it tries a pod again is cut to two seconds; with few nodes a
// longer one only slows people down.
func (c *ControlPlane) startScheduler(ctx context.Context) error {
	cfg := rest.AddUserAgent(c.Config(Admin), "kube-scheduler")
	protobuf := rest.CopyConfig(cfg)
	protobuf.ContentType = "application/vnd.kubernetes.protobuf"
	client, err := kubernetes.NewForConfig(protobuf)
	if err != nil {
		return fmt.Errorf("start the scheduler: %w", err)
	}
	dyn, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return fmt.Errorf("start the scheduler: %w", err)
	}
	name, err := cache.NewInformerName("kube-scheduler")
	if err != nil {
		return fmt.Errorf("start the scheduler: %w", err)
	}
	ready := make(chan error, 1)
	c.background(ctx, "kube-scheduler", 2*time.Second, func(ctx context.Context) error {
		defer name.Release()
		informers := scheduler.NewInformerFactory(client, 0, name)
		dynInformers := dynamicinformer.NewDynamicSharedInformerFactory(dyn, 0)
		broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: client.EventsV1()})
		defer broadcaster.Shutdown()
		sched, err := scheduler.New(ctx, client, informers, dynInformers, profile.NewRecorderFactory(broadcaster),
			scheduler.WithPodMaxBackoffSeconds(2),
			scheduler.WithPodMaxInUnschedulablePodsDuration(time.Minute))
		if err != nil {
			ready <- err
			return err
		}
		broadcaster.StartRecordingToSink(ctx.Done())
		informers.Start(ctx.Done())
		dynInformers.Start(ctx.Done())
		informers.WaitForCacheSync(ctx.Done())
		dynInformers.WaitForCacheSync(ctx.Done())
		if err := sched.WaitForHandlersSync(ctx); err != nil {
			ready <- err
			return err
		}
		ready <- nil
		sched.Run(ctx)
		return nil
	})
	select {
	case err := <-ready:
		if err != nil {
			return fmt.Errorf("start the scheduler: %w", err)
		}
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
