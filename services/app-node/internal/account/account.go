// Package account is who people are: emails, passwords, sign-ins and what a
// person may do.
//
// A sign-in is an opaque token, "cat_" and random digits, of which only the
// SHA-256 is kept. It lasts 24 h from its last use and 30 days in all, and ends at
// once when the password changes or the user is disabled; so do the grants that
// were signed on its strength.
//
// The package does not speak HTTP, know about jobs, or keep API keys; rows are in
// package store.
package account

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"io"
	"net/mail"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/id"
	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

// TokenPrefix stands before every token, so that scanners for leaked secrets find it.
const TokenPrefix = "cat_"

const tokenBytes = 32

var tokenEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// Options are the parts and bounds of Accounts.
type Options struct {
	Store  *store.Store
	Hasher *Hasher
	IDs    *id.Source
	Random io.Reader
	Now    func() time.Time
	// Idle is how long a token lasts after its last use, Longest how long in all.
	Idle, Longest time.Duration
	// OnChange is called after a change that may concern API keys or grants: a user
	// was changed, deleted or signed out everywhere. It must not block.
	OnChange func()
}

// Accounts signs people in and administers them. It is safe for concurrent use.
type Accounts struct {
	Options
	perPair    *Limiter
	perAddress *Limiter
}

// New makes Accounts. Ten failures of one email from one address, or a hundred of
// one address, in ten minutes make the next ones wait.
func New(o Options) *Accounts {
	if o.OnChange == nil {
		o.OnChange = func() {}
	}
	return &Accounts{Options: o,
		perPair:    NewLimiter(10, 10*time.Minute, o.Now),
		perAddress: NewLimiter(100, 10*time.Minute, o.Now),
	}
}

// Person is somebody who is signed in.
type Person struct {
	User     store.User
	Projects []store.Project
	// ExpiresAt is when the token ends if it is not used again.
	ExpiresAt time.Time
	// GrantEpoch is what a grant for the person may be signed under: it was read
	// together with what the person may do.
	GrantEpoch uint64
	hash       []byte
	limit      time.Time
}

// Personal is the id of the person's own project.
func (p Person) Personal() string {
	for _, project := range p.Projects {
		if project.Personal {
			return project.ID
		}
	}
	return ""
}

// ProjectIDs lists the projects the person belongs to.
func (p Person) ProjectIDs() []string {
	ids := make([]string, len(p.Projects))
	for i, project := range p.Projects {
		ids[i] = project.ID
	}
	return ids
}

// Sees tells whether the person may see what belongs to a project. An
// administrator sees all.
func (p Person) Sees(projectID string) bool {
	return p.User.Administrator || (projectID != "" && slices.Contains(p.ProjectIDs(), projectID))
}

// LoginResult is a fresh sign-in.
type LoginResult struct {
	// Token is shown to its holder once and kept nowhere.
	Token     string
	ExpiresAt time.Time
	User      store.User
}

var errLogin = fault.New(fault.Unauthenticated, "the email or the password is wrong, or the user is disabled")

// RetryAfter is inside an `exhausted` fault of Login: when to try again.
type RetryAfter time.Duration

func (r RetryAfter) Error() string { return fmt.Sprintf("wait %v", time.Duration(r)) }

// Login checks a password and makes a token. An unknown email, a wrong password
// and a disabled user give the same answer after the same work.
func (a *Accounts) Login(ctx context.Context, email, password, address string) (LoginResult, error) {
	pair := fmt.Sprintf("%x", sha256.Sum256([]byte(strings.ToLower(email)+"\x00"+address)))
	wait := a.perAddress.Take(address)
	if wait == 0 {
		wait = a.perPair.Take(pair)
	}
	if wait > 0 {
		seconds := int((wait + time.Second - 1) / time.Second)
		return LoginResult{}, fault.Wrap(fault.Exhausted, RetryAfter(wait), "too many failed sign-ins: try again in %d seconds", seconds)
	}
	user, err := a.Store.UserByEmail(ctx, email)
	if err != nil && !fault.Is(err, fault.NotFound) {
		return LoginResult{}, err
	}
	if len(password) > MaximumPasswordBytes {
		password = "" // never good, and not worth hashing
	}
	matches, err := a.Hasher.Matches(ctx, user.PasswordHash, password)
	if err != nil {
		return LoginResult{}, err
	}
	if !matches || user.Disabled {
		return LoginResult{User: store.User{ID: user.ID}}, errLogin
	}
	a.perPair.Forgive(pair)
	a.perAddress.Return(address)

	raw := make([]byte, tokenBytes)
	if _, err := io.ReadFull(a.Random, raw); err != nil {
		return LoginResult{}, fmt.Errorf("read random bytes for a token: %w", err)
	}
	token := TokenPrefix + tokenEncoding.EncodeToString(raw)
	now := a.Now()
	row := store.Token{Hash: tokenHash(token), UserID: user.ID, CreatedAt: now,
		ExpiresAt: now.Add(min(a.Idle, a.Longest)), Limit: now.Add(a.Longest)}
	if err := a.Store.AddToken(ctx, row); err != nil {
		if fault.Is(err, fault.NotFound) || fault.Is(err, fault.Unauthenticated) {
			err = errLogin
		}
		return LoginResult{}, err
	}
	return LoginResult{Token: token, ExpiresAt: row.ExpiresAt, User: user}, nil
}

