package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// run runs one command line against a control plane of canned answers and
// returns what the user sees.
func run(t *testing.T, api http.Handler, stdin string, args ...string) (status int, out, errOut string) {
	t.Helper()
	server := httptest.NewServer(api)
	t.Cleanup(server.Close)
	var o, e bytes.Buffer
	status = Main(append([]string{"--url", server.URL}, args...), strings.NewReader(stdin), &o, &e)
	return status, o.String(), e.String()
}

// The tests share one settings folder, so those that log in run alone.
func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "cosmicac-cli")
	if err != nil {
		panic(err)
	}
	os.Setenv("COSMICAC_CONFIG_DIR", dir)
	passphraseWork = 10 // the race detector makes scrypt very slow
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

func answer(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		fmt.Fprint(w, body)
	}
}

func TestUsersReadWhatTheServerSaidAndScriptsReadItsKind(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		status int
		body   string
		exit   int
		says   []string
	}{
		{422, `{"detail":"the job is not valid","kind":"invalid","errors":[{"location":"body.gpu.count","message":"must be 1 to 4096"}]}`, 3, []string{"the job is not valid", "gpu.count: must be 1 to 4096"}},
		{404, `{"detail":"no such job","kind":"not_found"}`, 0, []string{"no such job"}},
		{503, `gateway fell over`, 0, []string{"503"}},
	} {
		status, _, errOut := run(t, answer(c.status, c.body), "", "jobs", "get", "j-0000000000000")
		if status == 0 || c.exit != 0 && status != c.exit {
			t.Errorf("%d: exit status %d, want %d", c.status, status, c.exit)
		}
		for _, s := range c.says {
			if !strings.Contains(errOut, s) {
				t.Errorf("%d: %q is not in %q", c.status, s, errOut)
			}
		}
	}
}

func TestWrongUsageExitsWith2(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"jobs", "get"}, {"nonsense"}, {"jobs", "list", "--no-such-flag"}, {"jobs", "list", "-o", "xml"}, {"login", "http://localhost"}} {
		if status, _, errOut := run(t, answer(200, "{}"), "", args...); status != 2 || errOut == "" {
			t.Errorf("%v: exit status %d, %q", args, status, errOut)
		}
	}
}

func TestAllThreeOutputFormsHoldTheSame(t *testing.T) {
	t.Parallel()
	api := answer(200, `{"gpus":[{"model":"H100","location":"us","total":8,"held":3,"offerable":5,"largest_node_offerable":5}]}`)
	for form, want := range map[string]string{"table": "H100", "json": `"largest_node_offerable": 5`, "yaml": "largest_node_offerable: 5"} {
		status, out, errOut := run(t, api, "", "gpus", "available", "-o", form)
		if status != 0 || !strings.Contains(out, want) {
			t.Errorf("%s: status %d, %q %q", form, status, out, errOut)
		}
	}
}

func TestNamesFromUsersCannotMoveTheCursor(t *testing.T) {
	t.Parallel()
	name, err := json.Marshal("evil\x1b[2J\nname\u202e")
	if err != nil {
		t.Fatal(err)
	}
	_, out, _ := run(t, answer(200, `{"jobs":[{"id":"j-1","name":`+string(name)+`,"state":"running"}]}`), "", "jobs", "list")
	if strings.ContainsAny(out, "\x1b\u202e") || strings.Count(out, "\n") != 2 {
		t.Errorf("unsafe output %q", out)
	}
}

func TestColumnsLineUpUnderWideAndCombiningCharacters(t *testing.T) {
	t.Parallel()
	_, out, _ := run(t, answer(200, `{"jobs":[{"id":"j-1","name":"模型","state":"running"},{"id":"j-2","name":"e\u0301te\u0301","state":"running"},{"id":"j-3","name":"plain","state":"running"}]}`), "", "jobs", "list")
	at := -1
	for _, line := range strings.Split(strings.TrimSpace(out), "\n")[1:] {
		column := columns(line[:strings.Index(line, "running")])
		if at >= 0 && column != at {
			t.Fatalf("the states do not line up:\n%s", out)
		}
		at = column
	}
}

func TestTextThatIsNotUTF8IsRefused(t *testing.T) {
	t.Parallel()
	if status, _, errOut := run(t, answer(200, "{}"), "", "jobs", "create", "--name", "a\xff"); status != 2 || !strings.Contains(errOut, "UTF-8") {
		t.Errorf("status %d: %s", status, errOut)
	}
}

