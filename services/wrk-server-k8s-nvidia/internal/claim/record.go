package claim

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/overlay"
)

// Keys of an anchor's data.
const (
	keyRecord  = "record"
	keyIntent  = "intent"
	keyOutcome = "outcome"
	keyVMIs    = "vmis"
)

// Record is what an anchor says of its attempt: enough to claim and to go on
// building after a restart. It holds no user text but the job's name, and no
// secret: environment, scripts, keys and join tokens are only in the Secret.
type Record struct {
	// Version of this form; 1.
	Version       int    `json:"version"`
	AttemptID     string `json:"attempt_id"`
	JobID         string `json:"job_id"`
	ReplicaID     string `json:"replica_id"`
	ProjectID     string `json:"project_id,omitempty"`
	ReplicaIndex  uint32 `json:"replica_index"`
	AttemptNumber uint32 `json:"attempt_number"`
	JobName       string `json:"job_name,omitempty"`
	// Model is the GPU's name as its nodes advertise it.
	Model string `json:"model,omitempty"`
	// Image is the docker:// reference that the root disk is made of.
	Image     string       `json:"image"`
	DiskBytes int64        `json:"disk_bytes"`
	Nodes     []RecordNode `json:"nodes"`
	SpecHash  string       `json:"spec_hash"`
	// Adapter is the resource of the InfiniBand adapters that join several nodes.
	Adapter string `json:"adapter,omitempty"`
	// Overlay is the network of its own that joins several nodes.
	Overlay *overlay.Plan `json:"overlay,omitempty"`
	// Ports are the declared public ports.
	Ports []RecordPort `json:"ports,omitempty"`
	// Volumes are disks that outlive the job.
	Volumes []RecordVolume `json:"volumes,omitempty"`
	// Reach are addresses outside the cluster that its agent must reach
	// whatever the network policy denies, as IP addresses.
	Reach []string `json:"reach,omitempty"`
	// Probe: nobody recorded it, and it goes as soon as nobody waits for it.
	Probe     bool      `json:"probe,omitempty"`
	ClaimedAt time.Time `json:"claimed_at"`
}

// RecordVolume is a volume of the record's one machine.
type RecordVolume struct {
	ID       string `json:"id"`
	Name     string `json:"name"`
	ReadOnly bool   `json:"read_only,omitempty"`
}

// RecordNode is one virtual machine of the record.
type RecordNode struct {
	Node        string `json:"node"`
	GPUs        int    `json:"gpus"`
	CPUCores    int64  `json:"cpu_cores"`
	MemoryBytes int64  `json:"memory_bytes"`
	// Adapters is how many InfiniBand adapters it gets.
	Adapters int `json:"adapters,omitempty"`
}

// RecordPort is a port of every machine of the record that anybody may reach.
type RecordPort struct {
	Name     string `json:"name"`
	Port     int32  `json:"port"`
	Protocol string `json:"protocol"` // tcp or udp
}

// Shape is the machine's size.
func (n RecordNode) Shape() capacity.Shape {
	return capacity.Shape{GPUs: n.GPUs, CPUCores: n.CPUCores, MemoryBytes: n.MemoryBytes}
}

func (r *Record) nodeNames() []string {
	out := make([]string, 0, len(r.Nodes))
	for _, n := range r.Nodes {
		out = append(out, n.Node)
	}
	return out
}

// Claim is what the record holds of its nodes.
func (r *Record) Claim() capacity.Claim {
	c := capacity.Claim{AttemptID: r.AttemptID}
	for _, n := range r.Nodes {
		c.Nodes = append(c.Nodes, capacity.ClaimNode{Node: n.Node, Model: r.Model, GPUs: n.GPUs, Need: n.Shape().Need(), Adapter: r.Adapter, Adapters: n.Adapters})
	}
	return c
}

// Intent is what was asked for before anything was done about it, so that a
// virtual machine's end can be told from a stop.
type Intent struct {
	Delete bool         `json:"delete"`
	Reason orkv1.Reason `json:"reason,omitempty"`
	At     time.Time    `json:"at"`
}

// Outcome is how an attempt ended or failed. It is written once.
type Outcome struct {
	Phase          workerv1.AttemptPhase `json:"phase"`
	Reason         orkv1.Reason          `json:"reason"`
	Message        string                `json:"message,omitempty"`
	GuestSucceeded bool                  `json:"guest_succeeded,omitempty"`
	At             time.Time             `json:"at"`
}

// Anchor is an attempt's ConfigMap, read.
type Anchor struct {
	UID     types.UID
	Record  *Record
	Intent  *Intent
	Outcome *Outcome
	// VMIs are the uids that were seen, by name: a machine in this list that is
	// absent was there once and is not made again.
	VMIs map[string]types.UID
	// Deleting is true once the cluster removes the anchor.
	Deleting bool
}

// ErrForeign says that a ConfigMap is none of our anchors.
var ErrForeign = errors.New("the ConfigMap holds no attempt record")

// ReadAnchor reads an anchor.
func ReadAnchor(cm *corev1.ConfigMap) (*Anchor, error) {
	raw, ok := cm.Data[keyRecord]
	if !ok {
		return nil, ErrForeign
	}
	a := &Anchor{UID: cm.UID, Record: &Record{}, Deleting: cm.DeletionTimestamp != nil}
	if err := json.Unmarshal([]byte(raw), a.Record); err != nil {
		return nil, fmt.Errorf("anchor %s: record: %w", cm.Name, err)
	}
	if a.Record.Version != 1 {
		return nil, fmt.Errorf("anchor %s: record version %d is not known here", cm.Name, a.Record.Version)
	}
	if a.Record.AttemptID != cm.Name {
		return nil, fmt.Errorf("anchor %s: its record is of attempt %q", cm.Name, a.Record.AttemptID)
	}
	for k, into := range map[string]any{keyIntent: &a.Intent, keyOutcome: &a.Outcome, keyVMIs: &a.VMIs} {
		if raw, ok := cm.Data[k]; ok {
			if err := json.Unmarshal([]byte(raw), into); err != nil {
				return nil, fmt.Errorf("anchor %s: %s: %w", cm.Name, k, err)
			}
		}
	}
	return a, nil
}

// Data is a new anchor's content.
func (r *Record) Data() (map[string]string, error) {
	raw, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	return map[string]string{keyRecord: string(raw)}, nil
}

// Patch is a merge patch of an anchor with exactly this uid. Nil parts stay as
// they are.
func Patch(uid types.UID, intent *Intent, outcome *Outcome, vmis map[string]types.UID) ([]byte, error) {
	data := map[string]string{}
	for k, v := range map[string]any{keyIntent: intent, keyOutcome: outcome, keyVMIs: vmis} {
		switch v := v.(type) {
		case *Intent:
			if v == nil {
				continue
			}
		case *Outcome:
			if v == nil {
				continue
			}
		case map[string]types.UID:
			if len(v) == 0 {
				continue
			}
		}
		raw, err := json.Marshal(v)
		if err != nil {
			return nil, err
		}
		data[k] = string(raw)
	}
	return json.Marshal(map[string]any{"metadata": map[string]any{"uid": uid}, "data": data})
}

// SpecHash tells whether two requests ask for the same. Seeds are left out: a
// repeated request may carry them anew.
func SpecHash(req *workerv1.ApplyAttemptRequest) (string, error) {
	bare := proto.CloneOf(req)
	for _, n := range bare.Nodes {
		n.Seed = nil
	}
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(bare)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:16]), nil
}
