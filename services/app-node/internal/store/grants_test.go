package store

import (
	"context"
	"database/sql"
	"path/filepath"
	"testing"
	"time"
)

func TestWhoLeavesAProjectLosesTheGrantsThere(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	dir := t.TempDir()
	s, err := Open(ctx, filepath.Join(dir, "app-node.db"))
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for _, id := range []string{"u-1", "u-2"} {
		if err := s.CreateUser(ctx, User{ID: id, Email: id + "@example.org", CreatedAt: now}, Project{ID: "p-" + id, Name: "personal"}); err != nil {
			t.Fatal(err)
		}
	}
	do := func(query string, args ...any) {
		t.Helper()
		if err := s.write(ctx, func(tx *sql.Tx) error { _, err := tx.ExecContext(ctx, query, args...); return err }); err != nil {
			t.Fatal(err)
		}
	}
	do("INSERT INTO memberships (project_id, user_id) VALUES ('p-u-1', 'u-2')")
	if floors, epoch, err := s.GrantFloors(ctx, 0); err != nil || len(floors) != 0 || epoch != 1 {
		t.Fatalf("%v, %d, %v", floors, epoch, err)
	}
	do("DELETE FROM memberships WHERE project_id = 'p-u-1' AND user_id = 'u-2'")
	check := func(when string) {
		t.Helper()
		floors, epoch, err := s.GrantFloors(ctx, 0)
		if err != nil || len(floors) != 1 || floors[0].UserID != "u-2" || floors[0].ProjectID != "p-u-1" || floors[0].Epoch != 2 || epoch != 2 ||
			now.Sub(floors[0].RaisedAt).Abs() > time.Hour {
			t.Fatalf("%s: %v, %d, %v", when, floors, epoch, err)
		}
	}
	check("after the removal")
	if floors, _, err := s.GrantFloors(ctx, 2); err != nil || len(floors) != 0 {
		t.Errorf("told already: %v, %v", floors, err)
	}
	// A restart keeps it, and an epoch never goes back.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s, err = Open(ctx, filepath.Join(dir, "app-node.db")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	if err := s.LiftGrantEpoch(ctx, 1); err != nil {
		t.Fatal(err)
	}
	check("after the restart")
	if err := s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE grant_epoch SET value = 1")
		return err
	}); err == nil {
		t.Error("the epoch went back")
	}
	if err := s.PruneGrantFloors(context.WithoutCancel(ctx), now.Add(2*time.Hour)); err != nil {
		t.Fatal(err)
	}
	if floors, epoch, err := s.GrantFloors(ctx, 0); err != nil || len(floors) != 0 || epoch != 2 {
		t.Errorf("after their time: %v, %d, %v", floors, epoch, err)
	}
}