func tokenHash(token string) []byte {
	sum := sha256.Sum256([]byte(token))
	return sum[:]
}

var errToken = fault.New(fault.Unauthenticated, "the token is unknown or has expired: sign in again")

// Authenticate finds whose token it is and prolongs it. Look-up is by hash, so
// its time says nothing about any token.
func (a *Accounts) Authenticate(ctx context.Context, token string) (Person, error) {
	p, err := a.Introspect(ctx, token)
	if err == nil {
		err = a.prolong(ctx, &p)
	}
	return p, err
}

// Introspect is Authenticate without prolonging.
func (a *Accounts) Introspect(ctx context.Context, token string) (Person, error) {
	digits, ok := strings.CutPrefix(token, TokenPrefix)
	if !ok || len(digits) != tokenEncoding.EncodedLen(tokenBytes) {
		return Person{}, errToken
	}
	hash := tokenHash(token)
	session, err := a.Store.Session(ctx, hash, a.Now())
	if fault.Is(err, fault.NotFound) {
		return Person{}, errToken
	}
	if err != nil {
		return Person{}, err
	}
	return Person{User: session.User, Projects: session.Projects, ExpiresAt: session.Token.ExpiresAt, GrantEpoch: session.GrantEpoch, hash: hash, limit: session.Token.Limit}, nil
}

// prolong writes at most once in a twenty-fourth of the idle time, so that use
// does not mean a write.
func (a *Accounts) prolong(ctx context.Context, p *Person) error {
	expires := a.Now().Add(a.Idle)
	if expires.After(p.limit) {
		expires = p.limit
	}
	if expires.Sub(p.ExpiresAt) < a.Idle/24 {
		return nil
	}
	p.ExpiresAt = expires
	return a.Store.ProlongToken(ctx, p.hash, expires)
}

// Logout ends the sign-in that a person came with.
func (a *Accounts) Logout(ctx context.Context, p Person) error {
	return a.Store.RemoveToken(ctx, p.hash)
}

// EndSessions ends every sign-in of a user and voids every grant: their open
// shells close.
func (a *Accounts) EndSessions(ctx context.Context, userID string) error {
	err := a.Store.EndSessions(ctx, userID, a.Now())
	if err == nil {
		a.OnChange()
	}
	return err
}

// ChangePassword sets a person's own password and ends all of their sign-ins and
// shells.
func (a *Accounts) ChangePassword(ctx context.Context, p Person, current, next, address string) error {
	key := p.User.ID + "\x00" + address
	if wait := a.perPair.Take(key); wait > 0 {
		return fault.Wrap(fault.Exhausted, RetryAfter(wait), "too many wrong passwords: try again later")
	}
	matches, err := a.Hasher.Matches(ctx, p.User.PasswordHash, current)
	if err != nil {
		return err
	}
	if !matches {
		return fault.New(fault.Denied, "the current password is wrong").
			With(fault.Detail{Field: "current_password", Rule: "must be your password"})
	}
	a.perPair.Forgive(key)
	if err := CheckPolicy(next, p.User.Email); err != nil {
		return renameDetail(err, "new_password")
	}
	_, err = a.change(ctx, p.User.ID, Change{Password: &next})
	return err
}

func renameDetail(err error, field string) error {
	details := fault.DetailsOf(err)
	out := make([]fault.Detail, len(details))
	for i, d := range details {
		out[i] = fault.Detail{Field: field, Rule: d.Rule}
	}
	return fault.New(fault.KindOf(err), "%s", err.Error()).With(out...)
}

// NewUser is what is needed to make a user.
type NewUser struct {
	Email         string
	Password      string
	Administrator bool
}

// CreateUser makes a user with a personal project.
func (a *Accounts) CreateUser(ctx context.Context, n NewUser) (store.User, error) {
	user, project, err := a.prepare(ctx, n)
	if err != nil {
		return store.User{}, err
	}
	return user, a.Store.CreateUser(ctx, user, project)
}

