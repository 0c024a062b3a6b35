package api

import (
	"context"
)

// ProjectUse is a project with what it may hold and holds.
type ProjectUse struct {
	Project
	Members []string `json:"members" doc:"Emails"`
	Quota   Quota    `json:"quota"`
}

type listProjectsInput struct {
	PageSize  int    `query:"page_size" minimum:"1" maximum:"200" default:"50"`
	PageToken string `query:"page_token" maxLength:"64"`
}

type listProjectsOutput struct {
	Body struct {
		Projects      []ProjectUse `json:"projects" doc:"Oldest first"`
		NextPageToken string       `json:"next_page_token" doc:"Empty on the last page"`
	}
}

// listProjects lists the caller's projects, and everybody's for administrators. The
// orchestrator is asked about one after the other, and about no more once it does
// not answer.
func (s *Server) listProjects(ctx context.Context, in *listProjectsInput) (*listProjectsOutput, error) {
	p := caller(ctx)
	userID := p.User.ID
	if p.User.Administrator {
		userID = ""
	}
	rows, err := s.Store.Projects(ctx, userID, in.PageToken, in.PageSize+1)
	if err != nil {
		return nil, err
	}
	out := &listProjectsOutput{}
	out.Body.Projects = []ProjectUse{}
	if len(rows) > in.PageSize {
		rows = rows[:in.PageSize]
		out.Body.NextPageToken = rows[len(rows)-1].Quota.ProjectID
	}
	answers := true
	for _, row := range rows {
		use := ProjectUse{Project: Project{ID: row.Quota.ProjectID, Name: row.Name}, Members: row.Members, Quota: setting(row.Quota)}
		if answers {
			use.Quota = s.quota(ctx, row.Quota)
			answers = use.Quota.HeldGPUs != nil
		}
		out.Body.Projects = append(out.Body.Projects, use)
	}
	return out, nil
}
