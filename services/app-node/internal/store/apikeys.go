package store

import (
	"context"
	"database/sql"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// APIKey is a key for inference requests. HMAC stands for the key itself.
type APIKey struct {
	ID        string
	PublicID  string
	HMAC      []byte
	Name      string
	UserID    string
	ProjectID string
	CreatedAt time.Time
	UpdatedAt time.Time
	// ExpiresAt, RevokedAt and LastUsedAt are zero for never.
	ExpiresAt  time.Time
	RevokedAt  time.Time
	LastUsedAt time.Time
	// OwnerDisabled is set while the user is disabled; the key does not work then.
	OwnerDisabled bool
}

const (
	apiKeyColumns = `k.id, k.public_id, k.hmac, k.name, k.user_id, k.project_id, k.created_at, k.updated_at,
	k.expires_at, k.revoked_at, k.last_used_at, u.disabled`
	apiKeyTables = " FROM api_keys k JOIN users u ON u.id = k.user_id "
)

func scanAPIKey(row scanner) (APIKey, error) {
	var k APIKey
	var created, updated int64
	var expires, revoked, used sql.NullInt64
	err := row.Scan(&k.ID, &k.PublicID, &k.HMAC, &k.Name, &k.UserID, &k.ProjectID, &created, &updated,
		&expires, &revoked, &used, &k.OwnerDisabled)
	k.CreatedAt, k.UpdatedAt = at(created), at(updated)
	k.ExpiresAt, k.RevokedAt, k.LastUsedAt = atOptional(expires), atOptional(revoked), atOptional(used)
	return k, err
}

// AddAPIKey stores a key, unless its user has `limit` live ones already.
func (s *Store) AddAPIKey(ctx context.Context, k APIKey, limit int) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		var live int
		err := tx.QueryRowContext(ctx, `SELECT count(*) FROM api_keys WHERE user_id = ? AND revoked_at IS NULL
			AND (expires_at IS NULL OR expires_at > ?)`, k.UserID, milliseconds(k.CreatedAt)).Scan(&live)
		if err != nil {
			return err
		}
		if live >= limit {
			return fault.New(fault.Exhausted, "you have %d active api keys, which is the most one user can have: revoke one first", live)
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO api_keys (id, public_id, hmac, name, user_id, project_id, created_at, updated_at, expires_at)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			k.ID, k.PublicID, k.HMAC, k.Name, k.UserID, k.ProjectID, milliseconds(k.CreatedAt), milliseconds(k.UpdatedAt), optional(k.ExpiresAt))
		return err
	})
}

// APIKey finds one key of a user. Another user's key is not found.
func (s *Store) APIKey(ctx context.Context, userID, id string) (k APIKey, err error) {
	err = s.read(ctx, func(tx *sql.Tx) error {
		k, err = apiKeyIn(ctx, tx, userID, id)
		return err
	})
	return k, err
}

func apiKeyIn(ctx context.Context, tx *sql.Tx, userID, id string) (APIKey, error) {
	k, err := scanAPIKey(tx.QueryRowContext(ctx, "SELECT "+apiKeyColumns+apiKeyTables+"WHERE k.id = ? AND k.user_id = ?", id, userID))
	return k, notFound(err, "api key")
}

// KeyStatus filters a list of keys; empty for all.
type KeyStatus string

// The states of a key. An expired one counts as neither active nor revoked.
const (
	KeyActive  KeyStatus = "active"
	KeyRevoked KeyStatus = "revoked"
	KeyExpired KeyStatus = "expired"
)

// KeyQuery selects a page of one user's keys.
type KeyQuery struct {
	UserID string
	Status KeyStatus
	// SortBy is one of created_at, updated_at, name, last_used_at.
	SortBy     string
	Descending bool
	Offset     int
	Limit      int
	Now        time.Time
}

