package app

import (
	"fmt"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// TestVolumesStayWithinTheirProjectsQuotaThroughARaceAndAKill asks for more than the
// quota at once, kills the orchestrator, and takes back and gives room.
func TestVolumesStayWithinTheirProjectsQuotaThroughARaceAndAKill(t *testing.T) {
	t.Parallel()
	l := startLab(t, true, []*orkv1.RackNode{gpuNode("n1", 8)})
	four := &orkv1.Owner{ProjectId: "p-four", UserId: "u-1"}
	ask := func(name string, gib uint32, q *orkv1.ProjectQuota) (*orkv1.Volume, error) {
		r, err := l.volumes().CreateVolume(l.ctx, &orkv1.CreateVolumeRequest{Name: name, Owner: four, SizeGib: gib, Location: "us", Quota: q})
		return r.GetVolume(), err
	}
	_, err := ask("early", 1, nil)
	turnedDown(t, err, fault.FailedPrecondition, "quota_unknown", "p-four", "app-node")
	_, err = ask("early", 1, &orkv1.ProjectQuota{ProjectId: "p-other", Revision: 1})
	turnedDown(t, err, fault.Invalid, "quota.project_id")

	bound := func(revision, gib uint64) *orkv1.ProjectQuota {
		return &orkv1.ProjectQuota{ProjectId: "p-four", Revision: revision, Unlimited: true, MaximumVolumeGib: proto.Uint64(gib)}
	}
	var mu sync.Mutex
	var made []string
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			v, err := ask(fmt.Sprintf("v%d", i), 10, bound(1, 40))
			if err != nil {
				turnedDown(t, err, fault.Exhausted, "over_quota: 10 GiB wanted", "hold 40 of the 40 GiB", "size_gib")
				return
			}
			mu.Lock()
			defer mu.Unlock()
			made = append(made, v.Name)
		})
	}
	wg.Wait()
	if len(made) != 4 {
		t.Fatalf("%d volumes of 10 GiB are within a quota of 40", len(made))
	}
	if again, err := ask(made[0], 10, nil); err != nil || again.Name != made[0] {
		t.Errorf("what is there is asked for again: %v", err)
	}
	held := func() *orkv1.GetQuotaResponse {
		var r *orkv1.GetQuotaResponse
		l.eventually("the quota is read", func() (ok bool) {
			var err error
			r, err = orkv1.NewQuotasClient(l.app.Client(l.orkKey.ID(), l.address)).GetQuota(l.ctx, &orkv1.GetQuotaRequest{ProjectId: "p-four"})
			return err == nil
		})
		return r
	}
	l.stop()
	l.startOrk()
	l.connected(true)
	if r := held(); r.HeldVolumeGib != 40 || r.Quota.GetMaximumVolumeGib() != 40 || r.Quota.MaximumVolumeGib == nil {
		t.Errorf("after the kill: %v", r)
	}
	_, err = ask("more", 1, nil)
	turnedDown(t, err, fault.Exhausted, "hold 40 of the 40 GiB of its quota")

	// One that is deleted gives its room back once nothing of it is left.
	list, err := l.volumes().ListVolumes(l.ctx, &orkv1.ListVolumesRequest{ProjectIds: []string{"p-four"}, Name: made[0]})
	if err != nil || len(list.Volumes) != 1 {
		t.Fatal(list, err)
	}
	if _, err := l.volumes().DeleteVolume(l.ctx, &orkv1.DeleteVolumeRequest{Id: list.Volumes[0].Id, Confirm: made[0]}); err != nil {
		t.Fatal(err)
	}
	l.volumeGone(list.Volumes[0].Id)
	_, err = ask("more", 11, nil)
	turnedDown(t, err, fault.Exhausted, "hold 30 of the 40 GiB", "ask for less")
	if _, err := ask("more", 10, nil); err != nil {
		t.Error(err)
	}
	// A lower quota takes nothing away, and none is no bound.
	_, err = ask("last", 1, bound(2, 5))
	turnedDown(t, err, fault.Exhausted, "hold 40 of the 5 GiB")
	if _, err := ask("last", 1, &orkv1.ProjectQuota{ProjectId: "p-four", Revision: 3, Unlimited: true}); err != nil || held().HeldVolumeGib != 41 {
		t.Error(err, held())
	}
}
