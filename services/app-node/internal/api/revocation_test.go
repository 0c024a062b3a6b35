package api_test

import (
	"crypto/rand"
	"encoding/base64"
	"strings"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// runningJob makes a job of somebody's that can be reached, and its project.
func (l *lab) runningJob(token string) (jobID, projectID string) {
	l.t.Helper()
	jobID = l.job(token, container("shell me"))
	l.ork.run(jobID, must(identity.New(rand.Reader)).ID().String())
	l.ork.mu.Lock()
	defer l.ork.mu.Unlock()
	return jobID, l.ork.jobs[jobID].GetOwner().GetProjectId()
}

// grantEpoch asks for a grant and returns the epoch that it was signed under.
func (l *lab) grantEpoch(token, jobID string) uint64 {
	l.t.Helper()
	var out struct{ Grant string }
	l.ok(201, &out, "POST", "/api/v1/jobs/"+jobID+"/grants", token, map[string]any{"client_key": must(identity.New(rand.Reader)).Hex()})
	return must(trust.OpenGrant(must(base64.StdEncoding.DecodeString(out.Grant)))).GetEpoch()
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !f(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

func TestWhoLosesARightLosesTheGrantsSignedOnIt(t *testing.T) {
	t.Parallel()
	const next = "a password of tomorrow"
	l := newLab(t) // one for all: passwords cost their time
	_, other := l.user("bob@example.org")
	_, otherProject := l.runningJob(other)
	for name, c := range map[string]struct {
		lose func(userID, token string)
		// password is what the user signs in with afterwards, empty for not at all.
		password string
	}{
		"disabled": {func(userID, _ string) {
			l.ok(200, nil, "PATCH", "/api/v1/users/"+userID, l.admin, map[string]any{"disabled": true})
		}, ""},
		"password reset": {func(userID, _ string) {
			l.ok(200, nil, "PATCH", "/api/v1/users/"+userID, l.admin, map[string]any{"password": next})
		}, next},
		"own new password": {func(_, token string) {
			l.ok(204, nil, "POST", "/api/v1/me/password", token, map[string]any{"current_password": userPassword, "new_password": next})
		}, next},
		"logged out everywhere": {func(_, token string) {
			l.ok(204, nil, "POST", "/api/v1/me/logout-everywhere", token, nil)
		}, userPassword},
		"logged out by an administrator": {func(userID, _ string) {
			l.ok(204, nil, "POST", "/api/v1/users/"+userID+"/logout", l.admin, nil)
		}, userPassword},
		"removed": {func(userID, _ string) {
			l.ork.mu.Lock()
			for _, j := range l.ork.jobs {
				if j.Owner.UserId == userID {
					j.Owner.ProjectId = "p-elsewhere" // a user with jobs is not removed
				}
			}
			l.ork.mu.Unlock()
			l.ok(204, nil, "DELETE", "/api/v1/users/"+userID, l.admin, nil)
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			email := strings.ReplaceAll(name, " ", "-") + "@example.org"
			userID, token := l.user(email)
			jobID, project := l.runningJob(token)
			before := l.grantEpoch(token, jobID)
			c.lose(userID, token)
			eventually(t, "wrk-ork is told that the grant is void", func() bool { return l.ork.floor(userID, project) > before })
			if l.ork.floor(userID, otherProject) != 0 {
				t.Error("agents of another project are told of it")
			}
			l.refused("unauthenticated", "POST", "/api/v1/jobs/"+jobID+"/grants", token, map[string]any{"client_key": "x"})
			if c.password == "" {
				l.refused("unauthenticated", "POST", "/api/v1/login", "", map[string]any{"email": email, "password": userPassword})
				return
			}
			if after := l.grantEpoch(l.login(email, c.password), jobID); after < l.ork.floor(userID, project) {
				t.Errorf("a grant of the new sign-in has epoch %d, which is void", after)
			}
		})
	}
}

func TestAnAdministratorNoLongerLosesGrantsInEveryProject(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	userID, token := l.user("ana@example.org")
	_, other := l.user("bob@example.org")
	jobID, project := l.runningJob(other)
	l.ok(200, nil, "PATCH", "/api/v1/users/"+userID, l.admin, map[string]any{"administrator": true})
	before := l.grantEpoch(token, jobID)
	l.ok(200, nil, "PATCH", "/api/v1/users/"+userID, l.admin, map[string]any{"administrator": false})
	eventually(t, "wrk-ork is told", func() bool { return l.ork.floor(userID, project) > before })
	l.ok(200, nil, "GET", "/api/v1/me", token, nil) // signed in as before, with less to see
	l.refused("not_found", "POST", "/api/v1/jobs/"+jobID+"/grants", token, map[string]any{"client_key": "x"})
}

func TestAGrantThatIsAskedForWhileTheRightGoesIsVoid(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	userID, token := l.user("ana@example.org")
	_, project := l.runningJob(token)
	// The request was let in, and the user is disabled before it is answered.
	person := must(l.accounts.Authenticate(t.Context(), token))
	l.ok(200, nil, "PATCH", "/api/v1/users/"+userID, l.admin, map[string]any{"disabled": true})
	eventually(t, "the grant that it would get is void", func() bool { return l.ork.floor(userID, project) > person.GrantEpoch })
}

func TestRevocationsWaitForAnOrchestratorThatIsAway(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	userID, token := l.user("ana@example.org")
	_, project := l.runningJob(token)
	l.away.set(true)
	l.ok(200, nil, "PATCH", "/api/v1/users/"+userID, l.admin, map[string]any{"disabled": true})
	eventually(t, "the log says that shells go on meanwhile", func() bool {
		return strings.Contains(l.log.String(), "open shells of revoked users go on until it is")
	})
	if l.ork.floor(userID, project) != 0 {
		t.Error("told although away")
	}
	l.away.set(false)
	eventually(t, "wrk-ork is told once it is back", func() bool { return l.ork.floor(userID, project) > 0 })
}

func TestAnAppNodeRestoredFromABackupCountsOn(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, token := l.user("ana@example.org")
	jobID, _ := l.runningJob(token)
	// The orchestrator remembers revocations of after the backup.
	l.ork.mu.Lock()
	l.ork.highest = 40
	l.ork.mu.Unlock()
	l.ok(204, nil, "POST", "/api/v1/users/"+l.whoami(l.admin)+"/logout", l.admin, nil)
	eventually(t, "grants are good again", func() bool { return l.grantEpoch(token, jobID) >= 40 })
}

func (l *lab) whoami(token string) string {
	l.t.Helper()
	var me struct{ User struct{ ID string } }
	l.ok(200, &me, "GET", "/api/v1/me", token, nil)
	return me.User.ID
}

var _ orkv1.RevocationsServer = (*fakeOrk)(nil)
