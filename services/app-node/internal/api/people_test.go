package api_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
)

func TestSigningInAndOut(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	var in struct {
		Token     string
		ExpiresAt time.Time `json:"expires_at"`
		User      struct {
			ID, Email     string
			Administrator bool
		}
	}
	l.ok(200, &in, "POST", "/api/v1/login", "", map[string]string{"email": "ROOT@example.org", "password": adminPassword})
	if !strings.HasPrefix(in.Token, "cat_") || !in.User.Administrator || in.User.Email != adminEmail || !strings.HasPrefix(in.User.ID, "u-") {
		t.Fatalf("unexpected sign-in of %+v", in.User)
	}
	if d := in.ExpiresAt.Sub(l.clock.Now()); d != 24*time.Hour {
		t.Errorf("expires in %v", d)
	}
	var me struct {
		User     struct{ ID string }
		Projects []struct{ ID, Name string }
	}
	l.ok(200, &me, "GET", "/api/v1/me", in.Token, nil)
	if me.User.ID != in.User.ID || len(me.Projects) != 1 || !strings.HasPrefix(me.Projects[0].ID, "p-") {
		t.Errorf("unexpected me: %+v", me)
	}
	l.ok(204, nil, "POST", "/api/v1/logout", in.Token, nil)
	l.refused("unauthenticated", "GET", "/api/v1/me", in.Token, nil)
	l.ok(200, nil, "GET", "/api/v1/me", l.admin, nil)
}

func TestATokenLastsADayFromItsLastUseAndThirtyDaysInAll(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	idle := l.login(adminEmail, adminPassword)
	for range 31 {
		l.clock.move(23 * time.Hour)
		l.ok(200, nil, "GET", "/api/v1/me", l.admin, nil)
	}
	l.refused("unauthenticated", "GET", "/api/v1/me", idle, nil)
	l.clock.move(23 * time.Hour)
	l.refused("unauthenticated", "GET", "/api/v1/me", l.admin, nil)
}

func TestAWrongPasswordAnUnknownUserAndADisabledOneGetTheSameAnswer(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	userID, token := l.user("ana@example.org")
	l.ok(200, nil, "PATCH", "/api/v1/users/"+userID, l.admin, map[string]any{"disabled": true})
	l.refused("unauthenticated", "GET", "/api/v1/me", token, nil)
	var details []string
	for _, c := range [][2]string{{"ana@example.org", userPassword}, {"nobody@example.org", userPassword}, {adminEmail, "wrong password!"}} {
		p := l.refused("unauthenticated", "POST", "/api/v1/login", "", map[string]string{"email": c[0], "password": c[1]})
		details = append(details, p.Detail)
	}
	if details[0] != details[1] || details[1] != details[2] {
		t.Errorf("answers differ: %q", details)
	}
	l.ok(200, nil, "PATCH", "/api/v1/users/"+userID, l.admin, map[string]any{"disabled": false})
	l.login("ana@example.org", userPassword)
}

func TestGuessingPasswordsIsSlowedDown(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	guess := map[string]string{"email": adminEmail, "password": "wrong password!"}
	from := []string{"X-Forwarded-For", "203.0.113.9"}
	for range 10 {
		l.refused("unauthenticated", "POST", "/api/v1/login", "", guess, from...)
	}
	r := l.do("POST", "/api/v1/login", "", map[string]string{"email": adminEmail, "password": adminPassword}, from...)
	if r.status != 429 || r.header.Get("Retry-After") == "" {
		t.Fatalf("the eleventh try got %d %s", r.status, r.body)
	}
	// Others are not locked out, and neither is this address for good.
	l.ok(200, nil, "POST", "/api/v1/login", "", map[string]string{"email": adminEmail, "password": adminPassword}, "X-Forwarded-For", "203.0.113.10")
	l.clock.move(21 * time.Minute)
	l.ok(200, nil, "POST", "/api/v1/login", "", map[string]string{"email": adminEmail, "password": adminPassword}, from...)
}

func TestSecretsAreNeitherLoggedNorAnswered(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	secret := "s3cret-" + strings.Repeat("x", 20)
	l.do("POST", "/api/v1/login", "", map[string]string{"email": adminEmail, "password": secret})
	l.do("POST", "/api/v1/login", "", `{"email": 5, "password": "`+secret+`"`)
	l.do("POST", "/api/v1/login", "", map[string]any{"email": adminEmail, "password": []string{secret}})
	l.do("POST", "/api/v1/login", "", map[string]any{"email": adminEmail, "password": secret + strings.Repeat("y", 2000)})
	l.do("POST", "/api/v1/users", l.admin, map[string]any{"email": "not an email", "password": secret})
	userID, _ := l.user("ana@example.org")
	l.ok(200, nil, "PATCH", "/api/v1/users/"+userID, l.admin, map[string]any{"password": secret})
	token := l.login("ana@example.org", secret)
	var made struct{ Key string }
	l.ok(201, &made, "POST", "/api/v1/api-keys", token, map[string]any{"name": "k"})
	seen := l.log.String()
	for _, path := range []string{"/api/v1/users", "/api/v1/audit", "/api/v1/me", "/api/v1/api-keys"} {
		seen += string(l.do("GET", path, l.admin, nil).body) + string(l.do("GET", path, token, nil).body)
	}
	families, err := l.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	seen += fmt.Sprint(families)
	for what, text := range map[string]string{"the password": secret, "the token": token, "the key": made.Key, "the administrator's token": l.admin} {
		if strings.Contains(seen, text) {
			t.Errorf("%s is in the log, the metrics, the audit or an answer", what)
		}
	}
}

