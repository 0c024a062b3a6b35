package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
)

// bare applies what the worker had made by client-go alone: as many objects with
// the same content, each owner before what it owns, no waiting for anything, so
// many calls under way at a time.
func bare(ctx context.Context, o options, p *platform, seen *objects, f *figures, subject string, qps float32, burst int) error {
	config := rest.CopyConfig(p.admin)
	config.QPS, config.Burst = qps, burst
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	seen.reset(nil)
	want := 0
	for _, job := range p.captured {
		want += len(job)
	}
	start := time.Now()
	if err := each(ctx, o.callers, len(p.captured), func(ctx context.Context, i int) error { return apply(ctx, client, p.captured[i]) }); err != nil {
		return fmt.Errorf("%s: %w", subject, err)
	}
	err = await(ctx, o.patience, subject+": all applied, all run", func() (string, error) {
		_, made, running, words := seen.count()
		if made < want || running < len(p.captured) {
			return fmt.Sprintf("%d of %d objects (%s), %d machines run", made, want, words, running), nil
		}
		return "", nil
	})
	if err != nil {
		return err
	}
	made, run, _ := seen.times()
	applied := made.Sub(start).Seconds()
	f.add("all objects applied", subject, applied, "s", want)
	f.add("the worker's time to that", subject, f.value("all objects applied", "cosmicac")/applied, "x", 1)
	f.add("all VMs running", subject, run.Sub(start).Seconds(), "s", len(p.captured))
	return clear(ctx, o, seen, f, subject, want)
}

// apply creates one job's objects.
func apply(ctx context.Context, client dynamic.Interface, job []*unstructured.Unstructured) error {
	uids := map[string]types.UID{}
	for _, o := range job {
		o = o.DeepCopy()
		owners := o.GetOwnerReferences()
		for i := range owners {
			owners[i].UID = uids[owners[i].Kind+"/"+owners[i].Name]
		}
		o.SetOwnerReferences(owners)
		kind, ok := kindOf(o)
		if !ok {
			return fmt.Errorf("no resource of kind %s", o.GetKind())
		}
		made, err := client.Resource(kind).Namespace(namespace).Create(ctx, o, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict})
		if err != nil {
			return err
		}
		uids[o.GetKind()+"/"+o.GetName()] = made.GetUID()
	}
	return nil
}

// clear deletes all of it and waits until nothing is left.
func clear(ctx context.Context, o options, seen *objects, f *figures, subject string, n int) error {
	start := time.Now()
	for i := len(kinds) - 1; i >= 0; i-- {
		list, err := seen.client.Resource(kinds[i]).Namespace(namespace).List(ctx, metav1.ListOptions{LabelSelector: seen.selector})
		if err != nil {
			return err
		}
		err = each(ctx, o.callers, len(list.Items), func(ctx context.Context, k int) error {
			return ignoreGone(seen.client.Resource(kinds[i]).Namespace(namespace).Delete(ctx, list.Items[k].GetName(), metav1.DeleteOptions{}))
		})
		if err != nil {
			return err
		}
	}
	err := await(ctx, o.patience, subject+": all gone", func() (string, error) {
		if there, _, _, _ := seen.count(); there > 0 {
			return fmt.Sprint(there, " objects are left"), nil
		}
		return "", nil
	})
	_, _, gone := seen.times()
	f.add("all objects gone", subject, gone.Sub(start).Seconds(), "s", n)
	return err
}

// each calls do for 0 to n-1, so many at a time, and gives the first error.
func each(ctx context.Context, callers, n int, do func(context.Context, int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan int)
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for i := range next {
				if err := do(ctx, i); err != nil {
					cancel(err)
				}
			}
		})
	}
	for i := 0; i < n && ctx.Err() == nil; i++ {
		select {
		case next <- i:
		case <-ctx.Done():
		}
	}
	close(next)
	wg.Wait()
	return context.Cause(ctx)
}
