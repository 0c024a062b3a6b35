package record

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// mostVolumes bounds the volumes of one project.
const mostVolumes = 64

// Volumes reads volumes with who has them, oldest first: of some projects (of all
// when none is named), of one name, or all.
func (s *Store) Volumes(ctx context.Context, projects []string, name string) ([]*orkv1.Volume, error) {
	where, args := []string{"1"}, []any{}
	if len(projects) > 0 {
		where = append(where, "v.project_id IN ("+strings.TrimSuffix(strings.Repeat("?,", len(projects)), ",")+")")
		for _, p := range projects {
			args = append(args, p)
		}
	}
	if name != "" {
		where, args = append(where, "v.name = ?"), append(args, name)
	}
	var out []*orkv1.Volume
	err := s.read(ctx, func(tx *sql.Tx) (err error) {
		out, err = loadVolumes(ctx, tx, strings.Join(where, " AND "), args...)
		return err
	})
	return out, err
}

// Volume reads one volume; not_found when there is none.
func (s *Store) Volume(ctx context.Context, id string) (*orkv1.Volume, error) {
	var out *orkv1.Volume
	err := s.read(ctx, func(tx *sql.Tx) (err error) {
		out, err = loadVolume(ctx, tx, id)
		return err
	})
	return out, err
}

func loadVolume(ctx context.Context, tx *sql.Tx, id string) (*orkv1.Volume, error) {
	found, err := loadVolumes(ctx, tx, "v.id = ?", id)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, fault.New(fault.NotFound, "no volume has the id %.64q", id)
	}
	return found[0], nil
}