func TestChangingAPasswordEndsEverySignIn(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, first := l.user("ana@example.org")
	second := l.login("ana@example.org", userPassword)
	change := func(current, next string) map[string]string {
		return map[string]string{"current_password": current, "new_password": next}
	}
	l.refused("denied", "POST", "/api/v1/me/password", first, change("not my password", "a brand new password"))
	if p := l.refused("invalid", "POST", "/api/v1/me/password", first, change(userPassword, "short")); !p.names("body.new_password") {
		t.Errorf("the field is not named: %+v", p)
	}
	l.ok(204, nil, "POST", "/api/v1/me/password", first, change(userPassword, "a brand new password"))
	l.refused("unauthenticated", "GET", "/api/v1/me", first, nil)
	l.refused("unauthenticated", "GET", "/api/v1/me", second, nil)
	l.login("ana@example.org", "a brand new password")
}

func TestOnlyAdministratorsAdministerAndTheLastOneStays(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	userID, token := l.user("ana@example.org")
	for _, c := range [][2]string{{"GET", "/api/v1/users"}, {"GET", "/api/v1/audit"}, {"DELETE", "/api/v1/users/" + userID}, {"DELETE", "/api/v1/racks/x"}} {
		l.refused("denied", c[0], c[1], token, nil)
	}
	l.refused("denied", "PATCH", "/api/v1/users/"+userID, token, map[string]any{"administrator": true})
	l.refused("denied", "POST", "/api/v1/users", token, map[string]any{"email": "x@example.org", "password": userPassword})
	l.refused("conflict", "POST", "/api/v1/users", l.admin, map[string]any{"email": "ANA@example.org", "password": userPassword})

	var me struct{ User struct{ ID string } }
	l.ok(200, &me, "GET", "/api/v1/me", l.admin, nil)
	l.refused("failed_precondition", "PATCH", "/api/v1/users/"+me.User.ID, l.admin, map[string]any{"disabled": true})
	l.refused("failed_precondition", "PATCH", "/api/v1/users/"+me.User.ID, l.admin, map[string]any{"administrator": false})
	l.refused("failed_precondition", "DELETE", "/api/v1/users/"+me.User.ID, l.admin, nil)

	// A user with jobs stays; without, the user goes and the email is free again.
	jobID := l.job(token, container("mine"))
	l.refused("failed_precondition", "DELETE", "/api/v1/users/"+userID, l.admin, nil)
	l.ork.remove(jobID)
	l.ok(204, nil, "DELETE", "/api/v1/users/"+userID, l.admin, nil)
	l.refused("unauthenticated", "GET", "/api/v1/me", token, nil)
	l.refused("not_found", "PATCH", "/api/v1/users/"+userID, l.admin, map[string]any{"disabled": true})
	l.user("ana@example.org")
}

func TestTheAuditSaysWhoDidWhat(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	userID, token := l.user("ana@example.org")
	jobID := l.job(token, container("mine"))
	l.do("DELETE", "/api/v1/jobs/j-0000000000000", token, nil)
	l.do("POST", "/api/v1/login", "", map[string]string{"email": "ana@example.org", "password": "wrong password!"}, "X-Forwarded-For", "198.51.100.7, 203.0.113.4")
	var out struct {
		Entries []struct{ Actor, Action, Target, Outcome, Address string }
	}
	l.ok(200, &out, "GET", "/api/v1/audit", l.admin, nil)
	want := [][5]string{
		{userID, "login", userID, "unauthenticated", "203.0.113.4"},
		{userID, "job.delete", "j-0000000000000", "not_found", "127.0.0.1"},
		{userID, "job.create", jobID, "ok", "127.0.0.1"},
	}
	for i, w := range want {
		if e := out.Entries[i]; [5]string{e.Actor, e.Action, e.Target, e.Outcome, e.Address} != w {
			t.Errorf("entry %d is %+v, want %v", i, e, w)
		}
	}
}

func TestDaemonsCanAskWhoATokenBelongsTo(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	userID, token := l.user("ana@example.org")
	client := appv1.NewIdentityClient(l.peers)
	r, err := client.IntrospectToken(t.Context(), &appv1.IntrospectTokenRequest{Token: token})
	if err != nil || r.GetUserId() != userID || r.GetAdministrator() || len(r.GetProjectIds()) != 1 {
		t.Fatalf("%v, %v", r, err)
	}
	for _, bad := range []string{"", "cat_", token + "a", strings.ToUpper(token)} {
		if _, err := client.IntrospectToken(t.Context(), &appv1.IntrospectTokenRequest{Token: bad}); !fault.Is(err, fault.Unauthenticated) {
			t.Errorf("a bad token: %v", err)
		}
	}
}
