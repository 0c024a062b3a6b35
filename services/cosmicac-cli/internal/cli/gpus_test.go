package cli

import (
	"io"
	"net/http"
	"strings"
	"testing"
)

func TestADryRunPrintsThePlanOrEveryReason(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		body string
		exit bool
		says []string
	}{
		{`{"fits":true,"state":"queued","replicas":[{"index":0,"rack_id":"us-1","gpu_model":"H100","nodes":[{"name":"n1","gpu_count":8},{"name":"n2","gpu_count":8}]}]}`, true, []string{"us-1", "n1", "n2", "8 x H100"}},
		{`{"fits":false,"state":"queued","reason":"over_quota","message":"2 too many","replicas":[{"index":0,"refusals":[{"reason":"over_quota","message":"2 too many"},{"rack_id":"us-1","reason":"busy","message":"1 of 8"}]}]}`,
			false, []string{"over_quota: 2 too many", "us-1", "busy: 1 of 8"}},
	} {
		asked := ""
		api := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { asked = r.URL.Path; answer(200, c.body)(w, r) })
		status, out, errOut := run(t, api, "", "jobs", "create", "--name", "x", "--dry-run")
		if (status == 0) != c.exit || asked != "/api/v1/jobs/plan" {
			t.Errorf("exit %d after asking %s: %s", status, asked, errOut)
		}
		for _, s := range c.says {
			if !strings.Contains(out, s) {
				t.Errorf("%q is not in\n%s", s, out)
			}
		}
	}
}

func TestWhatIsAvailableSaysWhereAndWhoWaits(t *testing.T) {
	t.Parallel()
	asked := ""
	api := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = r.URL.RawQuery
		answer(200, `{"gpus":[{"model":"H100","location":"us","total":16,"held":9,"offerable":3,"largest_node_offerable":2,"waiting":2,"waiting_gpus":12,"longest_wait_seconds":90,
			"racks":[{"id":"us-1","offerable":3,"largest_node_offerable":2},{"id":"us-2","reason":"cordoned","message":"rack us-2 is cordoned"}]}]}`)(w, r)
	})
	status, out, errOut := run(t, api, "", "gpus", "available", "--location", "US", "--model", "H100")
	if status != 0 || asked != "location=us&model=H100" {
		t.Fatalf("exit %d after asking %s: %s", status, asked, errOut)
	}
	for _, s := range []string{"us-1", "2 for 12 GPUs", "1m30s", "cordoned: rack us-2"} {
		if !strings.Contains(out, s) {
			t.Errorf("%q is not in\n%s", s, out)
		}
	}
}

func TestAQuotaIsSetForTheProjectThatIsNamed(t *testing.T) {
	t.Parallel()
	asked, sent := "", ""
	api := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		asked, sent = r.Method+" "+r.URL.Path, string(body)
		answer(200, `{"project_id":"p-1","maximum_gpus":4,"held_gpus":3,"maximum_volume_gib":500,"held_volume_gib":120,"admitted":true}`)(w, r)
	})
	status, out, errOut := run(t, api, "", "gpus", "quota", "p-1", "--set", "4")
	if status != 0 || asked != "PUT /api/v1/projects/p-1/quota" || !strings.Contains(out, "p-1") {
		t.Errorf("exit %d after %s: %s %s", status, asked, out, errOut)
	}
	// The bound of GPUs stays where only that of volumes is given.
	if status, out, errOut := run(t, api, "", "gpus", "quota", "p-1", "--volume-gib", "none"); status != 0 || sent != `{"maximum_gpus":4,"maximum_volume_gib":null}` ||
		!strings.Contains(out, "500") || !strings.Contains(out, "120") {
		t.Errorf("exit %d after sending %s: %s %s", status, sent, out, errOut)
	}
	for _, args := range [][]string{{"gpus", "quota", "--set", "4"}, {"gpus", "quota", "--volume-gib", "4"}, {"gpus", "quota", "p-1", "--volume-gib", "much"}, {"gpus", "quota", "p-1", "--set", "few"}} {
		if status, _, _ := run(t, api, "", args...); status != 2 {
			t.Errorf("%v: exit %d", args, status)
		}
	}
}
