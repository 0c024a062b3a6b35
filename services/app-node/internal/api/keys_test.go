package api_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/apikey"
	"github.com/cosmicac/cosmicac/pkg/fault"
	appv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/app/v1"
)

type keyView struct {
	ID, Name, Status string
	PublicID         string     `json:"public_id"`
	LastUsedAt       *time.Time `json:"last_used_at"`
	ExpiresAt        *time.Time `json:"expires_at"`
}

func (l *lab) makeKey(token string, body map[string]any) (keyView, string) {
	l.t.Helper()
	var out struct {
		APIKey keyView `json:"api_key"`
		Key    string
	}
	l.ok(201, &out, "POST", "/api/v1/api-keys", token, body)
	return out.APIKey, out.Key
}

// table waits for a table of keys in which the condition holds.
func table(t *testing.T, stream grpc.ServerStreamingClient[appv1.WatchApiKeysResponse], is func(map[string]*appv1.ApiKey) bool) *appv1.WatchApiKeysResponse {
	t.Helper()
	for {
		r, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		keys := map[string]*appv1.ApiKey{}
		for _, k := range r.GetKeys() {
			keys[k.GetId()] = k
		}
		if is(keys) {
			return r
		}
	}
}

func TestAKeyIsShownOnceAndProxiesGetOnlyItsHash(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	userID, token := l.user("ana@example.org")
	stream := must(appv1.NewApiKeysClient(l.peers).WatchApiKeys(t.Context(), &appv1.WatchApiKeysRequest{}))
	table(t, stream, func(k map[string]*appv1.ApiKey) bool { return len(k) == 0 })
	made, full := l.makeKey(token, map[string]any{"name": "laptop"})
	if public, err := apikey.Parse(full); err != nil || public != made.PublicID || made.Status != "active" {
		t.Fatalf("%+v, %v", made, err)
	}
	for _, path := range []string{"/api/v1/api-keys", "/api/v1/api-keys/" + made.ID, "/api/v1/audit"} {
		if r := l.do("GET", path, token, nil); bytes.Contains(r.body, []byte(full)) {
			t.Errorf("%s shows the key", path)
		}
	}
	r := table(t, stream, func(k map[string]*appv1.ApiKey) bool { return k[made.ID] != nil })
	if k := r.GetKeys()[0]; !apikey.Equal(k.GetHmac(), apikey.MAC(r.GetHmacKey(), full)) || k.GetUserId() != userID || k.GetProjectId() == "" {
		t.Errorf("proxies got %v", k)
	}
	secret := []byte(full[len("cak_")+13:])
	files := must(filepath.Glob(filepath.Join(l.dir, "*")))
	for _, path := range files {
		if raw, err := os.ReadFile(path); err == nil && bytes.Contains(raw, secret) {
			t.Errorf("%s holds the key", path)
		}
	}
	if info := must(os.Stat(filepath.Join(l.dir, "api-keys.hmac"))); info.Mode().Perm() != 0o600 {
		t.Errorf("the hash's key has mode %v", info.Mode())
	}

	// Revoked, expired, and of a disabled user: gone from the table.
	l.ok(200, &made, "POST", "/api/v1/api-keys/"+made.ID+"/revoke", token, nil)
	if made.Status != "revoked" {
		t.Errorf("status %s", made.Status)
	}
	l.ok(200, nil, "POST", "/api/v1/api-keys/"+made.ID+"/revoke", token, nil)
	table(t, stream, func(k map[string]*appv1.ApiKey) bool { return len(k) == 0 })
	l.refused("failed_precondition", "PATCH", "/api/v1/api-keys/"+made.ID, token, map[string]any{"name": "x"})
	second, _ := l.makeKey(token, map[string]any{"name": "second"})
	table(t, stream, func(k map[string]*appv1.ApiKey) bool { return k[second.ID] != nil })
	l.ok(200, nil, "PATCH", "/api/v1/users/"+userID, l.admin, map[string]any{"disabled": true})
	table(t, stream, func(k map[string]*appv1.ApiKey) bool { return len(k) == 0 })
	l.ok(200, nil, "PATCH", "/api/v1/users/"+userID, l.admin, map[string]any{"disabled": false})
	table(t, stream, func(k map[string]*appv1.ApiKey) bool { return k[second.ID] != nil })
	l.ok(204, nil, "DELETE", "/api/v1/users/"+userID, l.admin, nil)
	table(t, stream, func(k map[string]*appv1.ApiKey) bool { return len(k) == 0 })
}

