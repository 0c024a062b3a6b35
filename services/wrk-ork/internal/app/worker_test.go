package app

import (
	"context"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// fakeWorker is a rack's worker over a made-up cluster. Its switches are faults.
type fakeWorker struct {
	workerv1.UnimplementedRackServer
	t      *testing.T
	rackID string

	mu       sync.Mutex
	changed  chan struct{}
	sequence uint64
	synced   bool
	nodes    []*orkv1.RackNode
	attempts map[string]*workerv1.AttemptStatus
	plans    map[string]*workerv1.ApplyAttemptRequest
	disks    map[string]bool
	mostHeld uint32
	vmis     map[string]string // attempt id: uid of its VM

	refuse     int           // refuse that many proposals
	dropReply  int           // claim that many and fail the call
	holdDelete bool          // deletion goes nowhere
	slowDelete time.Duration // deletion takes that long
	boot       bool          // VMs come up by themselves
	unnamed    bool          // VMs have no uid yet
	fabric     bool          // InfiniBand and the overlay join its nodes

	volumes map[string]*workerv1.VolumeStatus
	applied map[string]int // by volume id: how often it was asked for
	pending bool           // volumes are not usable yet
	refusal string         // what the cluster says to new volumes

	reject     map[string]int // by node: so many pods are rejected after they were claimed
	rejections int
}

func newFakeWorker(t *testing.T, rackID string, nodes ...*orkv1.RackNode) *fakeWorker {
	return &fakeWorker{
		t: t, rackID: rackID, changed: make(chan struct{}), synced: true, nodes: nodes, boot: true,
		attempts: map[string]*workerv1.AttemptStatus{}, plans: map[string]*workerv1.ApplyAttemptRequest{},
		disks: map[string]bool{}, vmis: map[string]string{},
		volumes: map[string]*workerv1.VolumeStatus{}, applied: map[string]int{},
	}
}

const model = "GH100_H100_SXM5_80GB"

func gpuNode(name string, gpus uint32) *orkv1.RackNode {
	return &orkv1.RackNode{
		Name: name, Schedulable: true, TotalCpuCores: 256, FreeCpuCores: 256,
		TotalMemoryBytes: 2 << 40, FreeMemoryBytes: 2 << 40,
		Gpus: []*orkv1.GpuCapacity{{Model: model, Total: gpus, Healthy: gpus}},
	}
}

// change runs f on the cluster and tells the watcher.
func (w *fakeWorker) change(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
	close(w.changed)
	w.changed = make(chan struct{})
}

// held counts what attempts hold on a node; the caller holds the lock.
func (w *fakeWorker) held(node string) (sum uint32, holders map[string]uint32) {
	holders = map[string]uint32{}
	for id := range w.attempts {
		for _, n := range w.plans[id].GetNodes() {
			if n.NodeName == node {
				holders[id] += n.GpuCount
				sum += n.GpuCount
			}
		}
	}
	return sum, holders
}

func (w *fakeWorker) report() (*workerv1.WatchRackResponse, <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sequence++
	r := &workerv1.WatchRackResponse{RackId: w.rackID, Sequence: w.sequence, Synced: w.synced, Simulated: true, Version: "test", Fabric: w.fabric}
	if !w.synced {
		return r, w.changed
	}
	for _, n := range w.nodes {
		c := proto.Clone(n).(*orkv1.RackNode)
		held, holders := w.held(n.Name)
		c.Gpus[0].Held, c.Gpus[0].Holders = held, holders
		c.Gpus[0].Offerable = c.Gpus[0].Total - held
		r.Nodes = append(r.Nodes, c)
	}
	for _, id := range slices.Sorted(maps.Keys(w.attempts)) {
		r.Attempts = append(r.Attempts, proto.Clone(w.attempts[id]).(*workerv1.AttemptStatus))
	}
	r.DiskJobIds = slices.Sorted(maps.Keys(w.disks))
	for _, id := range slices.Sorted(maps.Keys(w.volumes)) {
		r.Volumes = append(r.Volumes, proto.Clone(w.volumes[id]).(*workerv1.VolumeStatus))
	}
	return r, w.changed
}

func (w *fakeWorker) WatchRack(_ *workerv1.WatchRackRequest, s workerv1.Rack_WatchRackServer) error {
	for {
		r, changed := w.report()
		if err := s.Send(r); err != nil {
			return err
		}
		again := time.NewTimer(300 * time.Millisecond)
		select {
		case <-s.Context().Done():
			again.Stop()
			return s.Context().Err()
		case <-changed:
		case <-again.C:
		}
		again.Stop()
	}
}

func (w *fakeWorker) ApplyAttempt(_ context.Context, req *workerv1.ApplyAttemptRequest) (*workerv1.ApplyAttemptResponse, error) {
	var resp *workerv1.ApplyAttemptResponse
	var err error
	w.change(func() {
		if w.attempts[req.AttemptId] != nil {
			resp = &workerv1.ApplyAttemptResponse{Claimed: true}
			return
		}
		if w.refuse > 0 {
			w.refuse--
			resp = &workerv1.ApplyAttemptResponse{Reason: orkv1.Reason_REASON_BUSY, Message: "another pod took the GPU"}
			return
		}
		for _, n := range req.Nodes {
			held, _ := w.held(n.NodeName)
			for _, have := range w.nodes {
				if have.Name == n.NodeName && held+n.GpuCount > have.Gpus[0].Total {
					resp = &workerv1.ApplyAttemptResponse{Reason: orkv1.Reason_REASON_BUSY, Message: "no GPU is free on " + n.NodeName}
					return
				}
			}
		}
		st := &workerv1.AttemptStatus{AttemptId: req.AttemptId, JobId: req.JobId, ReplicaId: req.ReplicaId, Phase: workerv1.AttemptPhase_ATTEMPT_PHASE_CREATING}
		for _, n := range req.Nodes {
			uid := "uid-" + req.AttemptId
			if w.unnamed {
				uid = ""
			}
			st.Nodes = append(st.Nodes, &orkv1.AttemptNode{NodeName: n.NodeName, GpuCount: n.GpuCount, VmiName: "vmi-" + req.AttemptId, VmiUid: uid})
		}
		if w.boot {
			st.Phase = workerv1.AttemptPhase_ATTEMPT_PHASE_UP
		}
		for _, n := range req.Nodes {
			if w.reject[n.NodeName] > 0 {
				w.reject[n.NodeName]--
				w.rejections++
				st.Phase, st.Reason = workerv1.AttemptPhase_ATTEMPT_PHASE_FAILED, orkv1.Reason_REASON_VM_FAILED
				st.Message = "the pod was rejected on node " + n.NodeName + ": UnexpectedAdmissionError: vfio: no such file"
				for _, have := range st.Nodes {
					if have.NodeName != n.NodeName {
						continue
					}
					have.Graph = []*orkv1.GraphNode{{Kind: "VirtualMachineInstance", Name: have.VmiName, State: "failed", Message: "UnexpectedAdmissionError"}}
				}
			}
		}
		w.attempts[req.AttemptId], w.plans[req.AttemptId] = st, req
		w.disks[req.JobId] = true
		w.vmis[req.AttemptId] = "uid-" + req.AttemptId
		var all uint32
		for _, n := range w.nodes {
			held, _ := w.held(n.Name)
			all += held
		}
		w.mostHeld = max(w.mostHeld, all)
		resp = &workerv1.ApplyAttemptResponse{Claimed: true}
		if w.dropReply > 0 {
			w.dropReply--
			resp, err = nil, fault.New(fault.Unavailable, "the reply was lost")
		}
	})
	return resp, err
}

func (w *fakeWorker) DeleteAttempt(_ context.Context, req *workerv1.DeleteAttemptRequest) (*workerv1.DeleteAttemptResponse, error) {
	w.change(func() {
		st := w.attempts[req.AttemptId]
		if st == nil {
			return
		}
		st.Phase = workerv1.AttemptPhase_ATTEMPT_PHASE_DELETING
		switch {
		case w.holdDelete:
		case w.slowDelete > 0:
			time.AfterFunc(w.slowDelete, func() { w.change(func() { delete(w.attempts, req.AttemptId) }) })
		default:
			delete(w.attempts, req.AttemptId)
		}
	})
	return &workerv1.DeleteAttemptResponse{}, nil
}

func (w *fakeWorker) DeleteJobDisks(_ context.Context, req *workerv1.DeleteJobDisksRequest) (*workerv1.DeleteJobDisksResponse, error) {
	var err error
	w.change(func() {
		for id, a := range w.attempts {
			if a.JobId == req.JobId {
				err = fault.New(fault.FailedPrecondition, "job %s still has attempt %s here", req.JobId, id)
				return
			}
		}
		delete(w.disks, req.JobId)
	})
	return &workerv1.DeleteJobDisksResponse{}, err
}

// plan waits for the proposal of an attempt.
func (w *fakeWorker) plan(attemptID string) *workerv1.ApplyAttemptRequest {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.plans[attemptID]
}

func (w *fakeWorker) phase(attemptID string, f func(*workerv1.AttemptStatus)) {
	w.change(func() {
		if st := w.attempts[attemptID]; st != nil {
			f(st)
		}
	})
}

// empty reports whether the cluster holds nothing.
func (w *fakeWorker) empty() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.attempts) == 0 && len(w.disks) == 0
}

// silence makes the nodes of an attempt unheard of, or heard of again.
func (w *fakeWorker) silence(attemptID string, silent bool) {
	w.change(func() {
		st := w.attempts[attemptID]
		st.UnreachableSince = nil
		if silent {
			st.UnreachableSince = timestamppb.Now()
		}
		for _, n := range w.nodes {
			for _, p := range w.plans[attemptID].Nodes {
				if n.Name == p.NodeName {
					n.Schedulable = !silent
				}
			}
		}
	})
}

func (w *fakeWorker) count() (attempts int, most uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.attempts), w.mostHeld
}
