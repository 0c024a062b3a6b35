package store

import (
	"context"
	"database/sql"
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// User is a person who may sign in.
type User struct {
	ID            string
	Email         string
	PasswordHash  string
	Administrator bool
	Disabled      bool
	CreatedAt     time.Time
	UpdatedAt     time.Time
}

// Project owns jobs and API keys.
type Project struct {
	ID   string
	Name string
	// Personal marks the one project that a user was born with.
	Personal bool
}

// UserChange says what to change of a user; nil leaves a field as it is.
type UserChange struct {
	PasswordHash  *string
	Administrator *bool
	Disabled      *bool
}

const userColumns = "id, email, password_hash, administrator, disabled, created_at, updated_at"

func scanUser(row scanner) (User, error) {
	var u User
	var created, updated int64
	err := row.Scan(&u.ID, &u.Email, &u.PasswordHash, &u.Administrator, &u.Disabled, &created, &updated)
	u.CreatedAt, u.UpdatedAt = at(created), at(updated)
	return u, err
}

func emailKey(email string) string { return strings.ToLower(email) }

// CreateUser adds a user with a personal project. An email in use is a conflict.
func (s *Store) CreateUser(ctx context.Context, u User, personal Project) error {
	return s.write(ctx, func(tx *sql.Tx) error { return createUser(ctx, tx, u, personal) })
}

func createUser(ctx context.Context, tx *sql.Tx, u User, personal Project) error {
	var exists bool
	err := tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM users WHERE email_key = ? AND deleted_at IS NULL)",
		emailKey(u.Email)).Scan(&exists)
	if err != nil {
		return err
	}
	if exists {
		return fault.New(fault.Conflict, "a user with the email %q exists already", u.Email).
			With(fault.Detail{Field: "email", Rule: "must not be in use"})
	}
	created := milliseconds(u.CreatedAt)
	_, err = tx.ExecContext(ctx, `INSERT INTO users (id, email, email_key, password_hash, administrator, disabled, created_at, updated_at)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?)`,
		u.ID, u.Email, emailKey(u.Email), u.PasswordHash, u.Administrator, u.Disabled, created, created)
	if err != nil {
		return err
	}
	if _, err = tx.ExecContext(ctx, "INSERT INTO projects (id, name, created_at) VALUES (?, ?, ?)",
		personal.ID, personal.Name, created); err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, "INSERT INTO memberships (project_id, user_id, personal) VALUES (?, ?, 1)", personal.ID, u.ID)
	return err
}

// EnsureAdministrator makes u the administrator of an installation that has none.
// With reset, an administrator may exist already, and a user with this email gets
// the new password and the power, is enabled, and loses every token and grant. The
// id that stands for the email afterwards is returned.
func (s *Store) EnsureAdministrator(ctx context.Context, u User, personal Project, reset bool) (id string, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		var existing sql.NullString
		err := tx.QueryRowContext(ctx, "SELECT min(email) FROM users WHERE administrator = 1 AND deleted_at IS NULL").Scan(&existing)
		if err != nil {
			return err
		}
		if existing.Valid && !reset {
			return fault.New(fault.Conflict, "an administrator exists already (%s): use --force-reset to set a new password or add one", existing.String)
		}
		id = u.ID
		err = tx.QueryRowContext(ctx, "SELECT id FROM users WHERE email_key = ? AND deleted_at IS NULL", emailKey(u.Email)).Scan(&id)
		switch {
		case err == sql.ErrNoRows:
			return createUser(ctx, tx, u, personal)
		case err != nil:
			return err
		}
		was, err := userIn(ctx, tx, id)
		if err != nil {
			return err
		}
		if err := revokeGrants(ctx, tx, was, u.CreatedAt); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, "UPDATE users SET password_hash = ?, administrator = 1, disabled = 0, updated_at = ? WHERE id = ?",
			u.PasswordHash, milliseconds(u.CreatedAt), id)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, "DELETE FROM tokens WHERE user_id = ?", id)
		return err
	})
	return id, err
}

// HasAdministrator tells whether anybody can administer the installation.
func (s *Store) HasAdministrator(ctx context.Context) (has bool, err error) {
	err = s.read(ctx, func(tx *sql.Tx) error {
		return tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM users WHERE administrator = 1 AND disabled = 0 AND deleted_at IS NULL)").Scan(&has)
	})
	return has, err
}

// UserByEmail finds a user whatever the case of the email's letters.
func (s *Store) UserByEmail(ctx context.Context, email string) (u User, err error) {
	err = s.read(ctx, func(tx *sql.Tx) error {
		u, err = scanUser(tx.QueryRowContext(ctx, "SELECT "+userColumns+" FROM users WHERE email_key = ? AND deleted_at IS NULL", emailKey(email)))
		return notFound(err, "user")
	})
	return u, err
}