func TestAnotherUsersKeyDoesNotExist(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	_, ana := l.user("ana@example.org")
	_, bob := l.user("bob@example.org")
	made, _ := l.makeKey(ana, map[string]any{"name": "laptop"})
	for _, token := range []string{bob, l.admin} {
		l.refused("not_found", "GET", "/api/v1/api-keys/"+made.ID, token, nil)
		l.refused("not_found", "PATCH", "/api/v1/api-keys/"+made.ID, token, map[string]any{"name": "mine"})
		l.refused("not_found", "POST", "/api/v1/api-keys/"+made.ID+"/revoke", token, nil)
		l.refused("not_found", "GET", "/api/v1/api-keys/usage?api_key_id="+made.ID, token, nil)
	}
	var list struct {
		APIKeys []keyView `json:"api_keys"`
	}
	l.ok(200, &list, "GET", "/api/v1/api-keys", bob, nil)
	if len(list.APIKeys) != 0 {
		t.Errorf("bob sees %+v", list)
	}
}

func TestListingKeysByPageStatusAndOrder(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for i := range 5 {
		l.clock.move(time.Second)
		body := map[string]any{"name": fmt.Sprintf("key %d", i)}
		if i == 4 {
			body["expires_at"] = l.clock.Now().Add(time.Hour).Format(time.RFC3339)
		}
		made, _ := l.makeKey(l.admin, body)
		if i == 0 {
			l.ok(200, nil, "POST", "/api/v1/api-keys/"+made.ID+"/revoke", l.admin, nil)
		}
	}
	l.clock.move(2 * time.Hour)
	list := func(query string) (names []string, total *int) {
		var out struct {
			APIKeys []keyView `json:"api_keys"`
			Total   *int
		}
		l.ok(200, &out, "GET", "/api/v1/api-keys?"+query, l.admin, nil)
		for _, k := range out.APIKeys {
			names = append(names, k.Name)
		}
		return names, out.Total
	}
	for query, want := range map[string]string{
		"":                               "[key 4 key 3 key 2 key 1 key 0]",
		"sort_by=name&sort_order=asc":    "[key 0 key 1 key 2 key 3 key 4]",
		"page=2&page_size=2":             "[key 2 key 1]",
		"page=9":                         "[]",
		"status=revoked":                 "[key 0]",
		"status=expired":                 "[key 4]",
		"status=active&sort_order=asc":   "[key 1 key 2 key 3]",
		"status=all&page_size=1":         "[key 4]",
		"sort_by=updated_at&page_size=2": "[key 4 key 3]",
	} {
		if names, total := list(query); fmt.Sprint(names) != want || total != nil {
			t.Errorf("%q lists %v, total %v; want %s", query, names, total, want)
		}
	}
	if _, total := list("status=active&page_size=1&include_total=true"); total == nil || *total != 3 {
		t.Errorf("total %v", total)
	}
}

