// Package crdgen makes the CustomResourceDefinitions of the simulated KubeVirt, CDI and Multus from the Go types that
// those projects publish, so that field names, types and strictness are theirs and not a retelling.
//
// The Go types carry no kubebuilder markers for names, scopes, subresources and printer columns; those are the table
// below. Validation that KubeVirt does in its webhooks is not in the types and so not in the schema: the admission
// policies of package bootstrap cover the part of it that matters here.
package crdgen

import (
	"fmt"

	apiext "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-tools/pkg/crd"
	crdmarkers "sigs.k8s.io/controller-tools/pkg/crd/markers"
	"sigs.k8s.io/controller-tools/pkg/loader"
	"sigs.k8s.io/controller-tools/pkg/markers"
	"sigs.k8s.io/yaml"
)

const (
	kubevirtTypes = "kubevirt.io/api/core/v1"
	cdiTypes      = "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
)

// resource says what the Go type of a kind does not.
type resource struct {
	pkg, kind        string
	group, version   string
	plural, singular string
	short            []string
	categories       []string
	cluster          bool
	status           bool // has the status subresource
	columns          []apiext.CustomResourceColumnDefinition
}

func column(name, kind, path string, priority int32) apiext.CustomResourceColumnDefinition {
	return apiext.CustomResourceColumnDefinition{Name: name, Type: kind, JSONPath: path, Priority: priority}
}

var age = column("Age", "date", ".metadata.creationTimestamp", 0)

// resources lists the kinds. Of all of them only the VMI has no status subresource although it has a status: its
// status is written by a plain update, as in KubeVirt.
var resources = []resource{
	{
		pkg: kubevirtTypes, kind: "VirtualMachineInstance", group: "kubevirt.io", version: "v1",
		plural: "virtualmachineinstances", singular: "virtualmachineinstance", short: []string{"vmi", "vmis"}, categories: []string{"all"},
		columns: []apiext.CustomResourceColumnDefinition{
			age,
			column("Phase", "string", ".status.phase", 0),
			column("IP", "string", ".status.interfaces[0].ipAddress", 0),
			column("NodeName", "string", ".status.nodeName", 0),
			column("Ready", "string", ".status.conditions[?(@.type=='Ready')].status", 0),
			column("Live-Migratable", "string", ".status.conditions[?(@.type=='LiveMigratable')].status", 1),
			column("Paused", "string", ".status.conditions[?(@.type=='Paused')].status", 1),
		},
	},
	{
		pkg: kubevirtTypes, kind: "KubeVirt", group: "kubevirt.io", version: "v1",
		plural: "kubevirts", singular: "kubevirt", short: []string{"kv", "kvs"}, categories: []string{"all"}, status: true,
		columns: []apiext.CustomResourceColumnDefinition{age, column("Phase", "string", ".status.phase", 0)},
	},
	{
		pkg: cdiTypes, kind: "DataVolume", group: "cdi.kubevirt.io", version: "v1beta1",
		plural: "datavolumes", singular: "datavolume", short: []string{"dv", "dvs"}, categories: []string{"all"}, status: true,
		columns: []apiext.CustomResourceColumnDefinition{
			column("Phase", "string", ".status.phase", 0),
			column("Progress", "string", ".status.progress", 0),
			column("Restarts", "integer", ".status.restartCount", 0),
			age,
		},
	},
	{
		pkg: cdiTypes, kind: "CDI", group: "cdi.kubevirt.io", version: "v1beta1",
		plural: "cdis", singular: "cdi", short: []string{"cdi", "cdis"}, cluster: true,
		columns: []apiext.CustomResourceColumnDefinition{age, column("Phase", "string", ".status.phase", 0)},
	},
	{
		pkg: cdiTypes, kind: "CDIConfig", group: "cdi.kubevirt.io", version: "v1beta1",
		plural: "cdiconfigs", singular: "cdiconfig", cluster: true, status: true,
	},
	{
		pkg: cdiTypes, kind: "StorageProfile", group: "cdi.kubevirt.io", version: "v1beta1",
		plural: "storageprofiles", singular: "storageprofile", cluster: true, status: true,
	},
}

