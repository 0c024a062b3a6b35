package api

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// RackEntry is the operator's entry of a rack.
type RackEntry struct {
	ID            string   `json:"id"`
	Location      string   `json:"location"`
	Key           string   `json:"key" doc:"The worker's key; empty where it was not asked for"`
	AllowedModels []string `json:"allowed_models" doc:"Empty allows every model"`
	MaximumGPUs   uint32   `json:"maximum_gpus" doc:"0 for no bound"`
	BoardCounts   []uint32 `json:"board_gpu_counts" doc:"GPUs that a VM may take of an NVSwitch board; empty for 1 or all"`
	Cordoned      bool     `json:"cordoned"`
	Type          string   `json:"type" doc:"What kind of worker it has"`
	// Drain fields are null while the rack is not drained.
	DrainSince    *time.Time `json:"drain_since"`
	DrainDeadline *time.Time `json:"drain_deadline" doc:"What runs there is stopped then"`
}

// Rack is an entry with its worker's report.
type Rack struct {
	RackEntry
	Connected     bool       `json:"connected"`
	LastSeenAt    *time.Time `json:"last_seen_at,omitempty"`
	Simulated     bool       `json:"simulated"`
	Message       string     `json:"message" doc:"Why nothing is offered, if so"`
	WorkerVersion string     `json:"worker_version"`
	Nodes         []RackNode `json:"nodes"`
}

// RackNode is one machine of a rack.
type RackNode struct {
	Name             string    `json:"name"`
	Schedulable      bool      `json:"schedulable"`
	Message          string    `json:"message"`
	FreeCPUCores     uint32    `json:"free_cpu_cores"`
	FreeMemoryBytes  uint64    `json:"free_memory_bytes"`
	TotalCPUCores    uint32    `json:"total_cpu_cores"`
	TotalMemoryBytes uint64    `json:"total_memory_bytes"`
	GPUs             []NodeGPU `json:"gpus"`
}

// NodeGPU counts GPUs of one model on one node.
type NodeGPU struct {
	Model     string `json:"model"`
	Total     uint32 `json:"total"`
	Healthy   uint32 `json:"healthy"`
	Held      uint32 `json:"held"`
	Offerable uint32 `json:"offerable"`
	Message   string `json:"message"`
	// Quarantine is shown to administrators as /quarantines has it.
	Quarantine string            `json:"quarantine" doc:"Why these are left out of placement, if so"`
	Holders    map[string]uint32 `json:"holders" doc:"Attempts that hold some; only administrators see them"`
}

// Node is a machine with its rack.
type Node struct {
	RackID   string `json:"rack_id"`
	Location string `json:"location"`
	RackNode
}

func entry(e *orkv1.RackEntry) RackEntry {
	return RackEntry{ID: e.GetId(), Location: e.GetLocation(), Key: e.GetKey(), AllowedModels: texts(e.GetAllowedModels()),
		MaximumGPUs: e.GetMaximumGpus(), BoardCounts: append([]uint32{}, e.GetBoardGpuCounts()...), Cordoned: e.GetCordoned(), Type: e.GetType(), DrainSince: stamp(e.GetDrainSince()), DrainDeadline: stamp(e.GetDrainDeadline())}
}

// racks lists every rack as the caller may see it: whose attempts hold GPUs is not
// for everybody.
func (s *Server) racks(ctx context.Context, request *orkv1.ListRacksRequest) ([]Rack, error) {
	all, err := s.Ork.ListRacks(ctx, request)
	if err != nil {
		return nil, err
	}
	admin := caller(ctx).User.Administrator
	racks := []Rack{}
	for _, r := range all {
		rack := Rack{RackEntry: entry(r.GetEntry()), Connected: r.GetConnected(), LastSeenAt: stamp(r.GetLastSeenAt()), Simulated: r.GetSimulated(),
			Message: r.GetMessage(), WorkerVersion: r.GetWorkerVersion(), Nodes: []RackNode{}}
		for _, n := range r.GetNodes() {
			node := RackNode{Name: n.GetName(), Schedulable: n.GetSchedulable(), Message: n.GetMessage(), FreeCPUCores: n.GetFreeCpuCores(),
				FreeMemoryBytes: n.GetFreeMemoryBytes(), TotalCPUCores: n.GetTotalCpuCores(), TotalMemoryBytes: n.GetTotalMemoryBytes(), GPUs: []NodeGPU{}}
			for _, g := range n.GetGpus() {
				gpu := NodeGPU{Model: g.GetModel(), Total: g.GetTotal(), Healthy: g.GetHealthy(), Held: g.GetHeld(), Offerable: g.GetOfferable(),
					Message: g.GetMessage(), Quarantine: g.GetQuarantine(), Holders: map[string]uint32{}}
				if admin && g.GetHolders() != nil {
					gpu.Holders = g.GetHolders()
				}
				node.GPUs = append(node.GPUs, gpu)
			}
			rack.Nodes = append(rack.Nodes, node)
		}
		racks = append(racks, rack)
	}
	slices.SortStableFunc(racks, func(a, b Rack) int { return cmp.Compare(a.ID, b.ID) })
	return racks, nil
}

type racksOutput struct {
	Body struct {
		Racks []Rack `json:"racks"`
	}
}