func loadVolumes(ctx context.Context, tx *sql.Tx, where string, args ...any) ([]*orkv1.Volume, error) {
	rows, err := tx.QueryContext(ctx, `SELECT v.id, v.project_id, v.user_id, v.name, v.rack_id, coalesce(r.location, ''), v.size_gib, v.storage_class, v.shared,
		v.state, v.message, v.created_at, v.delete_requested_at FROM volumes v LEFT JOIN racks r ON r.id = v.rack_id WHERE `+where+` ORDER BY v.id`, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []*orkv1.Volume
	for rows.Next() {
		v := &orkv1.Volume{Owner: &orkv1.Owner{}}
		var made, deleted int64
		if err := rows.Scan(&v.Id, &v.Owner.ProjectId, &v.Owner.UserId, &v.Name, &v.RackId, &v.Location, &v.SizeGib, &v.StorageClass, &v.Shared,
			&v.State, &v.Message, &made, &deleted); err != nil {
			return nil, err
		}
		v.CreatedAt = timestamppb.New(fromMicros(made))
		if deleted > 0 {
			v.DeleteRequestedAt = timestamppb.New(fromMicros(deleted))
		}
		out = append(out, v)
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	if err := rows.Close(); err != nil {
		return nil, err
	}
	for _, v := range out {
		if v.Attachments, err = loadAttachments(ctx, tx, v.Id); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func loadAttachments(ctx context.Context, tx *sql.Tx, volumeID string) ([]*orkv1.VolumeAttachment, error) {
	rows, err := tx.QueryContext(ctx, `SELECT a.job_id, j.name, a.read_only, j.state FROM volume_attachments a JOIN jobs j ON j.id = a.job_id
		WHERE a.volume_id = ? ORDER BY a.job_id`, volumeID)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []*orkv1.VolumeAttachment
	for rows.Next() {
		a := &orkv1.VolumeAttachment{}
		if err := rows.Scan(&a.JobId, &a.JobName, &a.ReadOnly, &a.JobState); err != nil {
			return nil, err
		}
		out = append(out, a)
	}
	return out, rows.Err()
}

// CreateVolume records a volume as being created. When the project has one of this
// name that is alike, that one is returned and existed is true; another one is a
// conflict. pick chooses the rack where v names none, v.Location being a wish.
func (s *Store) CreateVolume(ctx context.Context, v *orkv1.Volume, pick func() (string, error)) (made *orkv1.Volume, existed bool, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		made, existed = nil, false
		same, err := loadVolumes(ctx, tx, "v.project_id = ? AND v.name = ?", v.Owner.GetProjectId(), v.Name)
		if err != nil {
			return err
		}
		if len(same) == 1 {
			made, existed = same[0], true
			return alike(same[0], v)
		}
		var n int
		if err := tx.QueryRowContext(ctx, `SELECT count(*) FROM volumes WHERE project_id = ?`, v.Owner.GetProjectId()).Scan(&n); err != nil {
			return err
		}
		if n >= mostVolumes {
			return fault.New(fault.Exhausted, "project %s has %d volumes, and at most %d are allowed; delete one first", v.Owner.GetProjectId(), n, mostVolumes)
		}
		if err := admitVolume(ctx, tx, v); err != nil {
			return err
		}
		rackID := v.RackId
		if rackID == "" {
			if rackID, err = pick(); err != nil {
				return err
			}
		}
		entry, err := loadRack(ctx, tx, rackID)
		if fault.KindOf(err) == fault.NotFound {
			return fault.New(fault.NotFound, "the volume cannot be created: no rack has the id %.64q", rackID).With(fault.Detail{Field: "rack_id", Rule: "is the id of a rack"})
		}
		if err != nil {
			return err
		}
		if v.Location != "" && !strings.EqualFold(v.Location, entry.Location) {
			return fault.New(fault.Invalid, "the volume cannot be created: rack %s is in %s, not in %.64s", entry.Id, entry.Location, v.Location).
				With(fault.Detail{Field: "location", Rule: "is that of the rack, or left out"})
		}
		if _, err := tx.ExecContext(ctx, `INSERT INTO volumes (id, project_id, user_id, name, rack_id, size_gib, storage_class, shared, state, message, created_at, delete_requested_at)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, '', ?, 0)`, v.Id, v.Owner.GetProjectId(), v.Owner.GetUserId(), v.Name, rackID, v.SizeGib, v.StorageClass, flag(v.Shared),
			int(orkv1.VolumeState_VOLUME_STATE_CREATING), micros(s.clock())); err != nil {
			return err
		}
		made, err = loadVolume(ctx, tx, v.Id)
		return err
	})
	if err != nil {
		return nil, false, err
	}
	return made, existed, nil
}

// alike refuses to take one volume for another that was asked for.
func alike(is, asked *orkv1.Volume) error {
	if is.State == orkv1.VolumeState_VOLUME_STATE_DELETING {
		return fault.New(fault.FailedPrecondition, "volume %s (%s) is still being deleted; create it when it is gone, or use another name", is.Name, is.Id)
	}
	var details []fault.Detail
	differ := func(differs bool, field, format string, a ...any) {
		if differs {
			details = append(details, fault.Detail{Field: field, Rule: fmt.Sprintf(format, a...)})
		}
	}
	differ(is.SizeGib != asked.SizeGib, "size_gib", "is %d for the volume of this name", is.SizeGib)
	differ(is.StorageClass != asked.StorageClass, "storage_class", "was %q for the volume of this name", is.StorageClass)
	differ(is.Shared != asked.Shared, "shared", "is %t for the volume of this name", is.Shared)
	differ(asked.RackId != "" && is.RackId != asked.RackId, "rack_id", "is %s for the volume of this name", is.RackId)
	differ(asked.Location != "" && is.Location != "" && !strings.EqualFold(is.Location, asked.Location), "location", "is %s for the volume of this name", is.Location)
	if len(details) == 0 {
		return nil
	}
	return fault.New(fault.Conflict, "the project has a volume %s (%s) already, and its %s differs; use another name", is.Name, is.Id, details[0].Field).With(details...)
}

// SetVolume writes what was seen of a volume, unless it is in another state than
// from by now. It says whether anything changed.
func (s *Store) SetVolume(ctx context.Context, id string, from, to orkv1.VolumeState, message string) (bool, error) {
	var n int64
	err := s.write(ctx, func(tx *sql.Tx) error {
		r, err := tx.ExecContext(ctx, `UPDATE volumes SET state = ?1, message = ?2 WHERE id = ?3 AND state = ?4 AND (state <> ?1 OR message <> ?2)`,
			int(to), message, id, int(from))
		if err != nil {
			return err
		}
		n, err = r.RowsAffected()
		return err
	})
	return n > 0, err
}

// AskDeleteVolume asks for the end of a volume. It is refused while a job has it.
// Asking again changes nothing.
func (s *Store) AskDeleteVolume(ctx context.Context, id string) (*orkv1.Volume, error) {
	var out *orkv1.Volume
	err := s.write(ctx, func(tx *sql.Tx) error {
		v, err := loadVolume(ctx, tx, id)
		if err != nil {
			return err
		}
		if len(v.Attachments) > 0 {
			return fault.New(fault.FailedPrecondition, "volume %s (%s) is not deleted: it is attached to %s; detach it there or delete the job first", v.Name, v.Id, holders(v))
		}
		if _, err := tx.ExecContext(ctx, `UPDATE volumes SET state = ?1, message = '', delete_requested_at = ?2 WHERE id = ?3 AND state <> ?1`,
			int(orkv1.VolumeState_VOLUME_STATE_DELETING), micros(s.clock()), id); err != nil {
			return err
		}
		out, err = loadVolume(ctx, tx, id)
		return err
	})
	return out, err
}

// RemoveVolume forgets a volume of which nothing is left.
func (s *Store) RemoveVolume(ctx context.Context, id string) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM volumes WHERE id = ? AND state = ?
			AND NOT EXISTS (SELECT 1 FROM volume_attachments a WHERE a.volume_id = volumes.id)`, id, int(orkv1.VolumeState_VOLUME_STATE_DELETING))
		return err
	})
}

// holders names who has a volume: "job j-1 (lab, running)".
func holders(v *orkv1.Volume) string {
	var out []string
	for i, a := range v.Attachments {
		if i == 3 {
			out = append(out, fmt.Sprintf("%d more", len(v.Attachments)-i))
			break
		}
		out = append(out, holder(a))
	}
	return strings.Join(out, ", ")
}

func holder(a *orkv1.VolumeAttachment) string { return fmt.Sprintf("job %s (%s)", a.JobId, a.JobName) }

// keepsVolumes refuses the removal of a rack that holds volumes: nobody else could
// give back what is on them, or remove them.
func keepsVolumes(ctx context.Context, tx *sql.Tx, rackID string) error {
	var n int
	var one sql.NullString
	if err := tx.QueryRowContext(ctx, `SELECT count(*), min(name) FROM volumes WHERE rack_id = ?`, rackID).Scan(&n, &one); err != nil {
		return err
	}
	if n > 0 {
		return fault.New(fault.FailedPrecondition, "rack %s holds %d volumes (%s is one of them); delete them first", rackID, n, one.String)
	}
	return nil
}

// volumesOn are the ids of a rack's volumes.
func volumesOn(ctx context.Context, tx *sql.Tx, rackID string) ([]string, error) {
	found, err := loadVolumes(ctx, tx, "v.rack_id = ?", rackID)
	var ids []string
	for _, v := range found {
		ids = append(ids, v.Id)
	}
	return ids, err
}