// User finds a user by id.
func (s *Store) User(ctx context.Context, id string) (u User, err error) {
	err = s.read(ctx, func(tx *sql.Tx) error {
		u, err = userIn(ctx, tx, id)
		return err
	})
	return u, err
}

func userIn(ctx context.Context, tx *sql.Tx, id string) (User, error) {
	u, err := scanUser(tx.QueryRowContext(ctx, "SELECT "+userColumns+" FROM users WHERE id = ? AND deleted_at IS NULL", id))
	return u, notFound(err, "user")
}

// Users lists every user, oldest first.
func (s *Store) Users(ctx context.Context) (users []User, err error) {
	err = s.read(ctx, func(tx *sql.Tx) error {
		rows, err := tx.QueryContext(ctx, "SELECT "+userColumns+" FROM users WHERE deleted_at IS NULL ORDER BY created_at, id")
		return each(rows, err, func(row scanner) error {
			u, err := scanUser(row)
			users = append(users, u)
			return err
		})
	})
	return users, err
}

// ChangeUser applies a change. A new password or disabling revokes every token and
// grant of the user at once, losing the administrator's power every grant. The last
// enabled administrator stays one.
func (s *Store) ChangeUser(ctx context.Context, id string, change UserChange, now time.Time) (u User, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		if u, err = userIn(ctx, tx, id); err != nil {
			return err
		}
		wasActive := u.Administrator && !u.Disabled
		was := u
		if change.PasswordHash != nil {
			u.PasswordHash = *change.PasswordHash
		}
		if change.Administrator != nil {
			u.Administrator = *change.Administrator
		}
		if change.Disabled != nil {
			u.Disabled = *change.Disabled
		}
		if wasActive && (!u.Administrator || u.Disabled) {
			if err := anotherAdministrator(ctx, tx, id); err != nil {
				return err
			}
		}
		if change.PasswordHash != nil || (u.Disabled && !was.Disabled) || (was.Administrator && !u.Administrator) {
			if err := revokeGrants(ctx, tx, was, now); err != nil {
				return err
			}
		}
		u.UpdatedAt = at(milliseconds(now))
		if _, err := tx.ExecContext(ctx, "UPDATE users SET password_hash = ?, administrator = ?, disabled = ?, updated_at = ? WHERE id = ?",
			u.PasswordHash, u.Administrator, u.Disabled, milliseconds(now), id); err != nil {
			return err
		}
		if change.PasswordHash == nil && !u.Disabled {
			return nil
		}
		_, err := tx.ExecContext(ctx, "DELETE FROM tokens WHERE user_id = ?", id)
		return err
	})
	return u, err
}

// DeleteUser ends a user: tokens go, grants and API keys are revoked, the email is
// free again. The row stays for the audit log and the ledger.
func (s *Store) DeleteUser(ctx context.Context, id string, now time.Time) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		u, err := userIn(ctx, tx, id)
		if err != nil {
			return err
		}
		if u.Administrator && !u.Disabled {
			if err := anotherAdministrator(ctx, tx, id); err != nil {
				return err
			}
		}
		if err := revokeGrants(ctx, tx, u, now); err != nil {
			return err
		}
		ms := milliseconds(now)
		if _, err := tx.ExecContext(ctx, "UPDATE users SET deleted_at = ?, disabled = 1, password_hash = '', updated_at = ? WHERE id = ?", ms, ms, id); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "DELETE FROM tokens WHERE user_id = ?", id); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, "UPDATE api_keys SET revoked_at = ?, updated_at = ? WHERE user_id = ? AND revoked_at IS NULL", ms, ms, id)
		return err
	})
}

func anotherAdministrator(ctx context.Context, tx *sql.Tx, id string) error {
	var other bool
	err := tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM users
		WHERE id <> ? AND administrator = 1 AND disabled = 0 AND deleted_at IS NULL)`, id).Scan(&other)
	if err == nil && !other {
		return fault.New(fault.FailedPrecondition, "this is the last administrator: make another one first")
	}
	return err
}

// ProjectsOf lists the projects of a user, the personal one first.
func (s *Store) ProjectsOf(ctx context.Context, userID string) (projects []Project, err error) {
	err = s.read(ctx, func(tx *sql.Tx) error {
		projects, err = projectsIn(ctx, tx, userID)
		return err
	})
	return projects, err
}

func projectsIn(ctx context.Context, tx *sql.Tx, userID string) (projects []Project, err error) {
	rows, err := tx.QueryContext(ctx, `SELECT p.id, p.name, m.personal FROM memberships m JOIN projects p ON p.id = m.project_id
		WHERE m.user_id = ? ORDER BY m.personal DESC, p.created_at, p.id`, userID)
	err = each(rows, err, func(row scanner) error {
		var p Project
		err := row.Scan(&p.ID, &p.Name, &p.Personal)
		projects = append(projects, p)
		return err
	})
	return projects, err
}
