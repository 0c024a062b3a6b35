package record

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/id"
	"github.com/cosmicac/cosmicac/pkg/lexicon"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/spec"
)

// AttachVolume gives a job a volume from its next start on; giving it what it has
// changes nothing. Who else has the volume is decided in the same transaction: of
// two jobs that ask at once one gets it, and the other hears which.
func (s *Store) AttachVolume(ctx context.Context, volumeID, jobID string, readOnly bool, actor string) (*orkv1.Volume, error) {
	return s.changeAttachment(ctx, volumeID, jobID, func(tx *sql.Tx, v *orkv1.Volume, j *job.Job) (string, error) {
		for _, have := range j.Volumes {
			if have.ID == v.Id && have.ReadOnly == readOnly {
				return "", nil
			}
		}
		if err := attachable(j, v, readOnly); err != nil {
			return "", err
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM volume_attachments WHERE volume_id = ? AND job_id = ?`, v.Id, j.ID); err != nil {
			return "", err
		}
		return "volume " + v.Name + " attached" + map[bool]string{true: ", read-only"}[readOnly], attach(ctx, tx, v.Id, j.ID, readOnly)
	}, actor)
}

// DetachVolume takes a volume from a job of which the cluster holds nothing.
func (s *Store) DetachVolume(ctx context.Context, volumeID, jobID, actor string) (*orkv1.Volume, error) {
	return s.changeAttachment(ctx, volumeID, jobID, func(tx *sql.Tx, v *orkv1.Volume, j *job.Job) (string, error) {
		has := false
		for _, have := range j.Volumes {
			has = has || have.ID == v.Id
		}
		if !has {
			return "", nil
		}
		if err := unheld(j, "detach volume "+v.Name+" from"); err != nil {
			return "", err
		}
		_, err := tx.ExecContext(ctx, `DELETE FROM volume_attachments WHERE volume_id = ? AND job_id = ?`, v.Id, j.ID)
		return "volume " + v.Name + " detached", err
	}, actor)
}

// changeAttachment changes who has a volume, and gives the job a new revision and an
// event when change returns words.
func (s *Store) changeAttachment(ctx context.Context, volumeID, jobID string, change func(*sql.Tx, *orkv1.Volume, *job.Job) (string, error), actor string) (*orkv1.Volume, error) {
	var out *orkv1.Volume
	changed := false
	err := s.write(ctx, func(tx *sql.Tx) error {
		changed = false
		v, err := loadVolume(ctx, tx, volumeID)
		if err != nil {
			return err
		}
		j, err := loadOne(ctx, tx, jobID)
		if err != nil {
			return err
		}
		words, err := change(tx, v, j)
		if err != nil {
			return err
		}
		if words != "" {
			if _, changed, err = s.update(ctx, tx, jobID, func(j *job.Job) (*job.Job, []job.Event, error) {
				return j, []job.Event{{State: j.State, Reason: j.Reason, Message: words, Actor: actor}}, nil
			}); err != nil {
				return err
			}
			if s.staged[jobID], err = loadOne(ctx, tx, jobID); err != nil {
				return err // kept with its volumes as they are now
			}
		}
		out, err = loadVolume(ctx, tx, volumeID)
		return err
	})
	if err != nil {
		return nil, err
	}
	if changed {
		s.hub.Publish(jobID)
	}
	return out, nil
}

func attach(ctx context.Context, tx *sql.Tx, volumeID, jobID string, readOnly bool) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO volume_attachments (volume_id, job_id, read_only) VALUES (?, ?, ?)`, volumeID, jobID, flag(readOnly))
	return err
}

// attachable says why a job cannot have a volume, in words that name who has it.
func attachable(j *job.Job, v *orkv1.Volume, readOnly bool) error {
	no := func(kind fault.Kind, rule, format string, a ...any) error {
		return fault.New(kind, "volume %s cannot be attached%s: %s", v.Name, to(j.ID), fmt.Sprintf(format, a...)).With(fault.Detail{Field: "volume", Rule: rule})
	}
	if v.Owner.GetProjectId() != j.Owner.GetProjectId() {
		return fault.New(fault.NotFound, "project %s has no volume %s", j.Owner.GetProjectId(), v.Id)
	}
	if j.Spec.GetKind() != orkv1.JobKind_JOB_KIND_GPU_CONTAINER {
		return no(fault.Invalid, "is for gpu_container only", "volumes are for GPU Container Jobs")
	}
	if j.Intent == job.IntentDelete {
		return no(fault.FailedPrecondition, "is for a job that stays", "the job is being deleted")
	}
	if err := unheld(j, "attach volume "+v.Name+" to"); err != nil {
		return err
	}
	if v.State != orkv1.VolumeState_VOLUME_STATE_READY && v.State != orkv1.VolumeState_VOLUME_STATE_CREATING {
		name := lexicon.Name(v.State)
		return no(fault.FailedPrecondition, "is "+name, "it is %s %s", name, v.Message)
	}
	if v.Location == "" {
		return no(fault.FailedPrecondition, "is on a rack that was removed", "its rack %s was removed; put it back first", v.RackId)
	}
	if !strings.EqualFold(v.Location, j.Spec.GetLocation()) {
		return no(fault.FailedPrecondition, "is in location "+v.Location, "it is on rack %s in %s, and the job asks for %s", v.RackId, v.Location, j.Spec.GetLocation())
	}
	others := 0
	for _, have := range j.Volumes {
		if have.ID == v.Id {
			continue
		}
		if others++; have.RackID != v.RackId {
			return no(fault.FailedPrecondition, "is on rack "+v.RackId, "it is on rack %s, and the job's volume %s on rack %s; a VM is in one rack", v.RackId, have.Name, have.RackID)
		}
	}
	if others >= spec.Volumes {
		return no(fault.FailedPrecondition, "is one too many", "it has %d volumes, and at most %d are allowed", others, spec.Volumes)
	}
	for _, r := range j.Replicas {
		for _, a := range r.Attempts {
			if a.Sent && a.RackID != "" && a.RackID != v.RackId {
				return no(fault.FailedPrecondition, "is on rack "+v.RackId, "it is on rack %s, and the job's root disk on rack %s; create the job anew with the volume", v.RackId, a.RackID)
			}
		}
	}
	for _, a := range v.Attachments {
		switch {
		case a.JobId == j.ID:
		case !v.Shared:
			return no(fault.FailedPrecondition, "is attached to "+holder(a), "%s has it, and a volume that is not shared serves one job at a time; detach it there or delete that job first", holder(a))
		case !a.ReadOnly:
			return no(fault.FailedPrecondition, "is attached to "+holder(a)+" to write", "%s has it to write, and one that writes has it alone; detach it there, or attach it read-only there and here", holder(a))
		case !readOnly:
			return no(fault.FailedPrecondition, "is attached to "+holder(a)+" to read", "%s has it to read, and one that writes has it alone; attach it read-only, or detach it there first", holder(a))
		}
	}
	return nil
}

func to(jobID string) string {
	if jobID == "" {
		return ""
	}
	return " to job " + jobID
}

// unheld refuses a change under a VM: the cluster must hold nothing of the job, or
// nothing yet.
func unheld(j *job.Job, doing string) error {
	for _, r := range j.Replicas {
		for _, a := range r.Attempts {
			if a.Gone || a.State == orkv1.State_STATE_QUEUED {
				continue
			}
			state := job.StateName(a.State)
			if job.Ended(a.State) {
				state += ", and the cluster still holds something of it"
			}
			return fault.New(fault.FailedPrecondition, "%s job %s: its attempt %s is %s; no disk is plugged into or out of a running VM: stop the job and wait until it is stopped, then start it again after the change", doing, j.ID, a.ID, state).
				With(fault.Detail{Field: "job_id", Rule: "is a job that is stopped, or waits for its first start"})
		}
	}
	return nil
}

// resolveVolumes finds what a job to be created asks for and says why it cannot have
// it, all problems together.
func resolveVolumes(ctx context.Context, tx *sql.Tx, j *job.Job) ([]job.Volume, error) {
	asked := *j
	asked.ID, asked.Volumes = "", nil
	var details []fault.Detail
	var first error
	for i, m := range j.Spec.GetVolumes() {
		v, err := findVolume(ctx, tx, j.Owner.GetProjectId(), m.GetVolume())
		if err == nil {
			err = attachable(&asked, v, m.GetReadOnly())
		}
		switch {
		case err == nil:
			asked.Volumes = append(asked.Volumes, job.Volume{ID: v.Id, Name: v.Name, RackID: v.RackId, ReadOnly: m.GetReadOnly()})
		case len(fault.DetailsOf(err)) == 0 && fault.KindOf(err) != fault.NotFound:
			return nil, err
		default:
			if first == nil {
				first = err
			}
			rule := "does not exist in this project"
			if all := fault.DetailsOf(err); len(all) > 0 {
				rule = all[0].Rule
			}
			details = append(details, fault.Detail{Field: fmt.Sprintf("volumes[%d].volume", i), Rule: rule})
		}
	}
	switch len(details) {
	case 0:
		return asked.Volumes, nil
	case 1:
		return nil, fault.New(fault.KindOf(first), "the job cannot be created: %s", first).With(details...)
	}
	return nil, fault.New(fault.KindOf(first), "the job cannot be created: %d of its volumes cannot be attached", len(details)).With(details...)
}

func findVolume(ctx context.Context, tx *sql.Tx, project, nameOrID string) (*orkv1.Volume, error) {
	by := "v.name = ?"
	if id.Valid(id.Volume, nameOrID) {
		by = "v.id = ?"
	}
	found, err := loadVolumes(ctx, tx, "v.project_id = ? AND "+by, project, nameOrID)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, fault.New(fault.NotFound, "there is no volume %.64q in project %s", nameOrID, project)
	}
	return found[0], nil
}

// ResolveVolumes is what a job to be created would have attached; it records nothing.
func (s *Store) ResolveVolumes(ctx context.Context, j *job.Job) ([]job.Volume, error) {
	var out []job.Volume
	err := s.read(ctx, func(tx *sql.Tx) (err error) {
		out, err = resolveVolumes(ctx, tx, j)
		return err
	})
	return out, err
}

// attachAsked attaches what a new job asks for.
func attachAsked(ctx context.Context, tx *sql.Tx, j *job.Job) (err error) {
	if len(j.Spec.GetVolumes()) == 0 {
		return nil
	}
	if j.Volumes, err = resolveVolumes(ctx, tx, j); err != nil {
		return err
	}
	for _, v := range j.Volumes {
		if err := attach(ctx, tx, v.ID, j.ID, v.ReadOnly); err != nil {
			return err
		}
	}
	return nil
}

// loadJobVolumes completes a job with what is attached to it.
func loadJobVolumes(ctx context.Context, tx *sql.Tx, j *job.Job) error {
	rows, err := tx.QueryContext(ctx, `SELECT v.id, v.name, v.rack_id, a.read_only FROM volume_attachments a JOIN volumes v ON v.id = a.volume_id
		WHERE a.job_id = ? ORDER BY v.name`, j.ID)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var v job.Volume
		if err := rows.Scan(&v.ID, &v.Name, &v.RackID, &v.ReadOnly); err != nil {
			return err
		}
		j.Volumes = append(j.Volumes, v)
	}
	return rows.Err()
}

// volumesUsable says that every volume of a job can be used on the rack of its plan.
func volumesUsable(ctx context.Context, tx *sql.Tx, jobID, rackID string) error {
	var name string
	err := tx.QueryRowContext(ctx, `SELECT v.name FROM volume_attachments a JOIN volumes v ON v.id = a.volume_id
		WHERE a.job_id = ? AND (v.rack_id <> ? OR v.state <> ?) LIMIT 1`, jobID, rackID, int(orkv1.VolumeState_VOLUME_STATE_READY)).Scan(&name)
	switch {
	case notFound(err):
		return nil
	case err != nil:
		return err
	}
	return fault.New(fault.Conflict, "volume %s of job %s cannot be used on rack %s now", name, jobID, rackID)
}