func TestUsageIsCountedOnceAndSummedByHourDayWeekAndMonth(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	made, _ := l.makeKey(l.admin, map[string]any{"name": "k"})
	client := appv1.NewUsageClient(l.peers)
	n := 0
	record := func(at string) *appv1.UsageRecord {
		n++
		return &appv1.UsageRecord{Id: fmt.Sprintf("us-%d", n), ApiKeyId: made.ID, ProjectId: "p", EndpointId: "ep", Model: "m",
			Time: timestamppb.New(must(time.Parse(time.RFC3339, at))), PromptTokens: 10, CompletionTokens: 5, HttpStatus: 200}
	}
	// A Sunday's last hour, the Monday after it, and the next month.
	records := []*appv1.UsageRecord{record("2026-03-29T23:59:59Z"), record("2026-03-29T23:00:00Z"), record("2026-03-30T00:00:00Z"), record("2026-03-31T12:00:00Z"), record("2026-04-01T00:30:00Z")}
	for i, want := range []uint32{5, 0} {
		r, err := client.RecordUsage(t.Context(), &appv1.RecordUsageRequest{Records: records})
		if err != nil || r.GetRecorded() != want {
			t.Fatalf("call %d: %v, %v", i, r, err)
		}
	}
	ms := func(at string) int64 { return must(time.Parse(time.RFC3339, at)).UnixMilli() }
	type bucket struct {
		StartMS  int64 `json:"start_ms"`
		Requests int
		Prompt   int `json:"prompt_tokens"`
		Total    int `json:"total_tokens"`
	}
	for granularity, want := range map[string][]bucket{
		"hour":  {{ms("2026-03-29T23:00:00Z"), 2, 20, 30}, {ms("2026-03-30T00:00:00Z"), 1, 10, 15}, {ms("2026-03-31T12:00:00Z"), 1, 10, 15}, {ms("2026-04-01T00:00:00Z"), 1, 10, 15}},
		"day":   {{ms("2026-03-29T00:00:00Z"), 2, 20, 30}, {ms("2026-03-30T00:00:00Z"), 1, 10, 15}, {ms("2026-03-31T00:00:00Z"), 1, 10, 15}, {ms("2026-04-01T00:00:00Z"), 1, 10, 15}},
		"week":  {{ms("2026-03-23T00:00:00Z"), 2, 20, 30}, {ms("2026-03-30T00:00:00Z"), 3, 30, 45}},
		"month": {{ms("2026-03-01T00:00:00Z"), 4, 40, 60}, {ms("2026-04-01T00:00:00Z"), 1, 10, 15}},
	} {
		var out struct{ Buckets []bucket }
		l.ok(200, &out, "GET", fmt.Sprintf("/api/v1/api-keys/usage?granularity=%s&ts_start=%d&ts_end=%d", granularity, ms("2026-03-01T00:00:00Z"), ms("2026-05-01T00:00:00Z")), l.admin, nil)
		if fmt.Sprint(out.Buckets) != fmt.Sprint(want) {
			t.Errorf("%s: %v, want %v", granularity, out.Buckets, want)
		}
	}
	var out struct{ Buckets []bucket }
	l.ok(200, &out, "GET", fmt.Sprintf("/api/v1/api-keys/usage?granularity=hour&ts_start=%d&ts_end=%d", ms("2026-03-29T23:30:00Z"), ms("2026-03-30T00:00:00Z")), l.admin, nil)
	if len(out.Buckets) != 1 || out.Buckets[0].Requests != 2 {
		t.Errorf("half an hour: %v", out.Buckets)
	}
	var key keyView
	l.ok(200, &key, "GET", "/api/v1/api-keys/"+made.ID, l.admin, nil)
	if key.LastUsedAt == nil || key.LastUsedAt.UnixMilli() != ms("2026-04-01T00:30:00Z") {
		t.Errorf("last used %v", key.LastUsedAt)
	}
	l.ok(200, nil, "POST", "/api/v1/api-keys/"+made.ID+"/revoke", l.admin, nil)
	l.ok(200, &out, "GET", fmt.Sprintf("/api/v1/api-keys/usage?api_key_id=%s&ts_start=%d", made.ID, ms("2026-03-01T00:00:00Z")), l.admin, nil)
	if len(out.Buckets) == 0 {
		t.Error("a revoked key's usage is gone")
	}
}

func TestAProxyCannotBreakTheLedger(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	made, _ := l.makeKey(l.admin, map[string]any{"name": "k"})
	client := appv1.NewUsageClient(l.peers)
	send := func(records ...*appv1.UsageRecord) error {
		_, err := client.RecordUsage(t.Context(), &appv1.RecordUsageRequest{Records: records})
		return err
	}
	if err := send(make([]*appv1.UsageRecord, 1001)...); !fault.Is(err, fault.TooLarge) {
		t.Errorf("1,001 records: %v", err)
	}
	if err := send(&appv1.UsageRecord{}); !fault.Is(err, fault.Invalid) {
		t.Errorf("no id: %v", err)
	}
	// A clock far ahead and numbers beyond reason count, within reason.
	if err := send(&appv1.UsageRecord{Id: "us-1", ApiKeyId: made.ID, Time: timestamppb.New(l.clock.Now().AddDate(50, 0, 0)), PromptTokens: 1 << 63}); err != nil {
		t.Fatal(err)
	}
	var out struct {
		Buckets []struct{ Requests, PromptTokens int64 }
	}
	l.clock.move(time.Hour)
	l.ok(200, &out, "GET", "/api/v1/api-keys/usage?granularity=hour", l.admin, nil)
	if len(out.Buckets) != 1 || out.Buckets[0].Requests != 1 || out.Buckets[0].PromptTokens < 0 {
		t.Errorf("unexpected buckets %v", out.Buckets)
	}
}
