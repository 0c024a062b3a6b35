// Package store is the one SQLite file of a daemon that keeps state.
//
// There is one writer: Write runs its functions one after another, each in a
// transaction of its own that commits when the function returns nil. Reads run
// beside it on other connections and see the last committed state as of their
// start; they never wait for the writer. The file is in WAL mode with
// synchronous=NORMAL: a committed write survives the death of the process; the
// last ones before a power failure may be lost, never half of one. A write for
// which the disk has no room is an error and leaves nothing; reads go on, and so do
// writes once there is room again.
//
// The folder of the file is locked while the Store is open, so that two processes
// cannot share a state folder. Migrations are numbered SQL files, each applied
// once in a transaction; a file that a newer version wrote is refused.
//
// It does not map rows to structs, does not retry a function, does not hide SQL,
// and keeps no statement open after Read or Write returns. A function given to
// Read or Write must not call the Store again: Write inside Write would wait for
// itself, which is noticed and refused.
package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/store/dirlock"
)

// readers is how many reads run at the same time; more wait.
const readers = 8

// busyMilliseconds is how long SQLite waits for a lock held by another process,
// such as a backup tool.
const busyMilliseconds = 5000

// Store is an open database. It is safe for concurrent use.
type Store struct {
	path   string
	lock   *dirlock.Lock
	write  *sql.DB // one connection
	read   *sql.DB
	turn   chan struct{} // holds the writer's turn
	close  sync.Once
	closed chan struct{}
}

// Open opens or creates the database at path, whose folder must exist, locks the
// folder, and applies the migrations that are missing. Migrations are files
// named NNNN_name.sql at the root of the file system given, numbered from 0001
// without holes.
func Open(ctx context.Context, path string, migrations fs.FS) (*Store, error) {
	steps, err := readMigrations(migrations)
	if err != nil {
		return nil, err
	}
	lock, err := dirlock.Take(filepath.Dir(path), filepath.Base(path)+".lock")
	if err != nil {
		return nil, err
	}
	s := &Store{path: path, lock: lock, turn: make(chan struct{}, 1), closed: make(chan struct{})}
	if err := s.open(ctx, steps); err != nil {
		_ = s.Close()
		return nil, err
	}
	return s, nil
}

func (s *Store) open(ctx context.Context, steps []migration) (err error) {
	// The file may hold hashes of keys: nobody else needs to read it.
	f, err := os.OpenFile(s.path, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return unavailable(err, "open database %s", s.path)
	}
	_ = f.Close()
	if s.write, err = connect(s.path, "rwc", "immediate", 1); err != nil {
		return err
	}
	if s.read, err = connect(s.path, "ro", "deferred", readers); err != nil {
		return err
	}
	// WAL is a property of the file: set before the first reader comes.
	if _, err := s.write.ExecContext(ctx, "PRAGMA journal_mode=WAL"); err != nil {
		return broken(err, "open", s.path)
	}
	if err := s.migrate(ctx, steps); err != nil {
		return err
	}
	if err := s.read.PingContext(ctx); err != nil {
		return broken(err, "open", s.path)
	}
	return nil
}

func connect(path, mode, begin string, connections int) (*sql.DB, error) {
	q := url.Values{"mode": {mode}, "_txlock": {begin}, "_pragma": {
		fmt.Sprintf("busy_timeout(%d)", busyMilliseconds),
		"foreign_keys(1)", "synchronous(NORMAL)", "temp_store(MEMORY)", "cache_size(-8192)",
	}}
	if mode == "ro" {
		q.Add("_pragma", "query_only(1)")
	}
	absolute, err := filepath.Abs(path)
	if err != nil {
		return nil, unavailable(err, "open database %s", path)
	}
	db, err := sql.Open("sqlite", (&url.URL{Scheme: "file", Path: absolute, RawQuery: q.Encode()}).String())
	if err != nil {
		return nil, unavailable(err, "open database %s", path)
	}
	db.SetMaxOpenConns(connections)
	db.SetMaxIdleConns(connections)
	return db, nil
}

// Path is the database file.
func (s *Store) Path() string { return s.path }

// Read runs f in a transaction that can only read. It may run beside others and
// beside the writer. An error of f comes back as it is if it has a kind already.
func (s *Store) Read(ctx context.Context, f func(*sql.Tx) error) error {
	tx, err := s.read.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return s.classify(ctx, err, "read from")
	}
	defer func() { _ = tx.Rollback() }()
	return s.classify(ctx, f(tx), "read from")
}

// writing marks a context inside Write.
type writing struct{ *Store }

// Write runs f alone, in a transaction that is committed if f returns nil and
// undone otherwise, also when f panics. It waits for its turn as long as ctx
// lasts. If Commit's outcome is an error, nothing was written.
func (s *Store) Write(ctx context.Context, f func(*sql.Tx) error) error {
	return s.WriteContext(ctx, func(_ context.Context, tx *sql.Tx) error { return f(tx) })
}

