package api_test

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// keep takes a quota as ork does: the highest revision stays. The caller holds the lock.
func (f *fakeOrk) keep(q *orkv1.ProjectQuota) {
	if q != nil && f.quotas[q.GetProjectId()].GetRevision() < q.GetRevision() {
		f.quotas[q.GetProjectId()] = proto.Clone(q).(*orkv1.ProjectQuota)
	}
}

func (f *fakeOrk) PutQuotas(ctx context.Context, r *orkv1.PutQuotasRequest) (*orkv1.PutQuotasResponse, error) {
	if err := f.wait(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range r.GetQuotas() {
		f.keep(q)
	}
	return &orkv1.PutQuotasResponse{}, nil
}

func (f *fakeOrk) GetQuota(ctx context.Context, r *orkv1.GetQuotaRequest) (*orkv1.GetQuotaResponse, error) {
	if err := f.wait(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return &orkv1.GetQuotaResponse{Quota: f.quotas[r.GetProjectId()], HeldGpus: 3, HeldVolumeGib: 70}, nil
}

func (f *fakeOrk) quota(project string) *orkv1.ProjectQuota {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.quotas[project]
}

// GetAvailability sums what the racks report, with one that waits for each model.
func (f *fakeOrk) GetAvailability(_ context.Context, r *orkv1.GetAvailabilityRequest) (*orkv1.GetAvailabilityResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	sums := map[string]*orkv1.GpuAvailability{}
	for id, k := range f.racks {
		for _, n := range k.GetNodes() {
			for _, g := range n.GetGpus() {
				at := k.GetEntry().GetLocation() + "/" + g.GetModel()
				if (r.GetLocation() != "" && r.GetLocation() != k.GetEntry().GetLocation()) || (r.GetGpuModel() != "" && r.GetGpuModel() != g.GetModel()) {
					continue
				}
				if sums[at] == nil {
					sums[at] = &orkv1.GpuAvailability{Location: k.GetEntry().GetLocation(), GpuModel: g.GetModel(), Waiting: 1, WaitingGpus: 8,
						LongestWait: durationpb.New(90 * time.Second), Racks: []*orkv1.RackAvailability{{RackId: id}}}
				}
				s := sums[at]
				s.Total, s.Held = s.Total+g.GetTotal(), s.Held+g.GetHeld()
				if k.GetEntry().GetCordoned() {
					s.Racks[0].Reason, s.Racks[0].Message = orkv1.Reason_REASON_CORDONED, "rack "+id+" is cordoned"
				} else {
					s.Available, s.LargestVm = s.Available+g.GetOfferable(), max(s.LargestVm, g.GetOfferable())
				}
			}
		}
	}
	out := &orkv1.GetAvailabilityResponse{}
	for _, s := range sums {
		out.Gpus = append(out.Gpus, s)
	}
	slices.SortFunc(out.Gpus, func(a, b *orkv1.GpuAvailability) int { return cmp.Compare(a.GetLocation(), b.GetLocation()) })
	return out, nil
}

// eventually polls until the condition holds.
func (l *lab) eventually(what string, holds func() bool) {
	l.t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !holds(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			l.t.Fatalf("never seen: %s", what)
		}
	}
}

func (l *lab) project(token string) string {
	l.t.Helper()
	var me struct{ Projects []struct{ ID string } }
	l.ok(200, &me, "GET", "/api/v1/me", token, nil)
	return me.Projects[0].ID
}

func TestTheOrchestratorHearsOfEveryQuotaAlsoAfterItWasAway(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, token := l.user("ana@example.org")
	project := l.project(token)
	path := "/api/v1/projects/" + project + "/quota"
	type quota struct {
		Maximum  *uint32 `json:"maximum_gpus"`
		Held     *uint32 `json:"held_gpus"`
		Volumes  *uint64 `json:"maximum_volume_gib"`
		HeldGiB  *uint64 `json:"held_volume_gib"`
		Admitted bool
	}
	// A job brings its project's quota along.
	l.job(token, container("a"))
	if q := l.ork.quota(project); !q.GetUnlimited() || q.GetRevision() != 1 {
		t.Errorf("the first job told %v", q)
	}
	l.refused("denied", "PUT", path, token, map[string]any{"maximum_gpus": 1000})
	var set quota
	l.ok(200, &set, "PUT", path, l.admin, map[string]any{"maximum_gpus": 4})
	if q := l.ork.quota(project); set.Maximum == nil || *set.Maximum != 4 || !set.Admitted || q.GetUnlimited() || q.GetMaximumGpus() != 4 {
		t.Errorf("set %+v, told %v", set, q)
	}
	l.away.set(true)
	var later quota
	l.ok(200, &later, "PUT", path, l.admin, map[string]any{"maximum_gpus": 2})
	if later.Admitted || later.Held != nil {
		t.Errorf("while the orchestrator is away: %+v", later)
	}
	l.away.set(false)
	l.eventually("the quota is told once it is back", func() bool { return l.ork.quota(project).GetMaximumGpus() == 2 })
	var read quota
	l.ok(200, &read, "GET", path, token, nil)
	if read.Maximum == nil || *read.Maximum != 2 || read.Held == nil || *read.Held != 3 || !read.Admitted {
		t.Errorf("a member reads %+v", read)
	}
	l.ok(200, nil, "PUT", path, l.admin, map[string]any{"maximum_gpus": nil})
	if q := l.ork.quota(project); !q.GetUnlimited() {
		t.Errorf("no bound: %v", q)
	}
	// The bound of volumes stays when it is left out, and null takes it away.
	l.ok(200, nil, "PUT", path, l.admin, map[string]any{"maximum_gpus": 7, "maximum_volume_gib": 90})
	l.ok(200, &set, "PUT", path, l.admin, map[string]any{"maximum_gpus": 8})
	if q := l.ork.quota(project); set.Volumes == nil || *set.Volumes != 90 || set.HeldGiB == nil || *set.HeldGiB != 70 || q.GetMaximumGpus() != 8 || q.GetMaximumVolumeGib() != 90 {
		t.Errorf("set %+v, told %v", set, q)
	}
	l.refused("invalid", "PUT", path, l.admin, map[string]any{"maximum_gpus": 8, "maximum_volume_gib": -1})
	l.refused("denied", "PUT", path, token, map[string]any{"maximum_gpus": 8, "maximum_volume_gib": nil})
	l.ok(200, nil, "PUT", path, l.admin, map[string]any{"maximum_gpus": 8, "maximum_volume_gib": nil})
	if q := l.ork.quota(project); q.MaximumVolumeGib != nil {
		t.Errorf("no bound: %v", q)
	}
	_, stranger := l.user("bob@example.org")
	l.refused("not_found", "GET", path, stranger, nil)
	l.refused("not_found", "PUT", "/api/v1/projects/p-none/quota", l.admin, map[string]any{"maximum_gpus": 1})
	l.refused("invalid", "PUT", path, l.admin, map[string]any{})
}

func TestAPlanIsShownAndNothingIsRecorded(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, token := l.user("ana@example.org")
	l.ork.mu.Lock()
	l.ork.plan = &orkv1.JobPlan{Replicas: []*orkv1.ReplicaPlan{
		{RackId: "us-1", GpuModel: "H100", Nodes: []*orkv1.PlannedNode{{Name: "n1", GpuCount: 2}}},
		{Index: 1, Refusals: []*orkv1.PlanRefusal{{Reason: orkv1.Reason_REASON_OVER_QUOTA, Message: "2 too many"}, {RackId: "us-1", Reason: orkv1.Reason_REASON_BUSY}}},
	}}
	l.ork.mu.Unlock()
	r := l.ok(200, nil, "POST", "/api/v1/jobs/plan", token, container("a"))
	for _, want := range []string{`"fits":false`, `"rack_id":"us-1"`, `"name":"n1","gpu_count":2`, `"reason":"over_quota","message":"2 too many"`, `"reason":"busy"`} {
		if !bytes.Contains(r.body, []byte(want)) {
			t.Errorf("%s is not in %s", want, r.body)
		}
	}
	if r := l.ok(200, nil, "GET", "/api/v1/jobs", token, nil); !bytes.Contains(r.body, []byte(`"jobs":[]`)) {
		t.Errorf("a plan made a job: %s", r.body)
	}
	bad := container("a")
	bad["image"] = "Windows"
	l.refused("invalid", "POST", "/api/v1/jobs/plan", token, bad)
}

func TestPriorityAboveOthersIsForAdministrators(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, token := l.user("ana@example.org")
	body := func(priority int, placement string) map[string]any {
		b := container("a")
		b["priority"], b["placement"] = priority, placement
		return b
	}
	if p := l.refused("denied", "POST", "/api/v1/jobs", token, body(1, "pack")); !p.names("body.priority") {
		t.Errorf("%+v", p)
	}
	l.refused("denied", "POST", "/api/v1/jobs/plan", token, body(1, "pack"))
	if s := l.ork.spec(l.job(token, body(-7, "spread"))); s.GetPriority() != -7 || s.GetPlacement() != orkv1.Placement_PLACEMENT_SPREAD {
		t.Errorf("%v", s)
	}
	if s := l.ork.spec(l.job(l.admin, body(100, "pack"))); s.GetPriority() != 100 {
		t.Errorf("%v", s)
	}
	l.refused("invalid", "POST", "/api/v1/jobs", l.admin, body(101, "pack"))
	l.refused("invalid", "POST", "/api/v1/jobs", l.admin, body(0, "stack"))
}

func TestWhoWaitsIsShownBesideWhatIsFree(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, token := l.user("ana@example.org")
	for id, location := range map[string]string{"us-1": "us", "in-1": "in"} {
		l.ok(200, nil, "PUT", "/api/v1/racks/"+id, l.admin, map[string]any{"location": location, "key": l.key.Hex(), "board_gpu_counts": []int{1, 2, 4, 8}})
		l.ork.mu.Lock()
		if c := l.ork.racks[id].GetEntry().GetBoardGpuCounts(); !slices.Equal(c, []uint32{1, 2, 4, 8}) {
			t.Errorf("board counts %v", c)
		}
		l.ork.racks[id].Nodes = []*orkv1.RackNode{{Name: "n1", Gpus: []*orkv1.GpuCapacity{{Model: "H100", Total: 8, Offerable: 8}, {Model: "GH100_H100_SXM5_80GB", Total: 8}}}}
		l.ork.mu.Unlock()
	}
	l.ok(200, nil, "POST", "/api/v1/racks/us-1/cordon", l.admin, map[string]any{"cordoned": true})
	r := l.ok(200, nil, "GET", "/api/v1/gpus?location=us&model=H100", token, nil)
	if text := string(r.body); strings.Contains(text, `"location":"in"`) || !strings.Contains(text, `"longest_wait_seconds":90`) ||
		!strings.Contains(text, `"waiting_gpus":8`) || !strings.Contains(text, `"reason":"cordoned"`) {
		t.Errorf("%s", text)
	}
	for model, price := range map[string]string{"H100": "null", "GH100_H100_SXM5_80GB": "249"} {
		if r := l.ok(200, nil, "GET", "/api/v1/gpus?location=us&model="+model, token, nil); !strings.Contains(string(r.body), `"price_cents_per_gpu_hour":`+price) {
			t.Errorf("the price of %s: %s", model, r.body)
		}
	}
}
