package api_test

import (
	"database/sql"
	"path/filepath"
	"slices"
	"testing"

	_ "modernc.org/sqlite"

	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

func TestWhatCouldNotBeAuditedIsWrittenOnceItCanBeAndNotMuchIsDoneMeanwhile(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	db := must(sql.Open("sqlite", filepath.Join(l.dir, "app-node.db")))
	defer db.Close()
	rename := func(from, to string) {
		t.Helper()
		if _, err := db.Exec("PRAGMA busy_timeout = 60000; ALTER TABLE " + from + " RENAME TO " + to); err != nil {
			t.Fatal(err)
		}
	}
	rename("audit", "away") // as if the disk took nothing
	dark := l.job(l.admin, container("in the dark"))
	for n := 1; ; n++ {
		status := l.do("DELETE", "/api/v1/jobs/j-0000000000000", l.admin, nil).status
		if status == 503 {
			break
		}
		if status != 404 || n > 1100 {
			t.Fatalf("after %d requests without an audit: %d", n, status)
		}
	}
	l.refused("unavailable", "DELETE", "/api/v1/jobs/"+dark, l.admin, nil)
	l.ok(200, nil, "GET", "/api/v1/jobs/"+dark, l.admin, nil) // reading goes on

	rename("away", "audit")
	light := l.job(l.admin, container("in the light"))
	log := must(l.store.Audit(t.Context(), 0, 5000))
	for _, id := range []string{dark, light} {
		if !slices.ContainsFunc(log, func(e store.AuditEntry) bool { return e.Action == "job.create" && e.Target == id }) {
			t.Errorf("no entry of job %s among %d", id, len(log))
		}
	}
}
