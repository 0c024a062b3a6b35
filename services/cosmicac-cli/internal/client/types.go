package client

import "time"

// Job is a job as the API shows it; see the API's OpenAPI document.
type Job struct {
	ID                   string            `json:"id"`
	Kind                 string            `json:"kind"`
	Name                 string            `json:"name"`
	Tags                 []string          `json:"tags"`
	Location             string            `json:"location"`
	GPU                  GPU               `json:"gpu"`
	CPUCoresPerGPU       uint32            `json:"cpu_cores_per_gpu"`
	MemoryGiBPerGPU      uint32            `json:"memory_gib_per_gpu"`
	DiskGiB              uint32            `json:"disk_gib"`
	Image                string            `json:"image"`
	Model                string            `json:"model"`
	Runtime              string            `json:"runtime"`
	Replicas             uint32            `json:"replicas"`
	EngineArguments      []string          `json:"engine_arguments"`
	RequireAuthorization bool              `json:"require_authorization"`
	Environment          map[string]string `json:"environment"`
	MaxDurationSeconds   int64             `json:"max_duration_seconds"`
	CostLimitCents       uint64            `json:"cost_limit_cents"`
	IdleStopSeconds      int64             `json:"idle_stop_seconds"`
	CUDA                 string            `json:"cuda"`
	Ports                []Port            `json:"ports"`
	Volumes              []AttachedVolume  `json:"volumes"`
	Price                *uint64           `json:"price_cents_per_gpu_hour"`
	Currency             string            `json:"currency"`
	CostCents            uint64            `json:"cost_cents"`
	Revision             uint64            `json:"revision"`
	SpecRevision         uint64            `json:"spec_revision"`
	ProjectID            string            `json:"project_id"`
	UserID               string            `json:"user_id"`
	State                string            `json:"state"`
	Reason               string            `json:"reason"`
	Message              string            `json:"message"`
	Conditions           []Condition       `json:"conditions"`
	EndpointID           string            `json:"endpoint_id"`
	Simulated            bool              `json:"simulated"`
	CreatedAt            time.Time         `json:"created_at"`
	UpdatedAt            time.Time         `json:"updated_at"`
	ReplicaList          []Replica         `json:"replica_list"`
}

// GPU is a request for whole GPUs of one model.
type GPU struct {
	Model string `json:"model"`
	Count uint32 `json:"count"`
}

// Condition stands beside a job's state.
type Condition struct {
	Kind    string    `json:"kind"`
	Message string    `json:"message"`
	Since   time.Time `json:"since"`
}

// Replica is one replica of a job.
type Replica struct {
	ID       string    `json:"id"`
	Index    uint32    `json:"index"`
	State    string    `json:"state"`
	Reason   string    `json:"reason"`
	Message  string    `json:"message"`
	Attempts []Attempt `json:"attempts"`
}

// Attempt is one try of a replica.
type Attempt struct {
	ID           string        `json:"id"`
	Number       uint32        `json:"number"`
	State        string        `json:"state"`
	Reason       string        `json:"reason"`
	Message      string        `json:"message"`
	RackID       string        `json:"rack_id"`
	AgentKey     string        `json:"agent_key"`
	Gone         bool          `json:"gone"`
	SpecRevision uint64        `json:"spec_revision"`
	Nodes        []AttemptNode `json:"nodes"`
}

// AttemptNode is one VM of an attempt.
type AttemptNode struct {
	NodeName string      `json:"node_name"`
	GPUCount uint32      `json:"gpu_count"`
	VMIName  string      `json:"vmi_name"`
	VMIUID   string      `json:"vmi_uid"`
	Graph    []GraphNode `json:"graph"`
	Ports    []struct {
		Port
		Hosts      []string `json:"hosts"`
		PublicPort uint32   `json:"public_port"`
	} `json:"ports"`
}

// Port is a port of a job's VM that the outside may reach.
type Port struct {
	Port     uint32 `json:"port"`
	Protocol string `json:"protocol,omitempty"`
	Name     string `json:"name,omitempty"`
}

// AttachedVolume is a volume as a job has it.
type AttachedVolume struct {
	ID       string `json:"id"`
	Name     string `json:"name"`
	ReadOnly bool   `json:"read_only"`
	Path     string `json:"path"`
}

