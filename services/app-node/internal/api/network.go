package api

import (
	"context"
	"encoding/base64"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/trust"
)

// Model is a model that a Managed Inference Job can serve.
type Model struct {
	ID          string      `json:"id"`
	Name        string      `json:"name"`
	Runtime     string      `json:"runtime"`
	Description string      `json:"description"`
	Recommended Recommended `json:"recommended"`
}

// Recommended is hardware that a model is known to run on; empty and 0 for none.
type Recommended struct {
	GPUModel string `json:"gpu_model"`
	GPUCount int    `json:"gpu_count"`
}

// Image is a base image that a job can name.
type Image struct {
	Name        string `json:"name"`
	Reference   string `json:"reference"`
	DefaultUser string `json:"default_user"`
	Description string `json:"description"`
}

type modelsOutput struct {
	Body struct {
		Models []Model `json:"models"`
	}
}

func (s *Server) listModels(ctx context.Context, _ *struct{}) (*modelsOutput, error) {
	all, err := s.Catalogue.List(ctx)
	out := &modelsOutput{}
	out.Body.Models = []Model{}
	for _, m := range all.Models {
		out.Body.Models = append(out.Body.Models, Model{ID: m.ID, Name: m.Name, Runtime: m.Runtime, Description: m.Description,
			Recommended: Recommended{GPUModel: m.GPUModel, GPUCount: m.GPUCount}})
	}
	return out, err
}

type imagesOutput struct {
	Body struct {
		Images []Image `json:"images"`
	}
}

func (s *Server) listImages(ctx context.Context, _ *struct{}) (*imagesOutput, error) {
	all, err := s.Catalogue.List(ctx)
	out := &imagesOutput{}
	out.Body.Images = []Image{}
	for _, i := range all.Images {
		out.Body.Images = append(out.Body.Images, Image(i))
	}
	return out, err
}

// Bootstrap is one way into the network.
type Bootstrap struct {
	Key       string   `json:"key"`
	Addresses []string `json:"addresses"`
}

type networkOutput struct {
	Body struct {
		NetworkID   string      `json:"network_id" doc:"32 hex digits"`
		Name        string      `json:"name"`
		RootKeys    []string    `json:"root_keys"`
		Bootstraps  []Bootstrap `json:"bootstraps"`
		Genesis     string      `json:"genesis" doc:"Base64 of the signed envelope"`
		Roster      string      `json:"roster" doc:"Base64 of the signed envelope"`
		NetworkInfo string      `json:"network_info" doc:"Base64 of the signed envelope"`
	}
}

func (s *Server) getNetwork(context.Context, *struct{}) (*networkOutput, error) {
	if s.Network == nil {
		return nil, fault.New(fault.Unavailable, "this app-node belongs to no network yet")
	}
	out := &networkOutput{}
	b := &out.Body
	b.NetworkID, b.RootKeys, b.Bootstraps = s.Network.ID().String(), []string{}, []Bootstrap{}
	if envelope := s.Network.Genesis(); len(envelope) > 0 {
		genesis, err := trust.OpenGenesis(envelope)
		if err != nil {
			return nil, fault.Wrap(fault.Internal, err, "read the own genesis record")
		}
		b.Name, b.RootKeys = genesis.GetName(), texts(genesis.GetRootKeys())
	}
	if info := s.Network.Info(); info != nil {
		if keys := info.GetRootKeys(); len(keys) > 0 {
			b.RootKeys = keys
		}
		for _, boot := range info.GetBootstraps() {
			b.Bootstraps = append(b.Bootstraps, Bootstrap{Key: boot.GetKey(), Addresses: texts(boot.GetAddresses())})
		}
	}
	encode := base64.StdEncoding.EncodeToString
	b.Genesis, b.Roster, b.NetworkInfo = encode(s.Network.Genesis()), encode(s.Network.RosterEnvelope()), encode(s.Network.InfoEnvelope())
	return out, nil
}

// Warning is a health warning of a daemon.
type Warning struct {
	Daemon   string     `json:"daemon" doc:"Its name in the roster"`
	Code     string     `json:"code"`
	Severity string     `json:"severity" enum:"info,warning,error"`
	Text     string     `json:"text"`
	Remedy   string     `json:"remedy" doc:"What to do"`
	Since    *time.Time `json:"since,omitempty"`
}

type healthOutput struct {
	Body struct {
		Status   string    `json:"status" enum:"ok,warning,error" doc:"The worst of the warnings"`
		Warnings []Warning `json:"warnings"`
	}
}

func (s *Server) health(ctx context.Context, _ *struct{}) (*healthOutput, error) {
	health, err := s.Fleet.Health(ctx)
	if err != nil {
		return nil, err
	}
	out := &healthOutput{}
	out.Body.Status, out.Body.Warnings = health.Status, []Warning{}
	for _, w := range health.Warnings {
		out.Body.Warnings = append(out.Body.Warnings, Warning{Daemon: w.Daemon, Code: w.GetCode(), Severity: w.GetSeverity(), Text: w.GetText(),
			Remedy: w.GetRemedy(), Since: stamp(w.GetSince())})
	}
	return out, nil
}
