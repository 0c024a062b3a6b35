// Package catalogue is what a job can name: base images, models, and names for
// locations. The operator writes it in the configuration; it is read into the
// store at start.
//
// It resolves names to what the orchestrator needs. It does not import images,
// know which racks exist, or touch jobs that were made from an entry that is gone.
package catalogue

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/app-node/internal/account"
	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

// Config is the `catalogue` section. A list that is given replaces the shipped one.
type Config struct {
	Images    []ImageConfig     `yaml:"images"`
	Models    []ModelConfig     `yaml:"models"`
	Locations map[string]string `yaml:"locations"`
}

// ImageConfig is one base image.
type ImageConfig struct {
	Name        string `yaml:"name"`
	Reference   string `yaml:"reference"`
	DefaultUser string `yaml:"default_user"`
	Description string `yaml:"description"`
}

// ModelConfig is one model.
type ModelConfig struct {
	ID          string            `yaml:"id"`
	Name        string            `yaml:"name"`
	Runtime     string            `yaml:"runtime"`
	Description string            `yaml:"description"`
	Image       string            `yaml:"image"`
	Arguments   []string          `yaml:"arguments"`
	Recommended RecommendedConfig `yaml:"recommended"`
}

// RecommendedConfig is the hardware that a model is known to run on.
type RecommendedConfig struct {
	GPUModel string `yaml:"gpu_model"`
	GPUCount int    `yaml:"gpu_count"`
}

// Runtimes is the closed list of what serves a model.
var Runtimes = []string{"vllm", "parakeet", "embedded", "command"}

// RuntimeCommand runs a command of the user's: its model need not be known here.
const RuntimeCommand = "command"

// Defaults is the shipped catalogue. The references are examples: an operator
// names a registry of its own.
func Defaults() Config {
	return Config{
		Images: []ImageConfig{
			{Name: "Ubuntu22.04/CUDA12.8.1", Reference: "docker://registry.example.org/cosmicac/ubuntu:22.04-cuda12.8.1",
				DefaultUser: "ubuntu", Description: "Ubuntu 22.04 LTS with CUDA 12.8.1 and the NVIDIA driver."},
			{Name: "Ubuntu24.04/CUDA12.9", Reference: "docker://registry.example.org/cosmicac/ubuntu:24.04-cuda12.9",
				DefaultUser: "ubuntu", Description: "Ubuntu 24.04 LTS with CUDA 12.9 and the NVIDIA driver."},
		},
		Models: []ModelConfig{
			{ID: "cosmicac/ngram-demo", Name: "N-gram demonstration", Runtime: "embedded",
				Description: "A tiny text model that runs on the CPU, for demonstration. It answers, but knows nothing."},
			{ID: "Qwen/Qwen3-32B", Name: "Qwen3 32B", Runtime: "vllm", Description: "Chat model with 32 billion parameters.",
				Recommended: RecommendedConfig{GPUModel: "GH100_H100_SXM5_80GB", GPUCount: 2}},
			{ID: "nvidia/parakeet-tdt-0.6b-v3", Name: "Parakeet TDT 0.6B v3", Runtime: "parakeet", Description: "Speech to text.",
				Recommended: RecommendedConfig{GPUModel: "GH100_H100_SXM5_80GB", GPUCount: 1}},
		},
		Locations: map[string]string{},
	}
}