// sortColumns is the closed list of what may be sorted by: nothing else reaches SQL.
var sortColumns = map[string]string{
	"created_at": "k.created_at", "updated_at": "k.updated_at", "name": "k.name COLLATE NOCASE", "last_used_at": "ifnull(k.last_used_at, 0)",
}

// APIKeys lists a page of keys and counts all that match.
func (s *Store) APIKeys(ctx context.Context, q KeyQuery) (keys []APIKey, total int, err error) {
	column, ok := sortColumns[q.SortBy]
	if !ok {
		return nil, 0, fault.New(fault.Invalid, "api keys cannot be sorted by %q", q.SortBy)
	}
	where, args := "WHERE k.user_id = ?", []any{q.UserID}
	now := milliseconds(q.Now)
	switch q.Status {
	case KeyActive:
		where += " AND k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > ?)"
		args = append(args, now)
	case KeyExpired:
		where += " AND k.revoked_at IS NULL AND k.expires_at <= ?"
		args = append(args, now)
	case KeyRevoked:
		where += " AND k.revoked_at IS NOT NULL"
	}
	direction := " ASC"
	if q.Descending {
		direction = " DESC"
	}
	err = s.read(ctx, func(tx *sql.Tx) error {
		if err := tx.QueryRowContext(ctx, "SELECT count(*)"+apiKeyTables+where, args...).Scan(&total); err != nil {
			return err
		}
		rows, err := tx.QueryContext(ctx, "SELECT "+apiKeyColumns+apiKeyTables+where+
			" ORDER BY "+column+direction+", k.id"+direction+" LIMIT ? OFFSET ?", append(args, q.Limit, q.Offset)...)
		return each(rows, err, func(row scanner) error {
			k, err := scanAPIKey(row)
			keys = append(keys, k)
			return err
		})
	})
	return keys, total, err
}

// AllAPIKeys lists every key of everybody that could still work: not revoked,
// not expired, owner enabled. Proxies get this table.
func (s *Store) AllAPIKeys(ctx context.Context, now time.Time) (keys []APIKey, err error) {
	err = s.read(ctx, func(tx *sql.Tx) error {
		rows, err := tx.QueryContext(ctx, "SELECT "+apiKeyColumns+apiKeyTables+
			`WHERE k.revoked_at IS NULL AND u.disabled = 0 AND u.deleted_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > ?)
			ORDER BY k.id`, milliseconds(now))
		return each(rows, err, func(row scanner) error {
			k, err := scanAPIKey(row)
			keys = append(keys, k)
			return err
		})
	})
	return keys, err
}

// RenameAPIKey changes the name of an active key.
func (s *Store) RenameAPIKey(ctx context.Context, userID, id, name string, now time.Time) (k APIKey, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		if k, err = apiKeyIn(ctx, tx, userID, id); err != nil {
			return err
		}
		if !k.RevokedAt.IsZero() || (!k.ExpiresAt.IsZero() && !k.ExpiresAt.After(now)) {
			return fault.New(fault.FailedPrecondition, "api key %s is not active: only an active key can be renamed", id)
		}
		k.Name, k.UpdatedAt = name, at(milliseconds(now))
		_, err := tx.ExecContext(ctx, "UPDATE api_keys SET name = ?, updated_at = ? WHERE id = ?", name, milliseconds(now), id)
		return err
	})
	return k, err
}

// RevokeAPIKey ends a key for good. Revoking it again changes nothing.
func (s *Store) RevokeAPIKey(ctx context.Context, userID, id string, now time.Time) (k APIKey, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		if k, err = apiKeyIn(ctx, tx, userID, id); err != nil || !k.RevokedAt.IsZero() {
			return err
		}
		k.RevokedAt, k.UpdatedAt = at(milliseconds(now)), at(milliseconds(now))
		_, err := tx.ExecContext(ctx, "UPDATE api_keys SET revoked_at = ?, updated_at = ? WHERE id = ?", milliseconds(now), milliseconds(now), id)
		return err
	})
	return k, err
}
