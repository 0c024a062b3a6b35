package store

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"go.uber.org/goleak"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func migrations(bodies ...string) fstest.MapFS {
	m := fstest.MapFS{}
	for i, b := range bodies {
		m["000"+string(rune('1'+i))+"_step.sql"] = &fstest.MapFile{Data: []byte(b)}
	}
	return m
}

const things = `CREATE TABLE things (id TEXT PRIMARY KEY, n INTEGER NOT NULL) STRICT;
CREATE TABLE parts (thing TEXT NOT NULL REFERENCES things(id)) STRICT;`

func open(t *testing.T, path string, files fstest.MapFS) *Store {
	t.Helper()
	s, err := Open(t.Context(), path, files)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func count(t *testing.T, s *Store) (n int) {
	t.Helper()
	if err := s.Read(t.Context(), func(tx *sql.Tx) error { return tx.QueryRow("SELECT count(*) FROM things").Scan(&n) }); err != nil {
		t.Error(err)
	}
	return n
}

func insert(id string) func(*sql.Tx) error {
	return func(tx *sql.Tx) error { _, err := tx.Exec("INSERT INTO things VALUES (?, 1)", id); return err }
}

func TestWritesSurviveAReopenAndFailedOnesLeaveNothing(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "a b?#.db")
	s := open(t, path, migrations(things))
	if err := s.Write(t.Context(), insert("x")); err != nil {
		t.Fatal(err)
	}
	own := errors.New("no")
	err := s.Write(t.Context(), func(tx *sql.Tx) error { _ = insert("y")(tx); return own })
	if !errors.Is(err, own) {
		t.Error(err)
	}
	func() {
		defer func() { _ = recover() }()
		_ = s.Write(t.Context(), func(tx *sql.Tx) error { _ = insert("z")(tx); panic("boom") })
	}()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if n := count(t, open(t, path, migrations(things))); n != 1 {
		t.Errorf("%d rows", n)
	}
}

