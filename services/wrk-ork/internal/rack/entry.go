package rack

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/identity"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Rules of a rack entry that clients look for by name.
const (
	RuleID   = "ERR_RACK_ID_INVALID"
	RuleType = "ERR_RACK_TYPE_INVALID"
	RuleKey  = "ERR_RACK_INFO_RPC_PUBKEY_INVALID"
)

// DefaultType is the type of a rack whose entry names none.
const DefaultType = "server-k8s-nvidia"

var (
	idForm       = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`)
	locationForm = regexp.MustCompile(`^[a-z0-9-]{1,32}$`)
	typeForm     = regexp.MustCompile(`^[a-z][a-z0-9-]{0,39}$`)
	modelForm    = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$`)
)

// CheckEntry checks an operator's entry and returns it as it is recorded, with
// the key in one form. member looks a key up in the roster; a key that is
// there without the worker's role is refused, one that is not there yet is not:
// the entry may come first.
func CheckEntry(in *orkv1.RackEntry, member func(key string) (*meshv1.Member, bool)) (*orkv1.RackEntry, error) {
	if in == nil {
		return nil, fault.New(fault.Invalid, "the rack entry is missing")
	}
	e := proto.Clone(in).(*orkv1.RackEntry)
	var problems []fault.Detail
	add := func(field, rule string) { problems = append(problems, fault.Detail{Field: field, Rule: rule}) }
	if !idForm.MatchString(e.Id) {
		add("id", RuleID+": a DNS label: 1 to 40 of a-z, 0-9 and -, not at an end")
	}
	if e.Type == "" {
		e.Type = DefaultType
	}
	if !typeForm.MatchString(e.Type) {
		add("type", RuleType+": a word of 1 to 40 of a-z, 0-9 and -, like "+DefaultType)
	}
	if !locationForm.MatchString(e.Location) {
		add("location", "is a code of 1 to 32 of a-z, 0-9 and -, in lower case, like us")
	}
	if key, err := identity.ParseID(e.Key); err != nil {
		add("key", RuleKey+": the worker's public key, as 64 hex digits or a peer id")
	} else {
		e.Key = key.String()
		if m, ok := member(e.Key); ok && !hasRole(m, meshv1.Role_ROLE_WORKER) {
			add("key", RuleType+": the key belongs to "+m.Name+", which is not a worker")
		}
	}
	if len(e.AllowedModels) > 256 {
		add("allowed_models", "has more than 256 entries")
		e.AllowedModels = nil
	}
	for i, m := range e.AllowedModels {
		if !modelForm.MatchString(m) {
			add(fmt.Sprintf("allowed_models[%d]", i), "is a model code like GH100_H100_SXM5_80GB")
		}
	}
	if len(e.BoardGpuCounts) > 16 || !slices.IsSorted(e.BoardGpuCounts) || slices.Contains(e.BoardGpuCounts, 0) {
		add("board_gpu_counts", "is at most 16 numbers of GPUs in ascending order, like 1, 2, 4, 8; empty for 1 or all")
	}
	if len(problems) > 0 {
		return nil, fault.New(fault.Invalid, "the rack cannot be registered: %s %s", problems[0].Field, problems[0].Rule).With(problems...)
	}
	return e, nil
}

func hasRole(m *meshv1.Member, role meshv1.Role) bool {
	for _, r := range m.GetRoles() {
		if r == role {
			return true
		}
	}
	return false
}

// Quarantine is why a node's GPUs of a model are left out of placement; "" when
// they are not. For no model it is why the whole node is.
func (v View) Quarantine(node, model string) string {
	for _, q := range v.Quarantined {
		if q.NodeName == node && (q.GpuModel == "" || strings.EqualFold(q.GpuModel, model)) {
			return q.Message
		}
	}
	return ""
}

// withQuarantines are the nodes of a report with what is left out of placement;
// the report itself is shared and stays as it is.
func withQuarantines(nodes []*orkv1.RackNode, all []*orkv1.Quarantine) []*orkv1.RackNode {
	if len(all) == 0 {
		return nodes
	}
	v := View{Quarantined: all}
	out := make([]*orkv1.RackNode, len(nodes))
	for i, n := range nodes {
		out[i] = proto.Clone(n).(*orkv1.RackNode)
		for _, g := range out[i].Gpus {
			g.Quarantine = v.Quarantine(n.Name, g.Model)
		}
	}
	return out
}

// Wire is the rack as clients see it.
func (v View) Wire() *orkv1.Rack {
	w := &orkv1.Rack{Entry: v.Entry, Connected: v.Connected}
	if !v.ReportedAt.IsZero() {
		w.LastSeenAt = timestamppb.New(v.ReportedAt)
	}
	if r := v.Report; r != nil {
		w.Nodes, w.Simulated, w.WorkerVersion = withQuarantines(r.Nodes, v.Quarantined), r.Simulated, r.Version
	}
	switch {
	case !v.Connected && v.Report == nil:
		w.Message = "its worker has not reported yet"
		if v.Why != nil {
			w.Message += ": " + text(v.Why.Error())
		}
	case !v.Connected:
		w.Message = "its worker is not seen since " + v.ReportedAt.UTC().Format(time.RFC3339)
		if v.Why != nil {
			w.Message += ": " + text(v.Why.Error())
		}
	case v.Report.ClusterFault != "":
		w.Message = "its cluster cannot be asked: " + v.Report.ClusterFault
	case !v.Report.Synced:
		w.Message = "its worker still lists what the cluster holds"
	case v.Entry.DrainSince != nil:
		w.Message = "being drained: no new work is placed here, and what runs is stopped at " + v.Entry.DrainDeadline.AsTime().Format(time.RFC3339)
	case v.Entry.Cordoned:
		w.Message = "cordoned: no new work is placed here"
	}
	return w
}