// WriteContext is Write with a context that knows it is inside one: a second
// Write with it is refused instead of waiting for itself.
func (s *Store) WriteContext(ctx context.Context, f func(context.Context, *sql.Tx) error) error {
	if ctx.Value(writing{s}) != nil {
		return fault.New(fault.Internal, "write to %s inside a write", filepath.Base(s.path))
	}
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-s.closed:
		return unavailable(nil, "write to %s: the database is closed", filepath.Base(s.path))
	case <-ctx.Done():
		return s.classify(ctx, ctx.Err(), "wait to write to")
	}
	tx, err := s.write.BeginTx(ctx, nil)
	if err != nil {
		return s.classify(ctx, err, "write to")
	}
	defer func() { _ = tx.Rollback() }()
	if err := f(context.WithValue(ctx, writing{s}, true), tx); err != nil {
		return s.classify(ctx, err, "write to")
	}
	return s.classify(ctx, tx.Commit(), "write to")
}

// Backup writes a consistent copy to a new file while reads and writes go on.
// The copy has no WAL beside it. A file that exists is refused.
func (s *Store) Backup(ctx context.Context, path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return fault.New(fault.Conflict, "back up to %s: the file exists already", path)
	}
	if err != nil {
		return unavailable(err, "back up to %s", path)
	}
	_ = f.Close()
	// A connection that may write: VACUUM INTO reads this file, yet is refused
	// under query_only. WAL lets the writer go on meanwhile.
	db, err := connect(s.path, "rw", "deferred", 1)
	if err != nil {
		return err
	}
	defer db.Close()
	if _, err := db.ExecContext(ctx, "VACUUM INTO ?", path); err != nil {
		_ = os.Remove(path)
		return s.classify(ctx, err, "back up")
	}
	return nil
}

// Close waits for the writer, closes the file and unlocks the folder. Reads that
// still run end with an error.
func (s *Store) Close() error {
	var errs []error
	s.close.Do(func() {
		close(s.closed)
		s.turn <- struct{}{} // the running write ends first; the turn is never given back
		for _, db := range []*sql.DB{s.read, s.write} {
			if db != nil {
				errs = append(errs, db.Close())
			}
		}
		errs = append(errs, s.lock.Unlock())
	})
	if err := errors.Join(errs...); err != nil {
		return unavailable(err, "close database %s", s.path)
	}
	return nil
}

// classify gives an error of the driver a kind, and leaves those that have one.
func (s *Store) classify(ctx context.Context, err error, doing string) error {
	if err == nil {
		return nil
	}
	var e *fault.Error
	if errors.As(err, &e) {
		return err
	}
	name := filepath.Base(s.path)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return fault.Wrap(fault.NotFound, err, "%s %s", doing, name)
	case ctx.Err() != nil:
		return fault.Wrap(fault.KindOf(ctx.Err()), err, "%s %s", doing, name)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fault.Wrap(fault.KindOf(err), err, "%s %s", doing, name)
	}
	var se *sqlite.Error
	if errors.As(err, &se) {
		switch se.Code() & 0xff {
		case sqlite3.SQLITE_CONSTRAINT:
			kind := fault.Internal
			switch se.Code() {
			case sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_ROWID:
				kind = fault.Conflict
			case sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY:
				kind = fault.FailedPrecondition
			}
			return fault.Wrap(kind, err, "%s %s", doing, name)
		case sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISUSE, sqlite3.SQLITE_RANGE, sqlite3.SQLITE_MISMATCH:
			return fault.Wrap(fault.Internal, err, "%s %s", doing, name) // wrong SQL: a defect
		}
		return broken(err, doing, name)
	}
	if errors.Is(err, sql.ErrConnDone) || errors.Is(err, sql.ErrTxDone) || err.Error() == "sql: database is closed" {
		return unavailable(err, "%s %s", doing, name)
	}
	// An error of the function itself.
	return err
}

// broken is an error of the file itself, in words that say what to do. Who opens it
// has its path named; what comes later reaches users, whom the host's folders do not
// concern: an operator finds the file in the state folder of the service.
func broken(err error, doing, name string) error {
	var se *sqlite.Error
	if errors.As(err, &se) {
		switch se.Code() & 0xff {
		case sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT:
			return unavailable(err, "%s database %s: the file is damaged or is no database; stop this service, put the file aside together with its -wal and -shm, and restore a backup",
				doing, name)
		case sqlite3.SQLITE_FULL:
			return unavailable(err, "%s database %s: its disk is full and nothing of this was kept; free space there, it goes on by itself", doing, name)
		}
	}
	return unavailable(err, "%s database %s", doing, name)
}

func unavailable(err error, format string, a ...any) error {
	return fault.Wrap(fault.Unavailable, err, format, a...).With(fault.Detail{Field: "reason", Rule: "storage"})
}
