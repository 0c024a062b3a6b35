package api_test

import (
	"slices"
	"testing"
)

func TestProjectsAreListedWithWhatTheyMayHoldAndHold(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, ana := l.user("ana@example.org")
	bobID, bob := l.user("bob@example.org")
	_, cy := l.user("cy@example.org")
	type page struct {
		Projects []struct {
			ID      string
			Members []string
			Quota   struct {
				Maximum *uint32 `json:"maximum_gpus"`
				Held    *uint32 `json:"held_gpus"`
			}
		}
		NextPageToken string `json:"next_page_token"`
	}
	l.ok(200, nil, "PUT", "/api/v1/projects/"+l.project(ana)+"/quota", l.admin, map[string]any{"maximum_gpus": 4})
	var mine page
	l.ok(200, &mine, "GET", "/api/v1/projects", ana, nil)
	if len(mine.Projects) != 1 || mine.Projects[0].ID != l.project(ana) || *mine.Projects[0].Quota.Maximum != 4 || *mine.Projects[0].Quota.Held != 3 {
		t.Errorf("ana sees %+v", mine)
	}
	l.ok(204, nil, "DELETE", "/api/v1/users/"+bobID, l.admin, nil)
	l.refused("unauthenticated", "GET", "/api/v1/projects", bob, nil)
	// An administrator sees everybody's, page by page; who is gone has none.
	var members []string
	for token := ""; ; {
		var all page
		l.ok(200, &all, "GET", "/api/v1/projects?page_size=2&page_token="+token, l.admin, nil)
		for _, p := range all.Projects {
			members = append(members, p.Members...)
		}
		if token = all.NextPageToken; token == "" {
			break
		}
	}
	slices.Sort(members)
	if !slices.Equal(members, []string{"ana@example.org", "cy@example.org", adminEmail}) {
		t.Errorf("an administrator sees the projects of %v", members)
	}
	l.away.set(true)
	var blind page
	l.ok(200, &blind, "GET", "/api/v1/projects", cy, nil)
	if len(blind.Projects) != 1 || blind.Projects[0].Quota.Held != nil {
		t.Errorf("while the orchestrator is away: %+v", blind)
	}
}

func TestWhoAmINamesWhatIMayDo(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, ana := l.user("ana@example.org")
	for token, may := range map[string]bool{ana: false, l.admin: true} {
		var me struct{ Rights []string }
		l.ok(200, &me, "GET", "/api/v1/me", token, nil)
		if slices.Contains(me.Rights, "admin") != may || !slices.Contains(me.Rights, "jobs:write") || slices.Contains(me.Rights, "public") {
			t.Errorf("rights %v", me.Rights)
		}
	}
}
