package cli

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

func TestAnUpdateSendsWhatIsNamedAndWaitsUntilItIsDoneOrStopped(t *testing.T) {
	t.Parallel()
	asked, key, reads, last := "", "", 0, ""
	api := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		const head = `{"id":"j-1","name":"chat","state":"running","spec_revision":2,"conditions":[`
		if r.Method == http.MethodPost {
			body, _ := io.ReadAll(r.Body)
			asked, key = r.URL.Path+" "+string(body), r.Header.Get("Idempotency-Key")
			answer(200, head+`{"kind":"updating","message":"0 of 2"}]}`)(w, r)
			return
		}
		reads++
		w.Header().Set("Content-Type", "text/event-stream")
		for _, condition := range []string{`{"kind":"updating","message":"1 of 2"}`, last} {
			fmt.Fprintf(w, "event: job\ndata: %s%s]}\n\n", head, condition)
		}
	})
	status, out, errOut := run(t, api, "", "jobs", "update", "j-1", "--strategy", "stop-first", "--engine-argument=--max", "--engine-argument=8", "--expect", "1", "--idempotency-key", "k", "--wait")
	if status != 0 || reads != 1 || key != "k" || !strings.Contains(out, "j-1") || !strings.Contains(errOut, "updating, 1 of 2") ||
		asked != `/api/v1/jobs/j-1/update {"engine_arguments":["--max","8"],"expected_spec_revision":1,"strategy":"stop_first"}` {
		t.Errorf("exit %d after %d reads, asked %s: %s", status, reads, asked, errOut)
	}
	reads, last = 0, `{"kind":"update_stopped","message":"replica 1 did not come up"}`
	if status, _, errOut := run(t, api, "", "jobs", "update", "j-1", "--strategy", "surge-first", "--replicas", "3", "--wait"); status == 0 || !strings.Contains(errOut, "replica 1 did not come up") {
		t.Errorf("an update that stopped: exit %d: %s", status, errOut)
	}
	if asked != `/api/v1/jobs/j-1/update {"replicas":3,"strategy":"surge_first"}` {
		t.Errorf("asked %s", asked)
	}
	for _, args := range [][]string{{"--replicas", "3"}, {"--strategy", "stop-first"}, {"--strategy", "stop-first", "--engine-argument=a", "--default-engine-arguments"}} {
		if status, _, _ := run(t, api, "", append([]string{"jobs", "update", "j-1"}, args...)...); status != 2 {
			t.Errorf("%v: exit %d", args, status)
		}
	}
}