// EnsureAdministrator makes the first administrator, or with reset sets the
// password of one. See store.EnsureAdministrator.
func (a *Accounts) EnsureAdministrator(ctx context.Context, email, password string, reset bool) (string, error) {
	user, project, err := a.prepare(ctx, NewUser{Email: email, Password: password, Administrator: true})
	if err != nil {
		return "", err
	}
	return a.Store.EnsureAdministrator(ctx, user, project, reset)
}

func (a *Accounts) prepare(ctx context.Context, n NewUser) (store.User, store.Project, error) {
	email, err := CheckEmail(n.Email)
	if err != nil {
		return store.User{}, store.Project{}, err
	}
	if err := CheckPolicy(n.Password, email); err != nil {
		return store.User{}, store.Project{}, err
	}
	hash, err := a.Hasher.Hash(ctx, n.Password)
	if err != nil {
		return store.User{}, store.Project{}, err
	}
	now := a.Now().UTC().Truncate(time.Millisecond)
	user := store.User{ID: a.IDs.New(id.User), Email: email, PasswordHash: hash, Administrator: n.Administrator, CreatedAt: now, UpdatedAt: now}
	return user, store.Project{ID: a.IDs.New(id.Project), Name: "personal"}, nil
}

// Change says what to change of a user; nil leaves it.
type Change struct {
	Password      *string
	Administrator *bool
	Disabled      *bool
}

// ChangeUser applies an administrator's change to a user.
func (a *Accounts) ChangeUser(ctx context.Context, userID string, c Change) (store.User, error) {
	if c.Password != nil {
		user, err := a.Store.User(ctx, userID)
		if err != nil {
			return user, err
		}
		if err := CheckPolicy(*c.Password, user.Email); err != nil {
			return user, err
		}
	}
	return a.change(ctx, userID, c)
}

func (a *Accounts) change(ctx context.Context, userID string, c Change) (store.User, error) {
	row := store.UserChange{Administrator: c.Administrator, Disabled: c.Disabled}
	if c.Password != nil {
		hash, err := a.Hasher.Hash(ctx, *c.Password)
		if err != nil {
			return store.User{}, err
		}
		row.PasswordHash = &hash
	}
	user, err := a.Store.ChangeUser(ctx, userID, row, a.Now())
	if err == nil {
		a.OnChange()
	}
	return user, err
}

// DeleteUser ends a user, with sign-ins and API keys.
func (a *Accounts) DeleteUser(ctx context.Context, userID string) error {
	err := a.Store.DeleteUser(ctx, userID, a.Now())
	if err == nil {
		a.OnChange()
	}
	return err
}

// CheckEmail checks an email and returns it trimmed.
func CheckEmail(email string) (string, error) {
	refuse := func(rule string) (string, error) {
		return "", fault.New(fault.Invalid, "the email %s", rule).With(fault.Detail{Field: "email", Rule: rule})
	}
	email = strings.TrimSpace(email)
	switch {
	case email == "":
		return refuse("is required")
	case len(email) > 254:
		return refuse("must have at most 254 bytes")
	case strings.ContainsFunc(email, func(r rune) bool { return r <= ' ' || r > '~' }):
		// Look-alikes and invisible characters would make two people look like one.
		return refuse("must be printable ASCII without spaces")
	}
	parsed, err := mail.ParseAddress(email)
	if err != nil || parsed.Address != email || parsed.Name != "" || !strings.Contains(email, "@") {
		return refuse("must look like name@example.org")
	}
	return email, nil
}

// CheckName checks a name that people give to things: 1 to 63 characters, any
// letters, no control or invisible characters. It returns the name as it is.
func CheckName(field, name string) error {
	refuse := func(rule string) error {
		return fault.New(fault.Invalid, "the %s %s", field, rule).With(fault.Detail{Field: field, Rule: rule})
	}
	switch {
	case !utf8.ValidString(name):
		return refuse("must be UTF-8 text")
	case strings.TrimSpace(name) == "":
		return refuse("must have 1 to 63 characters")
	case utf8.RuneCountInString(name) > 63:
		return refuse("must have 1 to 63 characters")
	case strings.TrimSpace(name) != name:
		return refuse("must not begin or end with a space")
	case strings.ContainsFunc(name, notPrintable):
		return refuse("must not hold line breaks, control characters or characters that change the direction of text")
	}
	return nil
}

// notPrintable is true for what could break a line of a list or a log. The two
// joiners are letters' companions in several scripts and in emoji.
func notPrintable(r rune) bool {
	if r == '\u200c' || r == '\u200d' {
		return false
	}
	return unicode.IsControl(r) || unicode.In(r, unicode.Cf, unicode.Zl, unicode.Zp, unicode.Co, unicode.Cs)
}