var (
	referencePattern = regexp.MustCompile(`^docker://[a-zA-Z0-9][a-zA-Z0-9._:/@-]*$`)
	userPattern      = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,31}$`)
	locationPattern  = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)
)

// Build checks a configuration and turns it into rows. Every problem names its entry.
func Build(c Config) (store.Catalogue, error) {
	var out store.Catalogue
	problem := func(format string, a ...any) (store.Catalogue, error) {
		return store.Catalogue{}, fault.New(fault.Invalid, "catalogue: "+format, a...)
	}
	for _, i := range c.Images {
		if err := account.CheckName("name", i.Name); err != nil {
			return problem("images: %q: %v", i.Name, err)
		}
		if slices.ContainsFunc(out.Images, func(o store.Image) bool { return o.Name == i.Name }) {
			return problem("images: %q is there twice", i.Name)
		}
		if !referencePattern.MatchString(i.Reference) {
			return problem("images: %q: reference %q must look like docker://host/name:tag", i.Name, i.Reference)
		}
		if i.DefaultUser == "" {
			i.DefaultUser = "ubuntu"
		}
		if !userPattern.MatchString(i.DefaultUser) {
			return problem("images: %q: default_user %q is not a login name", i.Name, i.DefaultUser)
		}
		out.Images = append(out.Images, store.Image(i))
	}
	if len(out.Images) == 0 {
		return problem("images: at least one is needed")
	}
	for _, m := range c.Models {
		if m.ID == "" || len(m.ID) > 200 || strings.ContainsAny(m.ID, " \t\r\n") {
			return problem("models: id %q must have 1 to 200 characters and no spaces", m.ID)
		}
		if slices.ContainsFunc(out.Models, func(o store.Model) bool { return o.ID == m.ID }) {
			return problem("models: %q is there twice", m.ID)
		}
		if !slices.Contains(Runtimes, m.Runtime) {
			return problem("models: %q: runtime %q must be one of %s", m.ID, m.Runtime, strings.Join(Runtimes, ", "))
		}
		if m.Image == "" {
			m.Image = out.Images[0].Name
		}
		if !slices.ContainsFunc(out.Images, func(o store.Image) bool { return o.Name == m.Image }) {
			return problem("models: %q: there is no image %q", m.ID, m.Image)
		}
		if m.Recommended.GPUCount < 0 {
			return problem("models: %q: recommended.gpu_count must not be negative", m.ID)
		}
		if m.Name == "" {
			m.Name = m.ID
		}
		out.Models = append(out.Models, store.Model{ID: m.ID, Name: m.Name, Runtime: m.Runtime, Description: m.Description,
			Image: m.Image, Arguments: m.Arguments, GPUModel: m.Recommended.GPUModel, GPUCount: m.Recommended.GPUCount})
	}
	for code, name := range c.Locations {
		if !locationPattern.MatchString(code) {
			return problem("locations: code %q must be lower-case letters, digits and dashes", code)
		}
		if err := account.CheckName("name", name); err != nil {
			return problem("locations: %q: %v", code, err)
		}
		out.Locations = append(out.Locations, store.Location{Code: code, Name: name})
	}
	return out, nil
}

// Catalogue resolves names.
type Catalogue struct {
	store *store.Store
}

// New makes a Catalogue over what the store holds.
func New(s *store.Store) *Catalogue { return &Catalogue{store: s} }

// List reads everything.
func (c *Catalogue) List(ctx context.Context) (store.Catalogue, error) { return c.store.Catalogue(ctx) }

// Choice is what a user named of the catalogue; empty for nothing.
type Choice struct {
	Image   string
	Model   string
	Runtime string
	// Inference is true for a Managed Inference Job.
	Inference bool
}

// Resolved is what the names stand for.
type Resolved struct {
	Image     store.Image
	Runtime   string
	Arguments []string
}

// Resolve looks names up. Every unknown one comes as a detail that names the
// field and lists what exists.
func (c *Catalogue) Resolve(ctx context.Context, choice Choice) (Resolved, error) {
	all, err := c.store.Catalogue(ctx)
	if err != nil {
		return Resolved{}, err
	}
	r := Resolved{Runtime: choice.Runtime}
	var details []fault.Detail
	imageName := choice.Image
	if choice.Inference {
		model, found := find(all.Models, func(m store.Model) bool { return m.ID == choice.Model })
		switch {
		case choice.Model == "":
			details = append(details, fault.Detail{Field: "model", Rule: "is required; there is " + list(all.Models, func(m store.Model) string { return m.ID })})
		case !found && choice.Runtime != RuntimeCommand:
			details = append(details, fault.Detail{Field: "model", Rule: fmt.Sprintf("%q is not in the catalogue; there is %s", choice.Model,
				list(all.Models, func(m store.Model) string { return m.ID }))})
		case found && choice.Runtime != "" && choice.Runtime != model.Runtime && choice.Runtime != RuntimeCommand:
			details = append(details, fault.Detail{Field: "runtime", Rule: fmt.Sprintf("%q is served by %q", choice.Model, model.Runtime)})
		case found && choice.Runtime != RuntimeCommand:
			r.Runtime, r.Arguments = model.Runtime, model.Arguments
		}
		if imageName == "" {
			imageName = model.Image
		}
		if imageName == "" && len(all.Images) > 0 {
			imageName = all.Images[0].Name
		}
	}
	image, found := find(all.Images, func(i store.Image) bool { return i.Name == imageName })
	if !found {
		rule := "is required; there is "
		if imageName != "" {
			rule = fmt.Sprintf("%q is not in the catalogue; there is ", imageName)
		}
		details = append(details, fault.Detail{Field: "image", Rule: rule + list(all.Images, func(i store.Image) string { return i.Name })})
	}
	r.Image = image
	if len(details) > 0 {
		words := make([]string, len(details))
		for i, d := range details {
			words[i] = d.Field + " " + d.Rule
		}
		return Resolved{}, fault.New(fault.Invalid, "%s", strings.Join(words, "; ")).With(details...)
	}
	return r, nil
}

func find[T any](all []T, is func(T) bool) (T, bool) {
	if i := slices.IndexFunc(all, is); i >= 0 {
		return all[i], true
	}
	var none T
	return none, false
}

func list[T any](all []T, name func(T) string) string {
	if len(all) == 0 {
		return "none"
	}
	names := make([]string, len(all))
	for i, v := range all {
		names[i] = name(v)
	}
	return strings.Join(names, ", ")
}
