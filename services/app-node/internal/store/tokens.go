package store

import (
	"context"
	"database/sql"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// Token is a sign-in. Hash is the SHA-256 of what the user holds.
type Token struct {
	Hash      []byte
	UserID    string
	CreatedAt time.Time
	ExpiresAt time.Time
	// Limit is the instant beyond which use does not prolong it.
	Limit time.Time
}

// Session is a live token with whom it belongs to.
type Session struct {
	Token    Token
	User     User
	Projects []Project
	// GrantEpoch is what a grant may be signed under on the strength of this
	// session: what is revoked later voids it.
	GrantEpoch uint64
}

// AddToken stores a token.
func (s *Store) AddToken(ctx context.Context, t Token) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		// The user may have been disabled between the check of the password and now.
		u, err := userIn(ctx, tx, t.UserID)
		if err != nil {
			return err
		}
		if u.Disabled {
			return fault.New(fault.Unauthenticated, "the user is disabled")
		}
		_, err = tx.ExecContext(ctx, "INSERT INTO tokens (hash, user_id, created_at, expires_at, last_limit) VALUES (?, ?, ?, ?, ?)",
			t.Hash, t.UserID, milliseconds(t.CreatedAt), milliseconds(t.ExpiresAt), milliseconds(t.Limit))
		return err
	})
}

// Session finds the live token with this hash. A token that expired, or whose
// user is disabled or deleted, is not found.
func (s *Store) Session(ctx context.Context, hash []byte, now time.Time) (session Session, err error) {
	err = s.read(ctx, func(tx *sql.Tx) error {
		t := Token{Hash: hash}
		var created, expires, limit int64
		err := tx.QueryRowContext(ctx, "SELECT user_id, created_at, expires_at, last_limit FROM tokens WHERE hash = ? AND expires_at > ?",
			hash, milliseconds(now)).Scan(&t.UserID, &created, &expires, &limit)
		if err != nil {
			return notFound(err, "token")
		}
		t.CreatedAt, t.ExpiresAt, t.Limit = at(created), at(expires), at(limit)
		u, err := userIn(ctx, tx, t.UserID)
		if err != nil {
			return err
		}
		if u.Disabled {
			return fault.New(fault.NotFound, "there is no such token")
		}
		projects, err := projectsIn(ctx, tx, u.ID)
		if err != nil {
			return err
		}
		epoch, err := grantEpoch(ctx, tx)
		session = Session{Token: t, User: u, Projects: projects, GrantEpoch: epoch}
		return err
	})
	return session, err
}

// ProlongToken moves a token's expiry later, up to its limit; it never brings a
// deleted one back.
func (s *Store) ProlongToken(ctx context.Context, hash []byte, expires time.Time) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE tokens SET expires_at = min(?, last_limit) WHERE hash = ? AND expires_at < ?",
			milliseconds(expires), hash, milliseconds(expires))
		return err
	})
}

// RemoveToken ends a sign-in; one that is gone already is no error.
func (s *Store) RemoveToken(ctx context.Context, hash []byte) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "DELETE FROM tokens WHERE hash = ?", hash)
		return err
	})
}

// PruneTokens removes tokens that expired.
func (s *Store) PruneTokens(ctx context.Context, now time.Time) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "DELETE FROM tokens WHERE expires_at <= ?", milliseconds(now))
		return err
	})
}
