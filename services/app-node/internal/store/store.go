// Package store is all SQL of app-node: users, projects, tokens, API keys, what
// was revoked of grants, the catalogue, the audit log and the usage ledger, in one SQLite file.
//
// It keeps what it is given and enforces what must hold over rows (unique
// emails, at least one administrator, one count per usage record). It does not
// hash, make tokens or keys, check who may do what, or know the time: callers
// pass hashes and times in. No secret reaches it in clear.
package store

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"io/fs"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/store"
)

//go:embed migrations/*.sql
var migrations embed.FS

// Store is app-node's database. It is safe for concurrent use: reads run beside
// each other, writes one after the other.
type Store struct {
	db *store.Store
}

// Open opens or creates the database file and brings its schema up to date.
func Open(ctx context.Context, path string) (*Store, error) {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return nil, err
	}
	db, err := store.Open(ctx, path, files)
	if err != nil {
		return nil, err
	}
	return &Store{db: db}, nil
}

// Close waits for running transactions and closes the file.
func (s *Store) Close() error { return s.db.Close() }

// Backup writes a consistent copy to path while the store is in use.
func (s *Store) Backup(ctx context.Context, path string) error { return s.db.Backup(ctx, path) }

func (s *Store) read(ctx context.Context, f func(*sql.Tx) error) error {
	return s.db.Read(ctx, f)
}

func (s *Store) write(ctx context.Context, f func(*sql.Tx) error) error {
	return s.db.Write(ctx, f)
}

// scanner is a *sql.Row or *sql.Rows.
type scanner interface{ Scan(dest ...any) error }

func milliseconds(t time.Time) int64 { return t.UnixMilli() }

// optional is NULL for the zero time.
func optional(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return t.UnixMilli()
}

func at(ms int64) time.Time { return time.UnixMilli(ms).UTC() }

func atOptional(ms sql.NullInt64) time.Time {
	if !ms.Valid {
		return time.Time{}
	}
	return at(ms.Int64)
}

func notFound(err error, what string) error {
	if errors.Is(err, sql.ErrNoRows) {
		return fault.New(fault.NotFound, "there is no such %s", what)
	}
	return err
}

func each(rows *sql.Rows, err error, f func(scanner) error) error {
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := f(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}
