package api

import (
	"context"
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/app-node/internal/apikeys"
	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

// APIKey is a key's record, without the key.
type APIKey struct {
	ID         string     `json:"id"`
	Name       string     `json:"name"`
	Status     string     `json:"status" enum:"active,revoked,expired"`
	PublicID   string     `json:"public_id" doc:"The part of the key between the underscores"`
	CreatedAt  time.Time  `json:"created_at"`
	UpdatedAt  time.Time  `json:"updated_at"`
	LastUsedAt *time.Time `json:"last_used_at,omitempty"`
	ExpiresAt  *time.Time `json:"expires_at,omitempty"`
}

func moment(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

func (s *Server) apiKey(row store.APIKey) APIKey {
	return APIKey{ID: row.ID, Name: row.Name, Status: string(apikeys.Status(row, s.Now())), PublicID: row.PublicID,
		CreatedAt: row.CreatedAt, UpdatedAt: row.UpdatedAt, LastUsedAt: moment(row.LastUsedAt), ExpiresAt: moment(row.ExpiresAt)}
}

type createKeyInput struct {
	Body struct {
		Name      string     `json:"name" doc:"1 to 63 characters"`
		ExpiresAt *time.Time `json:"expires_at,omitempty" doc:"Leave it out for a key that does not expire"`
	}
}

type createKeyOutput struct {
	Body struct {
		APIKey APIKey `json:"api_key"`
		Key    string `json:"key" doc:"The key itself, shown this once"`
	}
}

func (s *Server) createKey(ctx context.Context, in *createKeyInput) (*createKeyOutput, error) {
	var expires time.Time
	if in.Body.ExpiresAt != nil {
		if expires = *in.Body.ExpiresAt; expires.IsZero() {
			expires = time.Unix(1, 0)
		}
	}
	p := caller(ctx)
	row, full, err := s.Keys.Create(ctx, p.User.ID, p.Personal(), in.Body.Name, expires)
	if err != nil {
		return nil, err
	}
	target(ctx, row.ID)
	out := &createKeyOutput{}
	out.Body.APIKey, out.Body.Key = s.apiKey(row), full
	return out, nil
}

type listKeysInput struct {
	Page         int    `query:"page" minimum:"1" maximum:"1000000" default:"1"`
	PageSize     int    `query:"page_size" minimum:"1" maximum:"100" default:"20"`
	Status       string `query:"status" enum:"active,revoked,expired,all" default:"all"`
	SortBy       string `query:"sort_by" enum:"created_at,updated_at,name,last_used_at" default:"created_at"`
	SortOrder    string `query:"sort_order" enum:"asc,desc" default:"desc"`
	IncludeTotal bool   `query:"include_total"`
}

type listKeysOutput struct {
	Body struct {
		APIKeys  []APIKey `json:"api_keys"`
		Page     int      `json:"page"`
		PageSize int      `json:"page_size"`
		Total    *int     `json:"total,omitempty" doc:"How many match in all, where include_total asked for it"`
	}
}

func (s *Server) listKeys(ctx context.Context, in *listKeysInput) (*listKeysOutput, error) {
	q := store.KeyQuery{UserID: caller(ctx).User.ID, SortBy: in.SortBy, Descending: in.SortOrder == "desc",
		Offset: (in.Page - 1) * in.PageSize, Limit: in.PageSize}
	if in.Status != "all" {
		q.Status = store.KeyStatus(in.Status)
	}
	rows, total, err := s.Keys.List(ctx, q)
	if err != nil {
		return nil, err
	}
	out := &listKeysOutput{}
	out.Body.APIKeys, out.Body.Page, out.Body.PageSize = []APIKey{}, in.Page, in.PageSize
	for _, row := range rows {
		out.Body.APIKeys = append(out.Body.APIKeys, s.apiKey(row))
	}
	if in.IncludeTotal {
		out.Body.Total = &total
	}
	return out, nil
}

// KeyPath names an API key.
type KeyPath struct {
	ID string `path:"id" maxLength:"64"`
}

type keyOutput struct {
	Body APIKey
}

func (s *Server) getKey(ctx context.Context, in *KeyPath) (*keyOutput, error) {
	row, err := s.Keys.Get(ctx, caller(ctx).User.ID, in.ID)
	if err != nil {
		return nil, err
	}
	return &keyOutput{Body: s.apiKey(row)}, nil
}

type renameKeyInput struct {
	KeyPath
	Body struct {
		Name string `json:"name" doc:"1 to 63 characters"`
	}
}

func (s *Server) renameKey(ctx context.Context, in *renameKeyInput) (*keyOutput, error) {
	target(ctx, in.ID)
	row, err := s.Keys.Rename(ctx, caller(ctx).User.ID, in.ID, in.Body.Name)
	if err != nil {
		return nil, err
	}
	return &keyOutput{Body: s.apiKey(row)}, nil
}

func (s *Server) revokeKey(ctx context.Context, in *KeyPath) (*keyOutput, error) {
	target(ctx, in.ID)
	row, err := s.Keys.Revoke(ctx, caller(ctx).User.ID, in.ID)
	if err != nil {
		return nil, err
	}
	return &keyOutput{Body: s.apiKey(row)}, nil
}

// UsageBucket is what one key used in one span of time, in UTC.
type UsageBucket struct {
	StartMS          int64  `json:"start_ms"`
	APIKeyID         string `json:"api_key_id"`
	Requests         int64  `json:"requests"`
	PromptTokens     int64  `json:"prompt_tokens"`
	CompletionTokens int64  `json:"completion_tokens"`
	TotalTokens      int64  `json:"total_tokens"`
}

// usageInput selects hours. The latest time is the end of the year 9999.
type usageInput struct {
	APIKeyID    string `query:"api_key_id" maxLength:"4096" doc:"Ids with commas between; every active key when empty"`
	Start       int64  `query:"ts_start" minimum:"0" maximum:"253402300799999" doc:"Milliseconds since 1970 UTC, included, widened to a whole hour"`
	End         int64  `query:"ts_end" minimum:"0" maximum:"253402300799999" doc:"Milliseconds since 1970 UTC, not included, widened to a whole hour"`
	Granularity string `query:"granularity" enum:"hour,day,week,month" default:"day" doc:"UTC; weeks begin on Monday"`
}

type usageOutput struct {
	Body struct {
		Granularity string        `json:"granularity"`
		Buckets     []UsageBucket `json:"buckets" doc:"Oldest first; empty ones are left out"`
	}
}

func (s *Server) keyUsage(ctx context.Context, in *usageInput) (*usageOutput, error) {
	q := store.UsageQuery{Granularity: store.Granularity(in.Granularity)}
	if in.Start > 0 {
		q.Start = time.UnixMilli(in.Start)
	}
	if in.End > 0 {
		q.End = time.UnixMilli(in.End)
	}
	for _, keyID := range strings.Split(in.APIKeyID, ",") {
		if keyID = strings.TrimSpace(keyID); keyID != "" {
			q.APIKeyIDs = append(q.APIKeyIDs, keyID)
		}
	}
	if len(q.APIKeyIDs) > apikeys.MaximumActive {
		return nil, fault.New(fault.Invalid, "too many api keys").
			With(fault.Detail{Field: "query.api_key_id", Rule: "must name at most 100 keys"})
	}
	buckets, err := s.Keys.Usage(ctx, caller(ctx).User.ID, q)
	if err != nil {
		return nil, err
	}
	out := &usageOutput{}
	out.Body.Granularity, out.Body.Buckets = in.Granularity, []UsageBucket{}
	for _, b := range buckets {
		out.Body.Buckets = append(out.Body.Buckets, UsageBucket{StartMS: b.Start.UnixMilli(), APIKeyID: b.APIKeyID, Requests: b.Requests,
			PromptTokens: b.PromptTokens, CompletionTokens: b.CompletionTokens, TotalTokens: b.PromptTokens + b.CompletionTokens})
	}
	return out, nil
}
