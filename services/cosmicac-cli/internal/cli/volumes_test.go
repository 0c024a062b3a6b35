package cli

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

const aVolume = `{"id":"v-0000000000000","name":"data","state":"ready","size_gib":10,"rack_id":"rk-1","location":"us","storage_class":"fast",
	"attachments":[{"job_id":"j-0000000000000","job_name":"lab","job_state":"running","read_only":true}],"project_id":"p-1"}`

func TestVolumesAreMadeShownAttachedAndDeleted(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var asked []string
	api := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		raw, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		mu.Lock()
		asked = append(asked, strings.TrimSpace(r.Method+" "+r.URL.String()+" "+string(raw)))
		mu.Unlock()
		switch {
		case r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/volumes"):
			answer(200, `{"volumes":[`+aVolume+`]}`)(w, r)
		case strings.HasSuffix(r.URL.Path, "/jobs"):
			answer(200, `{"jobs":[{"id":"j-0000000000000","name":"lab","state":"stopped"}]}`)(w, r)
		case strings.HasSuffix(r.URL.Path, "/attach"):
			answer(412, `{"kind":"failed_precondition","detail":"volume data cannot be attached: job j-1 (other) has it","errors":[{"location":"body.volume","message":"is attached to job j-1"}]}`)(w, r)
		default:
			answer(200, aVolume)(w, r)
		}
	})
	do := func(want int, words []string, args ...string) {
		t.Helper()
		status, out, errOut := run(t, api, "", args...)
		if status != want {
			t.Errorf("%v: status %d: %s%s", args, status, out, errOut)
		}
		for _, w := range words {
			if !strings.Contains(out+errOut, w) {
				t.Errorf("%v: nothing of %q in %s%s", args, w, out, errOut)
			}
		}
	}
	do(0, []string{"10 GiB", "rk-1 in us", "j-0000000000000 (lab, running), read-only"}, "volumes", "create", "data", "--size", "10", "--location", "us", "--shared", "--wait")
	do(0, []string{"v-0000000000000", "ATTACHED TO", "fast"}, "volumes", "list")
	do(0, []string{"ready"}, "volumes", "show", "data")
	do(15, []string{"job j-1 (other) has it", "is attached to job j-1"}, "volumes", "attach", "data", "lab", "--read-only")
	do(0, nil, "volumes", "detach", "v-0000000000000", "lab")
	do(2, []string{"not confirmed", "--confirm data"}, "volumes", "delete", "data")
	do(0, []string{"deleting data"}, "volumes", "delete", "data", "--confirm", "data")
	do(2, []string{"data:ro"}, "jobs", "create", "--volume", "data:rw")
	do(0, nil, "jobs", "create", "--name", "x", "--volume", "data", "--volume", "set:ro")
	status, out, errOut := run(t, api, "", "volumes", "list", "-o", "json")
	var list struct {
		Volumes []struct{ ID string }
	}
	if err := json.Unmarshal([]byte(out), &list); status != 0 || err != nil || len(list.Volumes) != 1 || list.Volumes[0].ID != "v-0000000000000" {
		t.Errorf("as JSON: %d, %v, %s%s", status, err, out, errOut)
	}
	all := strings.Join(asked, "\n")
	for _, want := range []string{
		`POST /api/v1/volumes {"location":"us","name":"data","shared":true,"size_gib":10}`,
		`POST /api/v1/volumes/v-0000000000000/attach {"job_id":"j-0000000000000","read_only":true}`,
		`POST /api/v1/volumes/v-0000000000000/detach {"job_id":"j-0000000000000"}`,
		`DELETE /api/v1/volumes/v-0000000000000?confirm=data`,
		`"volumes":[{"read_only":false,"volume":"data"},{"read_only":true,"volume":"set"}]`,
	} {
		if !strings.Contains(all, want) {
			t.Errorf("%s was not asked:\n%s", want, all)
		}
	}
}

func TestAVolumeOfTheRecordsIsNoLeakAndOneThatNobodyKnowsIs(t *testing.T) {
	t.Parallel()
	rec := recorded{volumes: map[string]*orkv1.Volume{
		"v-1": {Id: "v-1", Name: "data", RackId: "rk-1", State: orkv1.VolumeState_VOLUME_STATE_READY},
		"v-2": {Id: "v-2", Name: "set", RackId: "rk-1", State: orkv1.VolumeState_VOLUME_STATE_READY},
		"v-3": {Id: "v-3", Name: "away", RackId: "rk-2", State: orkv1.VolumeState_VOLUME_STATE_READY},
	}}
	hold := func(kind, name, volume string) *workerv1.Holding {
		return &workerv1.Holding{Kind: kind, Name: name, RackId: "rk-1", VolumeId: volume}
	}
	leaks := compare(rec, []*workerv1.ListHoldingsResponse{{RackId: "rk-1", Holdings: []*workerv1.Holding{
		hold("DataVolume", "v-1", "v-1"), hold("PersistentVolumeClaim", "v-1", "v-1"), hold("PersistentVolumeClaim", "v-9", "v-9"),
	}}})
	if len(leaks) != 2 || leaks[0].Name != "v-9" || !strings.Contains(leaks[0].What, "no record of volume") || leaks[1].Name != "v-2" || !strings.Contains(leaks[1].What, "does not hold it") {
		t.Errorf("found %+v", leaks)
	}
}
