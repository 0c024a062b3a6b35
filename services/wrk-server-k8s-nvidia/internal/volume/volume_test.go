package volume

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

const wantVolume = `
metadata:
  name: v-1
  annotations: {cosmicac.dev/volume-name: data}
  labels: {app.kubernetes.io/managed-by: wrk-server-k8s-nvidia, cosmicac.dev/network: "00ff", cosmicac.dev/rack: us, cosmicac.dev/volume: v-1, cosmicac.dev/project: p-1}
spec:
  source: {blank: {}}
  storage: {accessModes: [ReadWriteOnce], volumeMode: Filesystem, storageClassName: fast, resources: {requests: {storage: 20Gi}}}
`

// TestAVolumeIsABlankDiskThatNothingTakesAlong compares what is made with the design.
func TestAVolumeIsABlankDiskThatNothingTakesAlong(t *testing.T) {
	t.Parallel()
	k := New(Options{Rack: "us", Network: "00ff", StorageClass: "fast", VolumeMode: "Filesystem"})
	var want cdi.DataVolume
	if err := yaml.UnmarshalStrict([]byte(wantVolume), &want); err != nil {
		t.Fatal(err)
	}
	req := &workerv1.ApplyVolumeRequest{VolumeId: "v-1", Name: "data", ProjectId: "p-1", SizeGib: 20}
	text := func(dv *cdi.DataVolume) string {
		raw, err := yaml.Marshal(dv)
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	if got := text(k.render(req)); got != text(&want) {
		t.Errorf("made\n%s\nwant\n%s", got, text(&want))
	}
	req.Shared, req.StorageClass = true, "nfs"
	if s := k.render(req).Spec.Storage; s.AccessModes[0] != corev1.ReadWriteMany || s.VolumeMode != nil || *s.StorageClassName != "nfs" {
		t.Errorf("shared: %v", s)
	}
}

// TestTheClustersWordOnAVolume judges what CDI may show.
func TestTheClustersWordOnAVolume(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		phase          cdi.DataVolumePhase
		reason         string
		usable, failed bool
		words          string
	}{
		"new":          {"", "", false, false, ""},
		"no space":     {cdi.Pending, "Pending", false, false, "Pending"},
		"waits for VM": {cdi.WaitForFirstConsumer, "", true, false, "first VM"},
		"populator":    {cdi.PendingPopulation, "", true, false, "first VM"},
		"there":        {cdi.Succeeded, "", true, false, ""},
		"claim lost":   {cdi.Failed, "ErrClaimLost", false, true, "ErrClaimLost"},
		"not valid":    {cdi.Pending, "ErrClaimNotValid", false, true, "ErrClaimNotValid"},
		"over quota":   {cdi.Pending, "ErrExceededQuota", false, false, "ErrExceededQuota"},
	} {
		dv := &cdi.DataVolume{ObjectMeta: metav1.ObjectMeta{Name: "v-1"}, Status: cdi.DataVolumeStatus{Phase: c.phase}}
		if c.reason != "" {
			dv.Status.Conditions = []cdi.DataVolumeCondition{{Type: cdi.DataVolumeBound, Status: corev1.ConditionFalse, Reason: c.reason}}
		}
		if s := judge(dv); s.Usable != c.usable || s.Failed != c.failed || !strings.Contains(s.Message, c.words) {
			t.Errorf("%s: %v", name, s)
		}
	}
}
