package store

import (
	"bytes"
	"database/sql"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/store/storetest"
)

func TestAFileThatIsNoDatabaseIsNamedWithWhatToDo(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s.db")
	if err := os.WriteFile(path, bytes.Repeat([]byte("no database at all "), 500), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Open(t.Context(), path, migrations(things))
	if fault.KindOf(err) != fault.Unavailable || fault.Reason(err) != "storage" || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "restore a backup") {
		t.Fatalf("opened something that is no database: %v", err)
	}
	// The file is left as it was, for whoever looks at it.
	if raw, err := os.ReadFile(path); err != nil || !bytes.HasPrefix(raw, []byte("no database at all")) {
		t.Errorf("the file was changed: %v", err)
	}

	// One that is damaged later is named by the read that meets it.
	path = filepath.Join(t.TempDir(), "s.db")
	s := open(t, path, migrations(things))
	if err := s.Write(t.Context(), func(tx *sql.Tx) error {
		_, err := tx.Exec(`WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i < 5000) INSERT INTO things SELECT 'thing ' || i, i FROM n`)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for at := 4096; at < len(raw); at++ { // the first page holds the schema
		raw[at] = 0xa5
	}
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	s = open(t, path, migrations(things))
	err = s.Read(t.Context(), func(tx *sql.Tx) error { var n int; return tx.QueryRow("SELECT sum(n) FROM things").Scan(&n) })
	if fault.KindOf(err) != fault.Unavailable || !strings.Contains(err.Error(), "database s.db") || strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "restore a backup") {
		t.Errorf("read a damaged file: %v", err)
	}
}

func TestAFullDiskLosesNothingAndHeals(t *testing.T) {
	t.Parallel()
	disk := storetest.SmallDisk(t, 1<<20)
	path := filepath.Join(disk.Folder, "s.db")
	s := open(t, path, migrations(things))
	if err := s.Write(t.Context(), insert("before")); err != nil {
		t.Fatal(err)
	}
	disk.Fill(t)
	err := s.Write(t.Context(), func(tx *sql.Tx) error {
		_, err := tx.Exec(`WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i < 5000) INSERT INTO things SELECT 'thing ' || i, i FROM n`)
		return err
	})
	if fault.KindOf(err) != fault.Unavailable || fault.Reason(err) != "storage" || !strings.Contains(err.Error(), "database s.db") || strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "disk is full") {
		t.Fatalf("a write for which there is no room: %v", err)
	}
	if n := count(t, s); n != 1 {
		t.Errorf("%d rows while the disk is full", n)
	}
	disk.Free(t)
	if err := s.Write(t.Context(), insert("after")); err != nil {
		t.Fatalf("with room again: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if n := count(t, open(t, path, migrations(things))); n != 2 {
		t.Errorf("%d rows after a reopen", n)
	}
}