// Volume is a disk of a project in one rack that outlives jobs.
type Volume struct {
	ID           string `json:"id"`
	Name         string `json:"name"`
	ProjectID    string `json:"project_id"`
	UserID       string `json:"user_id"`
	RackID       string `json:"rack_id"`
	Location     string `json:"location"`
	SizeGiB      uint32 `json:"size_gib"`
	StorageClass string `json:"storage_class"`
	Shared       bool   `json:"shared"`
	State        string `json:"state"`
	Message      string `json:"message"`
	Attachments  []struct {
		JobID    string `json:"job_id"`
		JobName  string `json:"job_name"`
		JobState string `json:"job_state"`
		ReadOnly bool   `json:"read_only"`
	} `json:"attachments"`
	CreatedAt time.Time `json:"created_at"`
}

// Gateway is WireGuard into a job's VM.
type Gateway struct {
	JobID     string        `json:"job_id"`
	Open      bool          `json:"open"`
	Port      uint32        `json:"port"`
	Endpoints []string      `json:"endpoints"`
	PublicKey string        `json:"public_key"`
	Address   string        `json:"address"`
	MTU       uint32        `json:"mtu"`
	Simulated bool          `json:"simulated"`
	Peers     []GatewayPeer `json:"peers"`
}

// GatewayPeer is a key that is let in.
type GatewayPeer struct {
	Name          string    `json:"name"`
	PublicKey     string    `json:"public_key"`
	Address       string    `json:"address"`
	LastHandshake time.Time `json:"last_handshake"`
	ReceivedBytes uint64    `json:"received_bytes"`
	SentBytes     uint64    `json:"sent_bytes"`
	UserID        string    `json:"user_id"`
}

// GraphNode is one cluster object of an attempt.
type GraphNode struct {
	Kind    string `json:"kind"`
	Name    string `json:"name"`
	State   string `json:"state"`
	Message string `json:"message"`
}

// Condition is what stands beside the state under this kind, nil when it does not.
func (j *Job) Condition(kind string) *Condition {
	for i := range j.Conditions {
		if j.Conditions[i].Kind == kind {
			return &j.Conditions[i]
		}
	}
	return nil
}

// Ended says whether the job is in an end state.
func (j *Job) Ended() bool {
	switch j.State {
	case "stopped", "succeeded", "failed", "cancelled":
		return true
	}
	return false
}

// Grant lets this workstation reach one agent.
type Grant struct {
	Grant          string    `json:"grant"`
	AgentKey       string    `json:"agent_key"`
	AgentAddresses []string  `json:"agent_addresses"`
	SSHHostKey     string    `json:"ssh_host_key"`
	DefaultUser    string    `json:"default_user"`
	ExpiresAt      time.Time `json:"expires_at"`
}

// Network is what a client needs to join the mesh.
type Network struct {
	NetworkID   string      `json:"network_id"`
	Name        string      `json:"name"`
	RootKeys    []string    `json:"root_keys"`
	Bootstraps  []Bootstrap `json:"bootstraps"`
	Genesis     string      `json:"genesis"`
	Roster      string      `json:"roster"`
	NetworkInfo string      `json:"network_info"`
}

// Bootstrap is one mesh-bootstrap.
type Bootstrap struct {
	Key       string   `json:"key"`
	Addresses []string `json:"addresses"`
}

// Rack is a rack with its worker's report.
type Rack struct {
	ID            string    `json:"id"`
	Location      string    `json:"location"`
	Key           string    `json:"key"`
	Connected     bool      `json:"connected"`
	LastSeenAt    time.Time `json:"last_seen_at"`
	Cordoned      bool      `json:"cordoned"`
	Type          string    `json:"type"`
	Simulated     bool      `json:"simulated"`
	Message       string    `json:"message"`
	WorkerVersion string    `json:"worker_version"`
	Nodes         []Node    `json:"nodes"`
}

// Node is one machine of a rack.
type Node struct {
	Name            string    `json:"name"`
	RackID          string    `json:"rack_id,omitempty"`
	Location        string    `json:"location,omitempty"`
	Schedulable     bool      `json:"schedulable"`
	Message         string    `json:"message"`
	FreeCPUCores    uint32    `json:"free_cpu_cores"`
	FreeMemoryBytes uint64    `json:"free_memory_bytes"`
	GPUs            []NodeGPU `json:"gpus"`
}

// NodeGPU counts one model on one node.
type NodeGPU struct {
	Model     string `json:"model"`
	Total     uint32 `json:"total"`
	Healthy   uint32 `json:"healthy"`
	Held      uint32 `json:"held"`
	Offerable uint32 `json:"offerable"`
	Message   string `json:"message"`
	// Quarantine is why these are left out of placement, if so.
	Quarantine string            `json:"quarantine"`
	Holders    map[string]uint32 `json:"holders"`
}