// Generate returns the YAML of every definition by file name. It reads the sources of the types through the go
// command, so it needs a Go toolchain and the module cache.
func Generate() (map[string][]byte, error) {
	pkgs, err := loader.LoadRoots(kubevirtTypes, cdiTypes)
	if err != nil {
		return nil, fmt.Errorf("load the go types: %w", err)
	}
	registry := &markers.Registry{}
	if err := crdmarkers.Register(registry); err != nil {
		return nil, fmt.Errorf("register markers: %w", err)
	}
	parser := &crd.Parser{Collector: &markers.Collector{Registry: registry}, Checker: &loader.TypeChecker{}, AllowDangerousTypes: true}
	crd.AddKnownTypes(parser)

	byPath := map[string]*loader.Package{}
	for _, p := range pkgs {
		parser.NeedPackage(p)
		byPath[p.PkgPath] = p
	}

	out := map[string][]byte{}
	for _, r := range resources {
		ident := crd.TypeIdent{Package: byPath[r.pkg], Name: r.kind}
		if ident.Package == nil {
			return nil, fmt.Errorf("package %s was not loaded", r.pkg)
		}
		parser.NeedFlattenedSchemaFor(ident)
		schema := parser.FlattenedSchemata[ident]
		if len(schema.Properties) == 0 {
			return nil, fmt.Errorf("no schema came out for %s", r.kind)
		}
		prune(&schema)
		schema.Properties["metadata"] = apiext.JSONSchemaProps{Type: "object"}
		raw, err := marshal(r.definition(schema))
		if err != nil {
			return nil, fmt.Errorf("write %s: %w", r.kind, err)
		}
		out[r.group+"_"+r.plural+".yaml"] = raw
	}
	raw, err := marshal(networkAttachmentDefinition())
	if err != nil {
		return nil, err
	}
	out["k8s.cni.cncf.io_network-attachment-definitions.yaml"] = raw
	return out, nil
}

func (r resource) definition(schema apiext.JSONSchemaProps) apiext.CustomResourceDefinition {
	scope := apiext.NamespaceScoped
	if r.cluster {
		scope = apiext.ClusterScoped
	}
	version := apiext.CustomResourceDefinitionVersion{
		Name: r.version, Served: true, Storage: true,
		Schema:                   &apiext.CustomResourceValidation{OpenAPIV3Schema: &schema},
		AdditionalPrinterColumns: r.columns,
	}
	if r.status {
		version.Subresources = &apiext.CustomResourceSubresources{Status: &apiext.CustomResourceSubresourceStatus{}}
	}
	return apiext.CustomResourceDefinition{
		TypeMeta:   metav1.TypeMeta{APIVersion: "apiextensions.k8s.io/v1", Kind: "CustomResourceDefinition"},
		ObjectMeta: metav1.ObjectMeta{Name: r.plural + "." + r.group},
		Spec: apiext.CustomResourceDefinitionSpec{
			Group: r.group, Scope: scope,
			Names: apiext.CustomResourceDefinitionNames{
				Kind: r.kind, ListKind: r.kind + "List", Plural: r.plural, Singular: r.singular, ShortNames: r.short, Categories: r.categories,
			},
			Versions: []apiext.CustomResourceDefinitionVersion{version},
		},
	}
}

// networkAttachmentDefinition is Multus's one kind: a name and an opaque CNI configuration.
func networkAttachmentDefinition() apiext.CustomResourceDefinition {
	schema := apiext.JSONSchemaProps{Type: "object", Properties: map[string]apiext.JSONSchemaProps{
		"apiVersion": {Type: "string"}, "kind": {Type: "string"}, "metadata": {Type: "object"},
		"spec": {Type: "object", Properties: map[string]apiext.JSONSchemaProps{"config": {Type: "string"}}},
	}}
	return resource{
		kind: "NetworkAttachmentDefinition", group: "k8s.cni.cncf.io", version: "v1",
		plural: "network-attachment-definitions", singular: "network-attachment-definition", short: []string{"net-attach-def"},
	}.definition(schema)
}

// prune drops what makes the schema large or changes objects behind the caller's back: descriptions, and defaults
// (the API server would fill them in, KubeVirt's own definitions carry none). List maps go too, because a list map
// demands that its keys be required or defaulted, which these types do not promise.
func prune(s *apiext.JSONSchemaProps) {
	s.Description = ""
	s.Default = nil
	s.XListMapKeys, s.XListType, s.XMapType = nil, nil, nil
	for name, p := range s.Properties {
		prune(&p)
		s.Properties[name] = p
	}
	if s.Items != nil && s.Items.Schema != nil {
		prune(s.Items.Schema)
	}
	if s.AdditionalProperties != nil && s.AdditionalProperties.Schema != nil {
		prune(s.AdditionalProperties.Schema)
	}
	for i := range s.AllOf {
		prune(&s.AllOf[i])
	}
}

func marshal(d apiext.CustomResourceDefinition) ([]byte, error) {
	raw, err := yaml.Marshal(d)
	if err != nil {
		return nil, err
	}
	var m map[string]any
	if err := yaml.Unmarshal(raw, &m); err != nil {
		return nil, err
	}
	delete(m, "status")
	delete(m["metadata"].(map[string]any), "creationTimestamp")
	return yaml.Marshal(m)
}
