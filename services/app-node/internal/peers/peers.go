// Package peers is what app-node answers over the mesh: the table of API keys and
// the usage ledger for proxies, and who a token belongs to.
//
// Who may call what is written in the wire files and enforced by the mesh before a
// call arrives here. The package decides nothing about keys, tokens or usage.
package peers

import (
	"context"
	"fmt"
	"math"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
	"github.com/cosmicac/cosmicac/services/app-node/internal/account"
	"github.com/cosmicac/cosmicac/services/app-node/internal/apikeys"
	"github.com/cosmicac/cosmicac/services/app-node/internal/store"
)

// Bounds of what a proxy may send.
const (
	MaximumRecords = 1000
	maximumIDBytes = 64
	maximumModel   = 256
	skew           = 15 * time.Minute
)

// Service answers appv1.ApiKeys, appv1.Usage and appv1.Identity.
type Service struct {
	appv1.UnimplementedApiKeysServer
	appv1.UnimplementedUsageServer
	appv1.UnimplementedIdentityServer

	Keys     *apikeys.Keys
	Accounts *account.Accounts
	Now      func() time.Time
	// Refresh is how often a watch sends the table without a change, so that a key
	// that was lost on the way comes back and one that expired goes.
	Refresh time.Duration
}

// Register adds the services to a mesh node or gRPC server, before it starts.
func (s *Service) Register(to grpc.ServiceRegistrar) {
	appv1.RegisterApiKeysServer(to, s)
	appv1.RegisterUsageServer(to, s)
	appv1.RegisterIdentityServer(to, s)
}

// WatchApiKeys sends the whole table at once, after each change and from time to
// time. Changes that come while one table is on its way are merged.
func (s *Service) WatchApiKeys(_ *appv1.WatchApiKeysRequest, stream grpc.ServerStreamingServer[appv1.WatchApiKeysResponse]) error {
	changed, stop := s.Keys.Watch()
	defer stop()
	refresh := time.NewTicker(s.Refresh)
	defer refresh.Stop()
	for {
		rows, err := s.Keys.Table(stream.Context())
		if err != nil {
			return fault.ToGRPC(err)
		}
		table := &appv1.WatchApiKeysResponse{HmacKey: s.Keys.HMACKey, Keys: make([]*appv1.ApiKey, len(rows))}
		for i, row := range rows {
			table.Keys[i] = &appv1.ApiKey{PublicId: row.PublicID, Hmac: row.HMAC, Id: row.ID, ProjectId: row.ProjectID, UserId: row.UserID}
			if !row.ExpiresAt.IsZero() {
				table.Keys[i].ExpiresAt = timestamppb.New(row.ExpiresAt)
			}
		}
		if err := stream.Send(table); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-refresh.C:
		case <-stream.Context().Done():
			return fault.ToGRPC(stream.Context().Err())
		}
	}
}

// RecordUsage adds records to the ledger, each id once. A record whose time is
// ahead of this clock counts as of now, so that a proxy with a wrong clock does not
// hold its spool for ever.
func (s *Service) RecordUsage(ctx context.Context, r *appv1.RecordUsageRequest) (*appv1.RecordUsageResponse, error) {
	if n := len(r.GetRecords()); n > MaximumRecords {
		return nil, fault.ToGRPC(fault.New(fault.TooLarge, "%d usage records in one call: at most %d are taken", n, MaximumRecords))
	}
	now := s.Now()
	rows := make([]store.UsageRecord, 0, len(r.GetRecords()))
	for i, u := range r.GetRecords() {
		row := store.UsageRecord{ID: u.GetId(), APIKeyID: u.GetApiKeyId(), ProjectID: u.GetProjectId(), EndpointID: u.GetEndpointId(),
			Model: cut(u.GetModel(), maximumModel), PromptTokens: clamp(u.GetPromptTokens()), CompletionTokens: clamp(u.GetCompletionTokens()),
			HTTPStatus: int64(u.GetHttpStatus()), DurationMilliseconds: clamp(u.GetDurationMilliseconds()),
			FirstTokenMilliseconds: clamp(u.GetFirstTokenMilliseconds()), Incomplete: u.GetIncomplete(), Time: now}
		if row.ID == "" {
			return nil, invalid(i, "id", "is required")
		}
		for field, value := range map[string]string{"id": row.ID, "api_key_id": row.APIKeyID, "project_id": row.ProjectID, "endpoint_id": row.EndpointID} {
			if len(value) > maximumIDBytes || !utf8.ValidString(value) {
				return nil, invalid(i, field, fmt.Sprintf("must have at most %d bytes", maximumIDBytes))
			}
		}
		if t := u.GetTime(); t.IsValid() && t.AsTime().Unix() > 0 && t.AsTime().Before(now.Add(skew)) {
			row.Time = t.AsTime()
		}
		rows = append(rows, row)
	}
	recorded, err := s.Keys.Record(ctx, rows)
	if err != nil {
		return nil, fault.ToGRPC(err)
	}
	return &appv1.RecordUsageResponse{Recorded: uint32(recorded)}, nil
}

func invalid(i int, field, rule string) error {
	path := fmt.Sprintf("records[%d].%s", i, field)
	return fault.ToGRPC(fault.New(fault.Invalid, "%s %s", path, rule).With(fault.Detail{Field: path, Rule: rule}))
}

// clamp keeps sums far from overflow: no request has a trillion tokens.
func clamp(n uint64) int64 { return int64(min(n, 1e12, math.MaxInt64)) }

func cut(s string, most int) string {
	if len(s) > most {
		s = s[:most]
		for !utf8.ValidString(s) {
			s = s[:len(s)-1]
		}
	}
	return s
}

// IntrospectToken says who a token belongs to, without prolonging it.
func (s *Service) IntrospectToken(ctx context.Context, r *appv1.IntrospectTokenRequest) (*appv1.IntrospectTokenResponse, error) {
	p, err := s.Accounts.Introspect(ctx, r.GetToken())
	if err != nil {
		return nil, fault.ToGRPC(err)
	}
	return &appv1.IntrospectTokenResponse{UserId: p.User.ID, Email: p.User.Email, Administrator: p.User.Administrator,
		ProjectIds: p.ProjectIDs(), ExpiresAt: timestamppb.New(p.ExpiresAt)}, nil
}