// AvailableGPU is what one could get of a model in a location.
type AvailableGPU struct {
	Model                string `json:"model"`
	Location             string `json:"location"`
	Total                uint32 `json:"total"`
	Held                 uint32 `json:"held"`
	Offerable            uint32 `json:"offerable"`
	LargestNodeOfferable uint32 `json:"largest_node_offerable"`
	Racks                []struct {
		ID                   string `json:"id"`
		Offerable            uint32 `json:"offerable"`
		LargestNodeOfferable uint32 `json:"largest_node_offerable"`
		Reason               string `json:"reason"`
		Message              string `json:"message"`
	} `json:"racks"`
	Waiting            uint32 `json:"waiting"`
	WaitingGPUs        uint32 `json:"waiting_gpus"`
	LongestWaitSeconds int64  `json:"longest_wait_seconds"`
}

// Plan is what would become of a job now.
type Plan struct {
	Fits     bool   `json:"fits"`
	State    string `json:"state"`
	Reason   string `json:"reason"`
	Message  string `json:"message"`
	Replicas []struct {
		Index    uint32 `json:"index"`
		RackID   string `json:"rack_id"`
		GPUModel string `json:"gpu_model"`
		Nodes    []struct {
			Name     string `json:"name"`
			GPUCount uint32 `json:"gpu_count"`
		} `json:"nodes"`
		Refusals []struct {
			RackID  string `json:"rack_id"`
			Reason  string `json:"reason"`
			Message string `json:"message"`
		} `json:"refusals"`
	} `json:"replicas"`
}

// APIKey is an API key without its secret.
type APIKey struct {
	ID         string     `json:"id"`
	Name       string     `json:"name"`
	Status     string     `json:"status"`
	PublicID   string     `json:"public_id"`
	CreatedAt  time.Time  `json:"created_at"`
	UpdatedAt  time.Time  `json:"updated_at"`
	LastUsedAt *time.Time `json:"last_used_at"`
	ExpiresAt  *time.Time `json:"expires_at"`
}

// UsageBucket is one API key's usage in one span of time.
type UsageBucket struct {
	StartMS          int64  `json:"start_ms"`
	APIKeyID         string `json:"api_key_id"`
	Requests         uint64 `json:"requests"`
	PromptTokens     uint64 `json:"prompt_tokens"`
	CompletionTokens uint64 `json:"completion_tokens"`
	TotalTokens      uint64 `json:"total_tokens"`
}

// HistoryEvent is one transition of a job.
type HistoryEvent struct {
	Sequence  uint64    `json:"sequence"`
	Time      time.Time `json:"time"`
	State     string    `json:"state"`
	Reason    string    `json:"reason"`
	Message   string    `json:"message"`
	Actor     string    `json:"actor"`
	AttemptID string    `json:"attempt_id"`
}

// ForgottenRack is what stays of a rack that was removed by force.
type ForgottenRack struct {
	ID          string             `json:"id"`
	Location    string             `json:"location"`
	ForgottenAt time.Time          `json:"forgotten_at"`
	Actor       string             `json:"actor"`
	Returned    bool               `json:"returned"`
	Attempts    []AbandonedAttempt `json:"attempts"`
	DiskJobIDs  []string           `json:"disk_job_ids"`
}

// AbandonedAttempt may still run on such a rack.
type AbandonedAttempt struct {
	AttemptID string   `json:"attempt_id"`
	JobID     string   `json:"job_id"`
	JobName   string   `json:"job_name"`
	NodeNames []string `json:"node_names"`
	GPUCount  uint32   `json:"gpu_count"`
	Present   bool     `json:"present"`
}

// Quarantine is what is left out of placement, or suspect.
type Quarantine struct {
	RackID   string         `json:"rack_id"`
	NodeName string         `json:"node_name"`
	GPUModel string         `json:"gpu_model"`
	Active   bool           `json:"active"`
	Since    time.Time      `json:"since"`
	Actor    string         `json:"actor"`
	Message  string         `json:"message"`
	Evidence []StartFailure `json:"evidence"`
}

// StartFailure is an attempt that could not be started on a node.
type StartFailure struct {
	AttemptID string    `json:"attempt_id"`
	JobID     string    `json:"job_id"`
	Time      time.Time `json:"time"`
	Reason    string    `json:"reason"`
	Message   string    `json:"message"`
	GPUUUIDs  []string  `json:"gpu_uuids"`
}
