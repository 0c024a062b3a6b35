package rack

import (
	"time"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// mostVolumes bounds the volumes of one report.
const mostVolumes = 20000

// Volume is the worker's word on a volume, nil when the report does not list it.
func (v View) Volume(id string) *workerv1.VolumeStatus { return v.volumes[id] }

// NewView is a view as a report makes it.
func NewView(e *orkv1.RackEntry, connected bool, at time.Time, r *workerv1.WatchRackResponse) View {
	v := View{Entry: e, Connected: connected, Since: at, ReportedAt: at, Report: r}
	v.index()
	return v
}

// index makes the report's lists quick to look up.
func (v *View) index() {
	v.attempts = make(map[string]*workerv1.AttemptStatus, len(v.Report.Attempts))
	for _, a := range v.Report.Attempts {
		v.attempts[a.AttemptId] = a
	}
	v.disks = make(map[string]bool, len(v.Report.DiskJobIds))
	for _, id := range v.Report.DiskJobIds {
		v.disks[id] = true
	}
	v.volumes = make(map[string]*workerv1.VolumeStatus, len(v.Report.Volumes))
	for _, s := range v.Report.Volumes {
		v.volumes[s.VolumeId] = s
	}
}

// cleanVolumes bounds what a worker says of volumes.
func cleanVolumes(all []*workerv1.VolumeStatus) []*workerv1.VolumeStatus {
	for _, s := range all {
		s.VolumeId, s.Message, s.StorageClass = text(s.VolumeId), text(s.Message), text(s.StorageClass)
	}
	return all
}

// Text keeps a worker's words short and on one line.
func Text(s string) string { return text(s) }
