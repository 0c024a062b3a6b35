package api

import (
	"context"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/cosmicac/cosmicac/pkg/fault"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/app-node/internal/account"
	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

// UserSummary is who is signed in.
type UserSummary struct {
	ID            string `json:"id"`
	Email         string `json:"email"`
	Administrator bool   `json:"administrator"`
}

// User is a user as administrators see them.
type User struct {
	UserSummary
	Disabled  bool      `json:"disabled"`
	CreatedAt time.Time `json:"created_at"`
	UpdatedAt time.Time `json:"updated_at"`
}

// Project owns jobs and API keys.
type Project struct {
	ID   string `json:"id"`
	Name string `json:"name"`
}

func summary(u store.User) UserSummary {
	return UserSummary{ID: u.ID, Email: u.Email, Administrator: u.Administrator}
}

func user(u store.User) User {
	return User{UserSummary: summary(u), Disabled: u.Disabled, CreatedAt: u.CreatedAt, UpdatedAt: u.UpdatedAt}
}

type loginInput struct {
	Body struct {
		Email    string `json:"email" maxLength:"254"`
		Password string `json:"password" maxLength:"1024" writeOnly:"true"`
	}
}

type loginOutput struct {
	Body struct {
		Token     string      `json:"token" doc:"Shown here and nowhere else. It lasts 24 h from its last use and 30 days in all."`
		ExpiresAt time.Time   `json:"expires_at"`
		User      UserSummary `json:"user"`
	}
}

func (s *Server) login(ctx context.Context, in *loginInput) (*loginOutput, error) {
	r := requestOf(ctx)
	result, err := s.Accounts.Login(ctx, in.Body.Email, in.Body.Password, r.address)
	s.metrics.login(err)
	r.actor, r.target = result.User.ID, result.User.ID
	if err != nil {
		return nil, err
	}
	out := &loginOutput{}
	out.Body.Token, out.Body.ExpiresAt, out.Body.User = result.Token, result.ExpiresAt.UTC(), summary(result.User)
	return out, nil
}

func (s *Server) logout(ctx context.Context, _ *struct{}) (*nothing, error) {
	target(ctx, caller(ctx).User.ID)
	return nil, s.Accounts.Logout(ctx, caller(ctx))
}

func (s *Server) logoutEverywhere(ctx context.Context, _ *struct{}) (*nothing, error) {
	target(ctx, caller(ctx).User.ID)
	return nil, s.Accounts.EndSessions(ctx, caller(ctx).User.ID)
}

func (s *Server) logoutUser(ctx context.Context, in *UserPath) (*nothing, error) {
	target(ctx, in.ID)
	return nil, s.Accounts.EndSessions(ctx, in.ID)
}

type meOutput struct {
	Body struct {
		User      UserSummary `json:"user"`
		Projects  []Project   `json:"projects"`
		Rights    []Right     `json:"rights" doc:"What operations may ask of me, as each names it in x-cosmicac-right"`
		ExpiresAt time.Time   `json:"expires_at" doc:"When this sign-in ends if it is not used again"`
	}
}

func (s *Server) me(ctx context.Context, _ *struct{}) (*meOutput, error) {
	p := caller(ctx)
	out := &meOutput{}
	out.Body.User, out.Body.ExpiresAt, out.Body.Projects = summary(p.User), p.ExpiresAt, []Project{}
	out.Body.Rights = rightsOf(p)
	for _, project := range p.Projects {
		out.Body.Projects = append(out.Body.Projects, Project{ID: project.ID, Name: project.Name})
	}
	return out, nil
}

type passwordInput struct {
	Body struct {
		CurrentPassword string `json:"current_password" maxLength:"1024" writeOnly:"true"`
		NewPassword     string `json:"new_password" maxLength:"1024" writeOnly:"true"`
	}
}

func (s *Server) changePassword(ctx context.Context, in *passwordInput) (*nothing, error) {
	r := requestOf(ctx)
	r.target = r.person.User.ID
	return nil, s.Accounts.ChangePassword(ctx, r.person, in.Body.CurrentPassword, in.Body.NewPassword, r.address)
}

type usersOutput struct {
	Body struct {
		Users []User `json:"users"`
	}
}

type userOutput struct {
	Body User
}

func (s *Server) listUsers(ctx context.Context, _ *struct{}) (*usersOutput, error) {
	rows, err := s.Store.Users(ctx)
	out := &usersOutput{}
	out.Body.Users = []User{}
	for _, row := range rows {
		out.Body.Users = append(out.Body.Users, user(row))
	}
	return out, err
}

type createUserInput struct {
	Body struct {
		Email         string `json:"email" maxLength:"1000"`
		Password      string `json:"password" maxLength:"1024" writeOnly:"true" doc:"At least 10 characters"`
		Administrator bool   `json:"administrator,omitempty"`
	}
}

func (s *Server) createUser(ctx context.Context, in *createUserInput) (*userOutput, error) {
	row, err := s.Accounts.CreateUser(ctx, account.NewUser(in.Body))
	if err != nil {
		return nil, err
	}
	target(ctx, row.ID)
	return &userOutput{Body: user(row)}, nil
}

// UserPath names a user.
type UserPath struct {
	ID string `path:"id" maxLength:"64"`
}

type changeUserInput struct {
	UserPath
	Body struct {
		Password      *string `json:"password,omitempty" maxLength:"1024" writeOnly:"true"`
		Administrator *bool   `json:"administrator,omitempty"`
		Disabled      *bool   `json:"disabled,omitempty"`
	}
}

// Resolve refuses a change of nothing, which is a misspelt one.
func (in *changeUserInput) Resolve(huma.Context) []error {
	if in.Body.Password == nil && in.Body.Administrator == nil && in.Body.Disabled == nil {
		return []error{&huma.ErrorDetail{Location: "body", Message: "must hold password, administrator or disabled"}}
	}
	return nil
}

func (s *Server) changeUser(ctx context.Context, in *changeUserInput) (*userOutput, error) {
	target(ctx, in.ID)
	row, err := s.Accounts.ChangeUser(ctx, in.ID, account.Change(in.Body))
	if err != nil {
		return nil, err
	}
	return &userOutput{Body: user(row)}, nil
}

func (s *Server) deleteUser(ctx context.Context, in *UserPath) (*nothing, error) {
	target(ctx, in.ID)
	if _, err := s.Store.User(ctx, in.ID); err != nil {
		return nil, err
	}
	projects, err := s.Store.ProjectsOf(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	for _, project := range projects {
		if !project.Personal {
			continue
		}
		page, err := s.Ork.Jobs(ctx, &orkv1.ListJobsRequest{ProjectIds: []string{project.ID}, PageSize: 500})
		if err != nil {
			return nil, err
		}
		if n := len(page.GetJobs()); n > 0 {
			return nil, fault.New(fault.FailedPrecondition, "the user still has jobs (%s and %d more): delete them first, or disable the user", page.GetJobs()[0].GetId(), n-1)
		}
	}
	return nil, s.Accounts.DeleteUser(ctx, in.ID)
}

// AuditEntry says who did what.
type AuditEntry struct {
	Sequence int64     `json:"sequence"`
	Time     time.Time `json:"time"`
	Actor    string    `json:"actor" doc:"A user id, \"bootstrap\", or empty for nobody known"`
	Action   string    `json:"action"`
	Target   string    `json:"target"`
	Outcome  string    `json:"outcome" doc:"\"ok\" or the kind of a problem"`
	Address  string    `json:"address"`
}

type auditInput struct {
	Before   int64 `query:"before" minimum:"0" doc:"Only entries with a lower sequence"`
	PageSize int   `query:"page_size" minimum:"1" maximum:"500" default:"100"`
}

type auditOutput struct {
	Body struct {
		Entries []AuditEntry `json:"entries"`
	}
}

func (s *Server) listAudit(ctx context.Context, in *auditInput) (*auditOutput, error) {
	rows, err := s.Store.Audit(ctx, in.Before, in.PageSize)
	out := &auditOutput{}
	out.Body.Entries = []AuditEntry{}
	for _, row := range rows {
		out.Body.Entries = append(out.Body.Entries, AuditEntry(row))
	}
	return out, err
}
