package app

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

// applyVolume has the worker make a volume and gives its refusal.
func (w *worker) applyVolume(req *workerv1.ApplyVolumeRequest) string {
	w.t.Helper()
	refusal := ""
	w.insist("apply "+req.VolumeId, func(ctx context.Context) error {
		res, err := w.Server.ApplyVolume(ctx, req)
		refusal = res.GetRefusal()
		return err
	})
	return refusal
}

// volume is the newest report's word on a volume, nil when it lists none.
func (w *worker) volume(id string) *workerv1.VolumeStatus {
	r, _ := w.Hub.Latest()
	for _, v := range r.GetVolumes() {
		if v.VolumeId == id {
			return v
		}
	}
	return nil
}

func (w *worker) usable(id string) {
	w.t.Helper()
	eventually(w.t, id+" is usable", func() string {
		if v := w.volume(id); !v.GetUsable() || v.Deleting || v.Failed || v.StorageClass != "simulated" {
			return fmt.Sprint(v)
		}
		return ""
	})
}

// onVolume is what machines wrote to a volume.
func (d *devcluster) onVolume(t *testing.T, id string) (uid, log string) {
	t.Helper()
	pvc, err := d.admin.Core.PersistentVolumeClaims(namespace).Get(t.Context(), id, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	uid = string(pvc.UID)
	found, err := filepath.Glob(filepath.Join(d.dir, "cluster", "disks", uid, "log"))
	if err != nil || len(found) != 1 {
		return uid, ""
	}
	raw, err := os.ReadFile(found[0])
	if err != nil {
		t.Fatal(err)
	}
	return uid, string(raw)
}

// attached asks for a machine with a volume.
func attached(req *workerv1.ApplyAttemptRequest, volume string, readOnly bool) *workerv1.ApplyAttemptRequest {
	req.Volumes = []*orkv1.AttachedVolume{{Id: volume, Name: "data", ReadOnly: readOnly, Path: "/volumes/data"}}
	return req
}

func TestAVolumeOutlivesItsJobAndServesTheNext(t *testing.T) {
	t.Parallel()
	d := start(t)
	fast := func(s *Setup) { s.Config.Deadlines.Orphan = time.Second } // the sweep runs all the time
	w := begin(t, d, "volume", fast).serves()
	volume := id(t, "v")
	req := &workerv1.ApplyVolumeRequest{VolumeId: volume, Name: "data", ProjectId: "p-1", SizeGib: 7}
	for range 2 { // asked again: the same one
		if why := w.applyVolume(req); why != "" {
			t.Fatal(why)
		}
	}
	w.usable(volume)
	if why := w.applyVolume(&workerv1.ApplyVolumeRequest{VolumeId: id(t, "v"), Name: "x", SizeGib: 1, StorageClass: "fast"}); !strings.Contains(why, `no storage class "fast"`) || !strings.Contains(why, "simulated") {
		t.Errorf("no such class: %q", why)
	}
	if why := w.applyVolume(&workerv1.ApplyVolumeRequest{VolumeId: id(t, "v"), Name: "x", SizeGib: 1, Shared: true}); !strings.Contains(why, "simulated cannot be shared") || !strings.Contains(why, "ReadWriteOnce") {
		t.Errorf("not to be shared: %q", why)
	}

	first, attempt := id(t, "j"), id(t, "a")
	w.claim(attached(request("volume", first, attempt, 1), volume, false))
	st := w.until(attempt, up1)
	vmi, err := d.admin.KubeVirt.VirtualMachineInstances(namespace).Get(t.Context(), attempt+"-n0", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if disk := vmi.Spec.Domain.Devices.Disks[3]; disk.Serial != "data" || disk.Disk.ReadOnly || vmi.Spec.Volumes[3].DataVolume.Name != volume {
		t.Errorf("disk %v of %v", disk, vmi.Spec.Volumes[3])
	}
	if graph := fmt.Sprint(st.Nodes[0].Graph); !strings.Contains(graph, volume) {
		t.Errorf("the graph does not show it: %s", graph)
	}
	eventually(t, "the machine wrote to the volume", func() string {
		if _, log := d.onVolume(t, volume); log != attempt+"\n" {
			return log
		}
		return ""
	})
	uid, _ := d.onVolume(t, volume)
	second := id(t, "j")
	if res := w.apply(attached(request("volume", second, id(t, "b"), 1), volume, true)); res.Claimed || !strings.Contains(res.Message, "still used by attempt "+attempt) {
		t.Errorf("two machines at once: %v", res)
	}
	if _, err := w.Server.DeleteVolume(t.Context(), &workerv1.DeleteVolumeRequest{VolumeId: volume}); fault.KindOf(err) != fault.FailedPrecondition || !strings.Contains(err.Error(), attempt) {
		t.Errorf("deleted under a machine: %v", err)
	}

	// The job goes with all that it had; the volume stays, over a restart as well.
	w.remove(attempt)
	w.gone(attempt)
	w.insist("delete the disks", deleteDisks(w, first))
	eventually(t, "nothing is left of the job", func() string { return strings.Join(d.left(t, label.Job+"="+first), ", ") })
	w.end()
	w = begin(t, d, "volume", fast).serves()
	w.usable(volume)
	time.Sleep(3 * time.Second) // for several sweeps
	if is, log := d.onVolume(t, volume); is != uid || log != attempt+"\n" {
		t.Fatalf("volume %s with %q, was %s", is, log, uid)
	}
	held, err := w.Server.ListHoldings(t.Context(), &workerv1.ListHoldingsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	kinds := ""
	for _, h := range held.Holdings {
		if h.VolumeId == volume {
			kinds += " " + h.Kind
		}
	}
	if kinds != " DataVolume PersistentVolumeClaim" {
		t.Errorf("listed as%s", kinds)
	}

	// The next job reads what the first one wrote.
	next := id(t, "a")
	w.claim(attached(request("volume", second, next, 1), volume, true))
	w.until(next, up1)
	if vmi, err = d.admin.KubeVirt.VirtualMachineInstances(namespace).Get(t.Context(), next+"-n0", metav1.GetOptions{}); err != nil || !vmi.Spec.Domain.Devices.Disks[3].Disk.ReadOnly {
		t.Errorf("not read-only: %v, %v", vmi.Spec.Domain.Devices.Disks, err)
	}
	eventually(t, "the agent runs", func() string {
		if !d.ran(next) {
			return "no trace of it"
		}
		return ""
	})
	if _, log := d.onVolume(t, volume); log != attempt+"\n" {
		t.Errorf("on the volume: %q", log)
	}
	w.remove(next)
	w.gone(next)

	for range 2 { // deleting what is absent is no error
		w.insist("delete the volume", func(ctx context.Context) error {
			_, err := w.Server.DeleteVolume(ctx, &workerv1.DeleteVolumeRequest{VolumeId: volume})
			return err
		})
		eventually(t, "the volume is in no report", func() string {
			if v := w.volume(volume); v != nil {
				return v.String()
			}
			return ""
		})
	}
	eventually(t, "nothing is left of the volume", func() string {
		left := d.left(t, label.Volume+"="+volume)
		found, err := filepath.Glob(filepath.Join(d.dir, "cluster", "disks", uid))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(append(left, found...), ", ")
	})

	// One whose DataVolume was taken from over its claim can be removed, too.
	bare := id(t, "v")
	if why := w.applyVolume(&workerv1.ApplyVolumeRequest{VolumeId: bare, Name: "bare", SizeGib: 1}); why != "" {
		t.Fatal(why)
	}
	w.usable(bare)
	orphan := metav1.DeletePropagationOrphan
	if err := d.admin.CDI.DataVolumes(namespace).Delete(t.Context(), bare, metav1.DeleteOptions{PropagationPolicy: &orphan}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is seen without its DataVolume", func() string {
		if v := w.volume(bare); v.GetUsable() || !strings.Contains(v.GetMessage(), "its DataVolume was removed") {
			return fmt.Sprint(v)
		}
		return ""
	})
	w.insist("delete it", func(ctx context.Context) error {
		_, err := w.Server.DeleteVolume(ctx, &workerv1.DeleteVolumeRequest{VolumeId: bare})
		return err
	})
	eventually(t, "nothing is left of it", func() string { return strings.Join(d.left(t, label.Volume+"="+bare), ", ") })

	// An attempt that names it now fails in words and makes no machine.
	late := id(t, "a")
	w.claim(attached(request("volume", second, late, 1), volume, false))
	if st := w.until(late, failed1); st.Reason != orkv1.Reason_REASON_CLUSTER_REFUSED || !strings.Contains(st.Message, "volume data ("+volume+")") || st.Nodes[0].VmiUid != "" {
		t.Errorf("without its volume: %v", st)
	}
	w.remove(late)
	w.gone(late)
	w.insist("delete the disks", deleteDisks(w, second))
}
