package record

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

// failingRest is how long after the last start that failed on a node that was left
// open its rack counts as failing: longer than the pause between two tries.
const failingRest = 15 * time.Minute

// failing is what is remembered of a rack whose nodes fail together.
type failing struct {
	last  time.Time // when a start failed there last
	nodes int       // that would be closed and are left open
	words string    // of the last failure
}

// brake reports whether a node is to be left open although it failed as often as
// closes one: as large a share of its rack as may be was closed already, and
// nobody has looked. What an operator quarantined, or confirmed, does not count.
func (s *Store) brake(ctx context.Context, tx *sql.Tx, rackID, node string) (bool, error) {
	nodes := 0
	if s.policy.Nodes != nil {
		nodes = s.policy.Nodes(rackID)
	}
	var closed int
	err := tx.QueryRowContext(ctx, `SELECT count(DISTINCT node) FROM quarantines WHERE rack_id = ? AND actor = 'ork' AND node <> ?`, rackID, node).Scan(&closed)
	return closed >= max(1, nodes*s.policy.QuarantineMostPercent/100), err
}

// loadFailing reads which racks have nodes that the brake left open.
func (s *Store) loadFailing(ctx context.Context, tx *sql.Tx) (map[string]failing, error) {
	rows, err := tx.QueryContext(ctx, `SELECT rack_id, node, max(time), message FROM start_failures f WHERE time >= ?
		AND NOT EXISTS (SELECT 1 FROM quarantines q WHERE q.rack_id = f.rack_id AND q.node = f.node AND q.model IN ('', f.model))
		GROUP BY rack_id, node, model HAVING count(DISTINCT attempt_id) >= ? ORDER BY max(time)`,
		micros(s.clock().Add(-s.policy.QuarantineWindow)), s.policy.QuarantineFailures)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	out := make(map[string]failing)
	for rows.Next() {
		var rack, node, words string
		var last int64
		if err := rows.Scan(&rack, &node, &last, &words); err != nil {
			return nil, err
		}
		out[rack] = failing{last: fromMicros(last), nodes: out[rack].nodes + 1, words: words}
	}
	return out, rows.Err()
}

// Failing says in words that a rack's nodes fail together, "" when they do not:
// more of them fail to start what is placed there than may be closed for it. From
// memory.
func (s *Store) Failing(rackID string) string {
	s.mu.Lock()
	f := s.failing[rackID]
	s.mu.Unlock()
	if f.nodes == 0 || s.clock().Sub(f.last) > failingRest {
		return ""
	}
	return fmt.Sprintf("%d more of its nodes fail to start what is placed there, the last one: %s", f.nodes, f.words)
}