func TestAnAmbiguousNameListsTheIDs(t *testing.T) {
	t.Parallel()
	status, _, errOut := run(t, answer(200, `{"jobs":[{"id":"j-1","state":"running"},{"id":"j-2","state":"failed"}]}`), "", "jobs", "get", "twin")
	if status == 0 || !strings.Contains(errOut, "j-1 (running)") || !strings.Contains(errOut, "j-2 (failed)") {
		t.Errorf("status %d: %s", status, errOut)
	}
}

func TestLoginTakesThePasswordFromStandardInputAndKeepsItNowhere(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("COSMICAC_CONFIG_DIR", dir)
	var got map[string]string
	api := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := json.NewDecoder(r.Body).Decode(&got); err != nil {
			t.Error(err)
		}
		fmt.Fprint(w, `{"token":"cat_secret","expires_at":"2030-01-01T00:00:00Z","user":{"id":"u-1","email":"a@example.org"}}`)
	})
	status, out, errOut := run(t, api, "hunter2\n", "login", "--email", "a@example.org")
	if status != 0 || got["password"] != "hunter2" {
		t.Fatalf("status %d %s, sent %v", status, errOut, got)
	}
	raw, err := os.ReadFile(filepath.Join(dir, "settings.json"))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(raw)+out+errOut, "hunter2") || strings.Contains(out+errOut, "cat_secret") {
		t.Error("the password or token was printed, or the password stored")
	}
	if info, err := os.Stat(filepath.Join(dir, "settings.json")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("settings are readable by others: %v %v", info.Mode(), err)
	}
}

func TestChatStreamsTokensAndPrintsUsage(t *testing.T) {
	t.Parallel()
	api := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "data: {\"choices\":[{\"delta\":{\"content\":\"Hel\"}}]}\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"lo\"}}]}\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"total_tokens\":5}}\n\ndata: [DONE]\n\n")
	})
	status, out, errOut := run(t, api, "", "inference", "chat", "--model", "m", "hi")
	if status != 0 || !strings.Contains(out, "Hello") || !strings.Contains(errOut, "3 prompt + 2 completion = 5 tokens") {
		t.Errorf("status %d: %q %q", status, out, errOut)
	}
}

func TestABrokenStreamIsNotASuccess(t *testing.T) {
	t.Parallel()
	for _, body := range []string{"data: {\"choices\":[{\"delta\":{\"content\":\"Hel\"}}]}\n\n", "data: {\"error\":{\"message\":\"the replica went away\"}}\n\n"} {
		api := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, body) })
		if status, _, errOut := run(t, api, "", "inference", "chat", "--model", "m", "hi"); status == 0 {
			t.Errorf("a broken stream exits 0: %s", errOut)
		}
	}
}

func TestEveryMethodOfTheWireIsListedWithItsCallers(t *testing.T) {
	t.Parallel()
	status, out, _ := run(t, answer(200, "{}"), "", "rpc", "list")
	if status != 0 || !strings.Contains(out, "cosmicac.ork.v1.Jobs/CreateJob") || strings.Contains(out, "nobody") {
		t.Errorf("status %d\n%s", status, out)
	}
}

func TestEveryCommandHasHelp(t *testing.T) {
	t.Parallel()
	e := &environment{}
	root := e.root()
	for _, c := range root.Commands() {
		if c.Short == "" && c.Name() != "completion" && c.Name() != "help" {
			t.Errorf("%s has no short help", c.CommandPath())
		}
		for _, sub := range c.Commands() {
			if sub.Short == "" {
				t.Errorf("%s has no short help", sub.CommandPath())
			}
		}
	}
}

func TestANetworkIsFoundedAndShown(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "operator")
	status, out, errOut := run(t, answer(200, "{}"), "", "network", "init", "lab", "--operator", dir)
	if status != 0 || !strings.Contains(out, "second-root.key") {
		t.Fatalf("status %d: %s %s", status, out, errOut)
	}
	status, out, _ = run(t, answer(200, "{}"), "", "network", "roster", "--operator", dir)
	if status != 0 || !strings.Contains(out, "operator") || !strings.Contains(out, "version 1") {
		t.Errorf("status %d: %s", status, out)
	}
	if status, _, errOut = run(t, answer(200, "{}"), "", "network", "init", "lab", "--operator", dir); status == 0 || !strings.Contains(errOut, "already holds a network") {
		t.Errorf("a second init: status %d, %s", status, errOut)
	}
	status, out, _ = run(t, answer(200, "{}"), "", "network", "info", "--operator", dir, "-o", "json")
	if status != 0 || !strings.Contains(out, "root_keys") {
		t.Errorf("status %d: %s", status, out)
	}
}
