package spec

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/id"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// Bounds of volumes.
const (
	// Volumes is how many volumes a job may have.
	Volumes = 8
	// VolumeGiB is the largest volume.
	VolumeGiB = DiskGiB
)

var (
	// The name is the serial of the volume's disk, of which a guest sees 20 bytes.
	volumeForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$`)
	classForm  = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$`)
)

const volumeRule = `is 1 to 20 of a-z, 0-9 and hyphens, with none at its ends, and does not begin with "cosmicac"`

// volumeName says whether a name may be a volume's. What looks like an id would be
// taken for one, and the agent's own disk is called cosmicac-agent.
func volumeName(name string) bool {
	return volumeForm.MatchString(name) && !id.Valid(id.Volume, name) && !strings.HasPrefix(name, "cosmicac")
}

// volumes checks what a job asks to have attached. That the volumes exist, and who
// has them, is known where they are recorded.
func (p *problems) volumes(s *orkv1.JobSpec) {
	switch {
	case len(s.Volumes) == 0:
		return
	case s.Kind == orkv1.JobKind_JOB_KIND_MANAGED_INFERENCE:
		p.add("volumes", "are for gpu_container only")
		return
	case len(s.Volumes) > Volumes:
		p.add("volumes", "has %d; at most %d are allowed", len(s.Volumes), Volumes)
		return
	}
	seen := map[string]int{}
	for i, m := range s.Volumes {
		field := fmt.Sprintf("volumes[%d].volume", i)
		if !volumeForm.MatchString(m.GetVolume()) {
			p.add(field, "is the name or the id of a volume")
		} else if first, twice := seen[m.GetVolume()]; twice {
			p.add(field, "is asked for twice, see volumes[%d]", first)
		}
		seen[m.GetVolume()] = i
	}
}

// Volume checks a volume to be created: every problem at once. Whether the rack's
// cluster has the class and the room is the cluster's to say.
func Volume(req *orkv1.CreateVolumeRequest) error {
	p := &problems{}
	if !volumeName(req.GetName()) {
		p.add("name", "%s", volumeRule)
	}
	if req.GetSizeGib() < 1 || req.GetSizeGib() > VolumeGiB {
		p.add("size_gib", "is %d; 1 to %d are allowed", req.GetSizeGib(), VolumeGiB)
	}
	if c := req.GetStorageClass(); c != "" && !classForm.MatchString(c) {
		p.add("storage_class", "is the name of a storage class, like fast-ssd")
	}
	if l := req.GetLocation(); l != "" && !locationForm.MatchString(l) {
		p.add("location", "is a code of 1 to 32 of a-z, 0-9 and -, in lower case, like us")
	}
	if r := req.GetRackId(); len(r) > 40 || !graphic(r) {
		p.add("rack_id", "is the id of a rack")
	}
	var details []fault.Detail
	details = append(details, p.list...)
	if err := Owner(req.GetOwner()); err != nil {
		details = append(details, fault.DetailsOf(err)...)
	}
	if len(details) == 0 {
		return nil
	}
	return fault.InvalidFields("the volume cannot be created", details)
}
