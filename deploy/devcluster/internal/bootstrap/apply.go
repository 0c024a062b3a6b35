package bootstrap

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"
)

const fieldManager = "cosmicac-devcluster"

// apply writes objects by server-side apply. It is idempotent and takes fields over from whoever set them.
func (b *Bootstrap) apply(ctx context.Context, obj *unstructured.Unstructured, subresources ...string) error {
	gvk := obj.GroupVersionKind()
	mapping, err := b.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if meta.IsNoMatchError(err) {
		b.mapper.Reset() // a definition may be younger than the cached discovery
		mapping, err = b.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	}
	if err != nil {
		return err
	}
	var client dynamic.ResourceInterface = b.dynamic.Resource(mapping.Resource)
	if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		ns := obj.GetNamespace()
		if ns == "" {
			ns = "default"
		}
		client = b.dynamic.Resource(mapping.Resource).Namespace(ns)
	}
	_, err = client.Apply(ctx, obj.GetName(), obj, metav1.ApplyOptions{FieldManager: fieldManager, Force: true}, subresources...)
	return err
}

// applySoon repeats apply for a while: discovery and admission follow a new definition with some delay.
func (b *Bootstrap) applySoon(ctx context.Context, obj *unstructured.Unstructured, subresources ...string) error {
	return eventually(ctx, time.Minute, func() error { return b.apply(ctx, obj, subresources...) })
}

// eventually repeats f until it is fine, the time is over, or the context ends.
func eventually(ctx context.Context, within time.Duration, f func() error) error {
	deadline := time.Now().Add(within)
	for {
		err := f()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

type document struct {
	file string
	obj  *unstructured.Unstructured
}

// order of kinds that others stand on; everything else follows.
var order = map[string]int{"Namespace": -4, "CustomResourceDefinition": -3, "ServiceAccount": -2, "ClusterRole": -1, "Role": -1}

// readManifests reads every YAML file under dir, in the order in which the objects must be applied.
func readManifests(dir string) ([]document, error) {
	var docs []document
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		ext := filepath.Ext(path)
		if e.IsDir() || ext != ".yaml" && ext != ".yml" || strings.HasPrefix(e.Name(), "kustomization.") {
			return nil
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		objs, err := decode(raw)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		for _, o := range objs {
			docs = append(docs, document{path, o})
		}
		return nil
	})
	sort.SliceStable(docs, func(i, j int) bool { return order[docs[i].obj.GetKind()] < order[docs[j].obj.GetKind()] })
	return docs, err
}

// decode splits a YAML stream into objects and flattens lists.
func decode(raw []byte) ([]*unstructured.Unstructured, error) {
	var out []*unstructured.Unstructured
	r := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(raw)))
	for n := 1; ; n++ {
		part, err := r.Read()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		js, err := yaml.YAMLToJSON(part)
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", n, err)
		}
		if s := string(bytes.TrimSpace(js)); s == "null" || s == "{}" {
			continue
		}
		obj := &unstructured.Unstructured{}
		if err := obj.UnmarshalJSON(js); err != nil {
			return nil, fmt.Errorf("document %d: %w", n, err)
		}
		if obj.IsList() {
			if err := obj.EachListItem(func(o runtimeObject) error {
				out = append(out, o.(*unstructured.Unstructured))
				return nil
			}); err != nil {
				return nil, fmt.Errorf("document %d: %w", n, err)
			}
			continue
		}
		if obj.GetName() == "" {
			return nil, fmt.Errorf("document %d: %s has no name", n, obj.GetKind())
		}
		out = append(out, obj)
	}
}

// Manifests applies every YAML file under dir.
func (b *Bootstrap) Manifests(ctx context.Context, dir string) error {
	docs, err := readManifests(dir)
	if err != nil {
		return fmt.Errorf("read manifests: %w", err)
	}
	for _, d := range docs {
		err := eventually(ctx, 30*time.Second, func() error { return b.apply(ctx, d.obj) })
		if err != nil {
			return fmt.Errorf("apply %s %s of %s: %w", d.obj.GetKind(), d.obj.GetName(), d.file, err)
		}
	}
	b.log.Info("manifests applied", "dir", dir, "objects", len(docs))
	return nil
}