type listRacksInput struct {
	Location string `query:"location" maxLength:"32"`
	Type     string `query:"type" maxLength:"40" doc:"Racks whose type begins so"`
	Keys     bool   `query:"keys" doc:"With the workers' keys; for administrators"`
}

func (s *Server) listRacks(ctx context.Context, in *listRacksInput) (*racksOutput, error) {
	if in.Keys && !caller(ctx).User.Administrator {
		return nil, fault.New(fault.Denied, "workers' keys are shown to administrators only; leave keys out")
	}
	racks, err := s.racks(ctx, &orkv1.ListRacksRequest{Location: in.Location, TypePrefix: in.Type, Keys: in.Keys})
	out := &racksOutput{}
	out.Body.Racks = racks
	return out, err
}

type nodesOutput struct {
	Body struct {
		Nodes []Node `json:"nodes"`
	}
}

func (s *Server) listNodes(ctx context.Context, _ *struct{}) (*nodesOutput, error) {
	racks, err := s.racks(ctx, &orkv1.ListRacksRequest{})
	out := &nodesOutput{}
	out.Body.Nodes = []Node{}
	for _, r := range racks {
		for _, n := range r.Nodes {
			out.Body.Nodes = append(out.Body.Nodes, Node{RackID: r.ID, Location: r.Location, RackNode: n})
		}
	}
	return out, err
}

// Location is a place that has a rack.
type Location struct {
	Code string `json:"code"`
	Name string `json:"name"`
}

type locationsOutput struct {
	Body struct {
		Locations []Location `json:"locations"`
	}
}

func (s *Server) listLocations(ctx context.Context, _ *struct{}) (*locationsOutput, error) {
	racks, err := s.Ork.Racks(ctx)
	if err != nil {
		return nil, err
	}
	named, err := s.Catalogue.List(ctx)
	if err != nil {
		return nil, err
	}
	names := map[string]string{}
	for _, r := range racks {
		code := r.GetEntry().GetLocation()
		names[code] = strings.ToUpper(code)
	}
	for _, l := range named.Locations {
		if names[l.Code] != "" {
			names[l.Code] = l.Name
		}
	}
	out := &locationsOutput{}
	out.Body.Locations = []Location{}
	for code, name := range names {
		out.Body.Locations = append(out.Body.Locations, Location{Code: code, Name: name})
	}
	slices.SortFunc(out.Body.Locations, func(a, b Location) int { return cmp.Compare(a.Code, b.Code) })
	return out, nil
}

// RackPath names a rack to be made.
type RackPath struct {
	ID string `path:"id" maxLength:"40" pattern:"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$" doc:"A DNS label"`
}

type putRackInput struct {
	RackPath
	Body struct {
		Location      string   `json:"location" maxLength:"32"`
		Key           string   `json:"key" maxLength:"256" doc:"The worker's peer id or 64 hex digits"`
		AllowedModels []string `json:"allowed_models,omitempty" maxItems:"256"`
		MaximumGPUs   uint32   `json:"maximum_gpus,omitempty" maximum:"4294967295"`
		BoardCounts   []uint32 `json:"board_gpu_counts,omitempty" maxItems:"16" doc:"GPUs that a VM may take of an NVSwitch board, as its partitions are known, ascending; empty for 1 or all"`
		Type          string   `json:"type,omitempty" maxLength:"40" doc:"A word like server-k8s-nvidia, which is meant when it is left out"`
		Cordoned      *bool    `json:"cordoned,omitempty" doc:"Stays as it is when left out"`
	}
}

type rackEntryOutput struct {
	Body RackEntry
}

func (s *Server) putRack(ctx context.Context, in *putRackInput) (*rackEntryOutput, error) {
	target(ctx, in.ID)
	key, err := identity.ParseID(in.Body.Key)
	if err != nil {
		return nil, fault.New(fault.Invalid, "the key is not valid").
			With(fault.Detail{Field: "key", Rule: "must be a peer id or 64 hex digits of an ed25519 public key"})
	}
	wanted := &orkv1.RackEntry{Id: in.ID, Location: strings.ToLower(in.Body.Location), Key: key.String(),
		AllowedModels: in.Body.AllowedModels, MaximumGpus: in.Body.MaximumGPUs, BoardGpuCounts: in.Body.BoardCounts, Type: in.Body.Type}
	if in.Body.Cordoned != nil {
		wanted.Cordoned = *in.Body.Cordoned
	} else {
		racks, err := s.Ork.Racks(ctx)
		if err != nil {
			return nil, err
		}
		for _, r := range racks {
			if r.GetEntry().GetId() == in.ID {
				wanted.Cordoned = r.GetEntry().GetCordoned()
			}
		}
	}
	made, err := s.Ork.PutRack(ctx, wanted)
	if err != nil {
		return nil, err
	}
	return &rackEntryOutput{Body: entry(made)}, nil
}

// RackOf is the path of a rack that exists, whatever ids are allowed today.
type RackOf struct {
	ID string `path:"id" maxLength:"64"`
}

type cordonInput struct {
	RackOf
	Body struct {
		Cordoned bool `json:"cordoned"`
	}
}

func (s *Server) cordonRack(ctx context.Context, in *cordonInput) (*rackEntryOutput, error) {
	target(ctx, in.ID)
	made, err := s.Ork.CordonRack(ctx, in.ID, in.Body.Cordoned)
	if err != nil {
		return nil, err
	}
	return &rackEntryOutput{Body: entry(made)}, nil
}
