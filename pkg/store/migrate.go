package store

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strconv"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

var migrationName = regexp.MustCompile(`^(\d{4})_([a-z0-9_]+)\.sql$`)

type migration struct {
	version int
	name    string
	sql     string
}

// readMigrations lists the migrations in order. A hole, a double or a stray file
// is a defect of the build and refused.
func readMigrations(files fs.FS) ([]migration, error) {
	entries, err := fs.ReadDir(files, ".")
	if err != nil {
		return nil, fault.Wrap(fault.Internal, err, "read migrations")
	}
	var steps []migration
	for _, e := range entries {
		m := migrationName.FindStringSubmatch(e.Name())
		if m == nil {
			return nil, fault.New(fault.Internal, "migration %q is not named NNNN_name.sql", e.Name())
		}
		body, err := fs.ReadFile(files, e.Name())
		if err != nil {
			return nil, fault.Wrap(fault.Internal, err, "read migrations")
		}
		v, _ := strconv.Atoi(m[1])
		steps = append(steps, migration{v, m[2], string(body)})
	}
	slices.SortFunc(steps, func(a, b migration) int { return a.version - b.version })
	for i, s := range steps {
		if s.version != i+1 {
			return nil, fault.New(fault.Internal, "migration %04d_%s stands at place %d: numbers go up by one from 0001", s.version, s.name, i+1)
		}
	}
	return steps, nil
}

// migrate brings the schema to the newest version, each step in a transaction
// with the record that it was done. The number lives in user_version.
func (s *Store) migrate(ctx context.Context, steps []migration) error {
	var have int
	if err := s.write.QueryRowContext(ctx, "PRAGMA user_version").Scan(&have); err != nil {
		return broken(err, "read", s.path)
	}
	if have > len(steps) {
		return fault.New(fault.FailedPrecondition,
			"state folder was written by a newer version: %s has schema %d, this program knows %d. Start the newer version, or restore a backup",
			s.path, have, len(steps)).With(fault.Detail{Field: "reason", Rule: "newer_schema"})
	}
	for _, step := range steps[have:] {
		err := s.Write(ctx, func(tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, step.sql); err != nil {
				return err
			}
			_, err := tx.ExecContext(ctx, fmt.Sprintf("PRAGMA user_version=%d", step.version))
			return err
		})
		if err != nil {
			return fault.Wrap(fault.KindOf(err), err, "migrate %s with %04d_%s", s.path, step.version, step.name)
		}
	}
	return nil
}
