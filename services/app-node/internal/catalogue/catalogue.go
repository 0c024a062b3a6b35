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
	// Prices are what a GPU costs in an hour, by model code, in hundredths of Currency.
	Prices   map[string]uint64 `yaml:"prices"`
	Currency string            `yaml:"currency"`
}

// ImageConfig is one base image.
type ImageConfig struct {
	Name        string `yaml:"name"`
	Reference   string `yaml:"reference"`
	DefaultUser string `yaml:"default_user"`
	Description string `yaml:"description"`
	// CUDA is the release in it, like "12.8.1"; empty when nobody says.
	CUDA string `yaml:"cuda"`
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
				DefaultUser: "ubuntu", Description: "Ubuntu 22.04 LTS with CUDA 12.8.1 and the NVIDIA driver.", CUDA: "12.8.1"},
			{Name: "Ubuntu24.04/CUDA12.9", Reference: "docker://registry.example.org/cosmicac/ubuntu:24.04-cuda12.9",
				DefaultUser: "ubuntu", Description: "Ubuntu 24.04 LTS with CUDA 12.9 and the NVIDIA driver.", CUDA: "12.9"},
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
		Prices:    map[string]uint64{},
		Currency:  "USD",
	}
}

var (
	referencePattern = regexp.MustCompile(`^docker://[a-zA-Z0-9][a-zA-Z0-9._:/@-]*$`)
	userPattern      = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,31}$`)
	modelPattern     = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$`)
	releasePattern   = regexp.MustCompile(`^[0-9]+(\.[0-9]+){0,3}$`)
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
		if i.CUDA != "" && !releasePattern.MatchString(i.CUDA) {
			return problem("images: %q: cuda %q must be a release like 12.8.1", i.Name, i.CUDA)
		}
		out.Images = append(out.Images, store.Image{Name: i.Name, Reference: i.Reference, DefaultUser: i.DefaultUser, Description: i.Description})
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
	for model, cents := range c.Prices {
		if !modelPattern.MatchString(model) {
			return problem("prices: %q is not a GPU model code", model)
		}
		if cents > 1<<40 {
			return problem("prices: %s: %d hundredths for an hour are more than are counted", model, cents)
		}
	}
	if len(c.Currency) > 16 {
		return problem("currency: %q has more than 16 characters", c.Currency)
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

// Catalogue resolves names and knows prices.
type Catalogue struct {
	store    *store.Store
	prices   map[string]uint64 // by model in lower case
	currency string
	cuda     map[string]string // by image name
}

// New makes a Catalogue over what the store holds, with the prices and CUDA
// releases of a configuration that was checked.
func New(s *store.Store, c Config) *Catalogue {
	out := &Catalogue{store: s, prices: map[string]uint64{}, currency: c.Currency, cuda: map[string]string{}}
	for model, cents := range c.Prices {
		out.prices[strings.ToLower(model)] = cents
	}
	for _, i := range c.Images {
		out.cuda[i.Name] = i.CUDA
	}
	return out
}

// Price is what a GPU of a model costs in an hour, in hundredths of the currency.
func (c *Catalogue) Price(model string) (cents uint64, currency string, known bool) {
	cents, known = c.prices[strings.ToLower(model)]
	return cents, c.currency, known
}

// has reports whether an image has the CUDA release that was asked for, as exactly
// as that was said: 12.8.1 is a 12.8.
func (c *Catalogue) has(image, cuda string) bool {
	want := strings.TrimSpace(strings.TrimPrefix(strings.ToUpper(cuda), "CUDA"))
	have := c.cuda[image]
	return want != "" && (have == want || strings.HasPrefix(have, want+"."))
}

// List reads everything.
func (c *Catalogue) List(ctx context.Context) (store.Catalogue, error) { return c.store.Catalogue(ctx) }

// Choice is what a user named of the catalogue; empty for nothing.
type Choice struct {
	Image   string
	Model   string
	Runtime string
	// CUDA is the release that the image must have, like "CUDA 12.8".
	CUDA string
	// Inference is true for a Managed Inference Job.
	Inference bool
}

// Resolved is what the names stand for.
type Resolved struct {
	Image     store.Image
	Runtime   string
	Arguments []string
}

// Resolve looks names up. Every unknown one comes as a problem that names the field
// and lists what exists; what was found is resolved all the same.
func (c *Catalogue) Resolve(ctx context.Context, choice Choice) (r Resolved, details []fault.Detail, err error) {
	all, err := c.store.Catalogue(ctx)
	if err != nil {
		return Resolved{}, nil, err
	}
	r.Runtime = choice.Runtime
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
			for _, i := range all.Images {
				if choice.CUDA != "" && c.has(i.Name, choice.CUDA) {
					imageName = i.Name
					break
				}
			}
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
	if found && choice.CUDA != "" && !c.has(imageName, choice.CUDA) {
		have := "the catalogue does not say which CUDA it has"
		if c.cuda[imageName] != "" {
			have = "it has CUDA " + c.cuda[imageName]
		}
		details = append(details, fault.Detail{Field: "cuda", Rule: fmt.Sprintf("%q is not in image %q: %s", choice.CUDA, imageName, have)})
	}
	r.Image = image
	return r, details, nil
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