func TestWritersTakeTurnsWhileReadersGoOn(t *testing.T) {
	t.Parallel()
	s := open(t, filepath.Join(t.TempDir(), "s.db"), migrations(things))
	if err := s.Write(t.Context(), insert("x")); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 25 {
				err := s.Write(t.Context(), func(tx *sql.Tx) error {
					var n int // a lost update would show in the end
					if err := tx.QueryRow("SELECT n FROM things").Scan(&n); err != nil {
						return err
					}
					_, err := tx.Exec("UPDATE things SET n=?", n+1)
					return err
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	_ = s.Write(t.Context(), func(*sql.Tx) error { // a reader is not held up by an open write
		if count(t, s) != 1 {
			t.Error("the reader sees nothing")
		}
		return nil
	})
	wg.Wait()
	var n int
	_ = s.Read(t.Context(), func(tx *sql.Tx) error { return tx.QueryRow("SELECT n FROM things").Scan(&n) })
	if n != 101 {
		t.Errorf("n = %d", n)
	}
}

func TestErrorsHaveKinds(t *testing.T) {
	t.Parallel()
	s := open(t, filepath.Join(t.TempDir(), "s.db"), migrations(things))
	ctx := t.Context()
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	_ = s.Write(ctx, insert("x"))
	exec := func(q string) func(*sql.Tx) error {
		return func(tx *sql.Tx) error { _, err := tx.Exec(q); return err }
	}
	for _, c := range []struct {
		what string
		err  error
		want fault.Kind
	}{
		{"same key", s.Write(ctx, insert("x")), fault.Conflict},
		{"dangling reference", s.Write(ctx, exec("INSERT INTO parts VALUES ('nope')")), fault.FailedPrecondition},
		{"wrong sql", s.Write(ctx, exec("SELEKT")), fault.Internal},
		{"no row", s.Read(ctx, func(tx *sql.Tx) error { var n int; return tx.QueryRow("SELECT n FROM things WHERE id='q'").Scan(&n) }), fault.NotFound},
		{"write in a read", s.Read(ctx, insert("w")), fault.Unavailable},
		{"canceled", s.Write(canceled, insert("y")), fault.Canceled},
		{"own kind", s.Write(ctx, func(*sql.Tx) error { return fault.New(fault.Denied, "no") }), fault.Denied},
		{"inside itself", s.WriteContext(ctx, func(ctx context.Context, _ *sql.Tx) error { return s.Write(ctx, insert("y")) }), fault.Internal},
	} {
		if fault.KindOf(c.err) != c.want {
			t.Errorf("%s: %v (%s), want %s", c.what, c.err, fault.KindOf(c.err), c.want)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Read(ctx, func(*sql.Tx) error { return nil }); fault.Reason(err) != "storage" {
		t.Errorf("read after close: %v", err)
	}
	if err := s.Write(ctx, insert("y")); fault.Reason(err) != "storage" {
		t.Errorf("write after close: %v", err)
	}
}

func TestAStateFolderIsNotShared(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s.db")
	s := open(t, path, migrations(things))
	if _, err := Open(t.Context(), path, migrations(things)); !fault.Is(err, fault.Conflict) || !strings.Contains(err.Error(), "in use") {
		t.Errorf("second opener: %v", err)
	}
	_ = s.Close()
	open(t, path, migrations(things))
}

func TestMigrationsRunOnceInOrderAndNewerOnesAreRefused(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s.db")
	one := migrations(things)
	two := migrations(things, "ALTER TABLE things ADD COLUMN label TEXT; INSERT INTO things VALUES ('seed', 1, 'l');")
	s := open(t, path, one)
	_ = s.Write(t.Context(), insert("x"))
	_ = s.Close()
	if _, err := Open(t.Context(), path, broken3(two)); err == nil || !strings.Contains(err.Error(), "0003_step") {
		t.Errorf("broken migration: %v", err)
	}
	s = open(t, path, two)
	if n := count(t, s); n != 2 {
		t.Errorf("%d rows", n)
	}
	var half int
	_ = s.Read(t.Context(), func(tx *sql.Tx) error {
		return tx.QueryRow("SELECT count(*) FROM sqlite_schema WHERE name='half'").Scan(&half)
	})
	if half != 0 {
		t.Error("half a migration stayed")
	}
	_ = s.Close()
	if _, err := Open(t.Context(), path, one); err == nil || !strings.Contains(err.Error(), "written by a newer version") {
		t.Errorf("older program: %v", err)
	}
	for _, bad := range []fstest.MapFS{{"0002_x.sql": {}}, {"readme.md": {}}, {"0001_a.sql": {}, "0001_b.sql": {}}} {
		if _, err := Open(t.Context(), path, bad); !fault.Is(err, fault.Internal) {
			t.Errorf("%v: %v", bad, err)
		}
	}
}

func broken3(two fstest.MapFS) fstest.MapFS {
	three := fstest.MapFS{"0003_step.sql": &fstest.MapFile{Data: []byte("CREATE TABLE half (a INTEGER); SELEKT;")}}
	for k, v := range two {
		three[k] = v
	}
	return three
}

func TestBackupIsAWholeDatabase(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, filepath.Join(dir, "s.db"), migrations(things))
	_ = s.Write(t.Context(), insert("x"))
	copyPath := filepath.Join(dir, "copy.db")
	if err := s.Backup(t.Context(), copyPath); err != nil {
		t.Fatal(err)
	}
	_ = s.Write(t.Context(), insert("later"))
	if err := s.Backup(t.Context(), copyPath); !fault.Is(err, fault.Conflict) {
		t.Errorf("overwriting a backup: %v", err)
	}
	if n := count(t, open(t, copyPath, migrations(things))); n != 1 {
		t.Errorf("%d rows in the copy", n)
	}
}
