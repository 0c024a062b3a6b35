package store

import (
	"context"
	"database/sql"
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// UsageRecord is one inference request as a proxy counted it.
type UsageRecord struct {
	ID                     string
	APIKeyID               string
	ProjectID              string
	EndpointID             string
	Model                  string
	Time                   time.Time
	PromptTokens           int64
	CompletionTokens       int64
	HTTPStatus             int64
	DurationMilliseconds   int64
	FirstTokenMilliseconds int64
	Incomplete             bool
}

// RecordUsage adds records in one transaction and says how many were new: one
// whose id was seen before is counted once. It also moves last_used_at of the keys.
func (s *Store) RecordUsage(ctx context.Context, records []UsageRecord, now time.Time) (recorded int, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		recorded = 0
		used := map[string]int64{}
		for _, r := range records {
			result, err := tx.ExecContext(ctx, `INSERT INTO usage_records (id, received_at, time, api_key_id, project_id, endpoint_id, model,
				prompt_tokens, completion_tokens, http_status, duration_milliseconds, first_token_milliseconds, incomplete)
				VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING`,
				r.ID, milliseconds(now), milliseconds(r.Time), r.APIKeyID, r.ProjectID, r.EndpointID, r.Model,
				r.PromptTokens, r.CompletionTokens, r.HTTPStatus, r.DurationMilliseconds, r.FirstTokenMilliseconds, r.Incomplete)
			if err != nil {
				return err
			}
			if n, err := result.RowsAffected(); err != nil || n == 0 {
				if err != nil {
					return err
				}
				continue
			}
			recorded++
			_, err = tx.ExecContext(ctx, `INSERT INTO usage_hours (api_key_id, hour, endpoint_id, project_id, requests, prompt_tokens, completion_tokens)
				VALUES (?, ?, ?, ?, 1, ?, ?) ON CONFLICT (api_key_id, hour, endpoint_id, project_id) DO UPDATE SET
				requests = requests + 1, prompt_tokens = prompt_tokens + excluded.prompt_tokens,
				completion_tokens = completion_tokens + excluded.completion_tokens`,
				r.APIKeyID, r.Time.Unix()-mod(r.Time.Unix(), 3600), r.EndpointID, r.ProjectID, r.PromptTokens, r.CompletionTokens)
			if err != nil {
				return err
			}
			if r.APIKeyID != "" {
				used[r.APIKeyID] = max(used[r.APIKeyID], milliseconds(r.Time))
			}
		}
		for id, ms := range used {
			if _, err := tx.ExecContext(ctx, "UPDATE api_keys SET last_used_at = max(ifnull(last_used_at, 0), ?) WHERE id = ?", ms, id); err != nil {
				return err
			}
		}
		return nil
	})
	return recorded, err
}

func mod(a, n int64) int64 { return ((a % n) + n) % n }

// Granularity is the length of a usage bucket. All are in UTC; weeks begin on Monday.
type Granularity string

// The lengths.
const (
	Hour  Granularity = "hour"
	Day   Granularity = "day"
	Week  Granularity = "week"
	Month Granularity = "month"
)

// bucketStart is, for each length, SQL for the start of the bucket that holds `hour`.
var bucketStart = map[Granularity]string{
	Hour: "hour",
	Day:  "hour - hour % 86400",
	// 1970-01-05 was a Monday.
	Week:  "hour - (hour - 345600) % 604800",
	Month: "CAST(strftime('%s', hour, 'unixepoch', 'start of month') AS INTEGER)",
}

// UsageQuery selects hours of some keys.
type UsageQuery struct {
	APIKeyIDs []string
	// Start is included and End is not; both are widened to whole hours.
	Start, End  time.Time
	Granularity Granularity
	// Limit bounds the answer; more is a fault.
	Limit int
}

// UsageBucket is the sum of one key over one bucket.
type UsageBucket struct {
	Start            time.Time
	APIKeyID         string
	Requests         int64
	PromptTokens     int64
	CompletionTokens int64
}

// Usage sums the ledger by bucket and key, oldest first. Empty buckets are left out.
func (s *Store) Usage(ctx context.Context, q UsageQuery) (buckets []UsageBucket, err error) {
	start, ok := bucketStart[q.Granularity]
	if !ok {
		return nil, fault.New(fault.Invalid, "%q is not a granularity", q.Granularity)
	}
	if len(q.APIKeyIDs) == 0 {
		return nil, nil
	}
	end := (milliseconds(q.End) + 999) / 1000
	args := []any{q.Start.Unix() - mod(q.Start.Unix(), 3600), end + mod(-end, 3600)}
	for _, id := range q.APIKeyIDs {
		args = append(args, id)
	}
	err = s.read(ctx, func(tx *sql.Tx) error {
		rows, err := tx.QueryContext(ctx, "SELECT "+start+` AS start, api_key_id, sum(requests), sum(prompt_tokens), sum(completion_tokens)
			FROM usage_hours WHERE hour >= ? AND hour < ? AND api_key_id IN (?`+strings.Repeat(", ?", len(q.APIKeyIDs)-1)+`)
			GROUP BY start, api_key_id ORDER BY start, api_key_id LIMIT ?`, append(args, q.Limit+1)...)
		return each(rows, err, func(row scanner) error {
			var b UsageBucket
			var seconds int64
			err := row.Scan(&seconds, &b.APIKeyID, &b.Requests, &b.PromptTokens, &b.CompletionTokens)
			b.Start = time.Unix(seconds, 0).UTC()
			buckets = append(buckets, b)
			return err
		})
	})
	if err == nil && len(buckets) > q.Limit {
		return nil, fault.New(fault.TooLarge, "the range holds more than %d buckets: ask for a shorter range or a coarser granularity", q.Limit)
	}
	return buckets, err
}

// PruneUsageRecords forgets single records received before an instant. Sums stay.
func (s *Store) PruneUsageRecords(ctx context.Context, before time.Time) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "DELETE FROM usage_records WHERE received_at < ?", milliseconds(before))
		return err
	})
}
