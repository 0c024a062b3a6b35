package reconcile

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/cosmicac/cosmicac/pkg/lexicon"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/placement"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
)

// holdBack takes those out of the queue whose volumes cannot be used now: they would
// hold GPUs and wait. The record of a plan checks it again.
func (q *Queue) holdBack(ctx context.Context, store *record.Store) error {
	states := map[string]*orkv1.Volume{}
	for _, t := range q.turns {
		if len(t.job.Volumes) == 0 {
			continue
		}
		all, err := store.Volumes(ctx, nil, "")
		if err != nil {
			return err
		}
		for _, v := range all {
			states[v.Id] = v
		}
		break
	}
	if len(states) == 0 {
		return nil
	}
	q.Waiting = slices.DeleteFunc(q.Waiting, func(w placement.Waiting) bool {
		why := unready(q.turns[w.ID].job, states)
		if why != "" {
			q.unready = append(q.unready, placement.Decision{Waiting: w, Refusal: &placement.Refusal{Reason: orkv1.Reason_REASON_VOLUME_NOT_READY, Message: why}})
		}
		return why != ""
	})
	return nil
}

// unready says which volume keeps a job waiting; empty for none.
func unready(j *job.Job, states map[string]*orkv1.Volume) string {
	for _, have := range j.Volumes {
		v := states[have.ID]
		switch {
		case v == nil:
			return fmt.Sprintf("volume %s (%s) has no record", have.Name, have.ID)
		case v.State != orkv1.VolumeState_VOLUME_STATE_READY:
			return strings.TrimSpace(fmt.Sprintf("volume %s (%s) on rack %s is %s; %s", v.Name, v.Id, v.RackId, lexicon.Name(v.State), v.Message))
		}
	}
	return ""
}

// seedVolumes are the volumes that the job's agent mounts.
func seedVolumes(j *job.Job) []*agentv1.SeedVolume {
	var out []*agentv1.SeedVolume
	for _, v := range j.Volumes {
		out = append(out, &agentv1.SeedVolume{Name: v.Name, ReadOnly: v.ReadOnly})
	}
	return out
}
