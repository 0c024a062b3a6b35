package store

import (
	"context"
	"database/sql"
	"strings"
)

// ProjectRow is a project with its members and its quota.
type ProjectRow struct {
	Name string
	// Members are the emails of its members who are not deleted, in order.
	Members []string
	Quota   Quota
}

// Projects lists projects that have a member, oldest first: up to limit of those
// after the project with the given id, which is empty for the first page. userID is
// empty for everybody's, else only that user's come.
func (s *Store) Projects(ctx context.Context, userID, after string, limit int) (all []ProjectRow, err error) {
	err = s.read(ctx, func(tx *sql.Tx) error {
		all = nil
		rows, err := tx.QueryContext(ctx, `SELECT p.id, p.maximum_gpus, p.maximum_volume_gib, p.quota_revision, p.name, group_concat(u.email, char(10) ORDER BY u.email)
			FROM projects p JOIN memberships m ON m.project_id = p.id JOIN users u ON u.id = m.user_id
			WHERE u.deleted_at IS NULL AND p.id > ? AND (? = '' OR p.id IN (SELECT project_id FROM memberships WHERE user_id = ?))
			GROUP BY p.id ORDER BY p.id LIMIT ?`, after, userID, userID, limit)
		return each(rows, err, func(row scanner) error {
			var p ProjectRow
			var members string
			q, err := scanQuota(row, &p.Name, &members)
			p.Quota, p.Members = q, strings.Split(members, "\n")
			all = append(all, p)
			return err
		})
	})
	return all, err
}
