// Package crds holds the CustomResourceDefinitions of KubeVirt, CDI and Multus that the development cluster serves.
// The YAML is made by package crdgen and committed; this package only hands it out and knows nothing of a cluster.
package crds

import (
	"embed"
	"fmt"
	"sort"

	apiext "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"
)

//go:embed yaml/*.yaml
var files embed.FS

// All returns the definitions in a stable order.
func All() ([]*apiext.CustomResourceDefinition, error) {
	entries, err := files.ReadDir("yaml")
	if err != nil {
		return nil, fmt.Errorf("list embedded definitions: %w", err)
	}
	var out []*apiext.CustomResourceDefinition
	for _, e := range entries {
		raw, err := files.ReadFile("yaml/" + e.Name())
		if err != nil {
			return nil, fmt.Errorf("read embedded %s: %w", e.Name(), err)
		}
		d := &apiext.CustomResourceDefinition{}
		if err := yaml.UnmarshalStrict(raw, d); err != nil {
			return nil, fmt.Errorf("parse embedded %s: %w", e.Name(), err)
		}
		out = append(out, d)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Name < out[j].Name })
	return out, nil
}
