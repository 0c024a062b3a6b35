package record

import (
	"context"
	"crypto/subtle"
	"database/sql"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/job"
)

// Token is one join token as it is filed: never the token itself.
type Token struct {
	// Hash is the token's SHA-256.
	Hash      []byte
	JobID     string
	AttemptID string
	// Plan is the attempt's plan that it was made for; a newer plan voids it.
	Plan      uint32
	NodeIndex uint32
	// RedeemedBy is the key that used it, empty for none.
	RedeemedBy string
	RedeemedAt time.Time
	// VMIUID is the VM that it was redeemed in, by the cluster's uid.
	VMIUID string
}

func saveTokens(ctx context.Context, tx *sql.Tx, tokens []Token) error {
	for _, t := range tokens {
		// Tokens of the attempt's earlier plans are void from here.
		if _, err := tx.ExecContext(ctx, `DELETE FROM join_tokens WHERE attempt_id = ? AND plan < ?`, t.AttemptID, t.Plan); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `INSERT OR IGNORE INTO join_tokens (hash, job_id, attempt_id, plan, node_index, redeemed_by, redeemed_at)
			VALUES (?, ?, ?, ?, ?, '', 0)`, t.Hash, t.JobID, t.AttemptID, t.Plan, t.NodeIndex); err != nil {
			return err
		}
	}
	return nil
}

func loadToken(ctx context.Context, tx *sql.Tx, hash []byte) (*Token, error) {
	t := &Token{}
	var at int64
	err := tx.QueryRowContext(ctx, `SELECT hash, job_id, attempt_id, plan, node_index, redeemed_by, redeemed_at, vmi_uid FROM join_tokens WHERE hash = ?`, hash).
		Scan(&t.Hash, &t.JobID, &t.AttemptID, &t.Plan, &t.NodeIndex, &t.RedeemedBy, &at, &t.VMIUID)
	if notFound(err) || (err == nil && subtle.ConstantTimeCompare(t.Hash, hash) != 1) {
		return nil, fault.New(fault.Unauthenticated, "this join token is not known; it may be of an earlier attempt")
	}
	if err != nil {
		return nil, err
	}
	t.RedeemedAt = fromMicros(at)
	return t, nil
}

// Token finds a token and its job by the token's hash.
func (s *Store) Token(ctx context.Context, hash []byte) (*Token, *job.Job, error) {
	var t *Token
	var j *job.Job
	err := s.read(ctx, func(tx *sql.Tx) (err error) {
		if t, err = loadToken(ctx, tx, hash); err != nil {
			return err
		}
		j, err = s.known(ctx, tx, t.JobID)
		return err
	})
	return t, j, err
}

// Redeem gives the token and its job to change in one transaction. The token
// is stored as the function leaves it.
func (s *Store) Redeem(ctx context.Context, hash []byte, change func(*Token, *job.Job) (*job.Job, []job.Event, error)) (*job.Job, error) {
	var is *job.Job
	var id string
	changed := false
	err := s.write(ctx, func(tx *sql.Tx) error {
		t, err := loadToken(ctx, tx, hash)
		if err != nil {
			return err
		}
		id = t.JobID
		is, changed, err = s.update(ctx, tx, t.JobID, func(j *job.Job) (*job.Job, []job.Event, error) { return change(t, j) })
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `UPDATE join_tokens SET redeemed_by = ?, redeemed_at = ?, vmi_uid = ? WHERE hash = ?`,
			t.RedeemedBy, micros(t.RedeemedAt), t.VMIUID, hash)
		return err
	})
	if err != nil {
		return nil, err
	}
	if changed {
		s.hub.Publish(id)
	}
	return is, nil
}
