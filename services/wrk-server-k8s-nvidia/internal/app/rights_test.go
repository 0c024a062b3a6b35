package app

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/preflight"
)

// asked records what is asked of an API server, as rows of a Role say it.
type asked struct {
	mu   sync.Mutex
	rows map[string]bool
}

func (a *asked) note(r *http.Request) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	group := ""
	switch {
	case len(parts) > 2 && parts[0] == "api":
		parts = parts[2:]
	case len(parts) > 3 && parts[0] == "apis":
		group, parts = parts[1], parts[3:]
	default:
		return // discovery, which everybody may ask
	}
	scope := "cluster"
	if parts[0] == "namespaces" {
		scope = "namespace"
		if len(parts) > 2 {
			parts = parts[2:]
		}
	}
	verb := map[string]string{http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete"}[r.Method]
	if r.Method == http.MethodGet {
		switch {
		case len(parts) > 1:
			verb = "get"
		case r.URL.Query().Get("watch") != "":
			verb = "watch"
		default:
			verb = "list"
		}
	}
	if group == "authorization.k8s.io" {
		return // everybody may ask what they may
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rows[fmt.Sprintf("%s %s/%s %s", scope, group, parts[0], verb)] = true
}

// TestEveryRightOfTheShippedRoleIsUsedAndNoOther runs all that a worker does and
// compares what it asked of the API server with what it may.
func TestEveryRightOfTheShippedRoleIsUsedAndNoOther(t *testing.T) {
	t.Parallel()
	d := start(t)
	record := &asked{rows: map[string]bool{}}
	proxy := proxyTo(t, d.kubeconfig)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		record.note(r)
		proxy.ServeHTTP(w, r)
	}))
	defer server.Close()
	w := begin(t, d, "leak", func(s *Setup) {
		s.Config.Rack.ID, s.Config.Kubeconfig = "rights", plainKubeconfig(t, server.URL)
		s.Network = "rights" // of its own: any worker of a network sweeps what is left of its VLANs
		s.Config.Deadlines.Orphan, s.Config.Overlay.VLANQuarantine = 4*time.Second, time.Second
		joinedBy(s)
	})
	w.Entry.Put(&orkv1.RackEntry{Id: "rights"})
	w.serves()
	defer w.end()

	// A gang, an attempt whose image is not there, one that runs, and one that finds
	// its job's disk in the name of another rack.
	gang := id(t, "g")
	w.claim(request("leak", id(t, "k"), gang, 1, "leak-gpu-00", "leak-gpu-01"))
	w.until(gang, up1)
	w.remove(gang)
	w.gone(gang)
	job, attempt := id(t, "j"), id(t, "a")
	req := request("leak", job, attempt, 1)
	req.Spec.Image.Reference = "images.example/does-not-exist:1"
	w.claim(req)
	w.until(attempt, failed1)
	w.remove(attempt)
	w.gone(attempt)
	job, attempt = id(t, "j"), id(t, "a")
	w.claim(request("leak", job, attempt, 1))
	w.until(attempt, up1)
	w.remove(attempt)
	w.gone(attempt)
	patch := []byte(fmt.Sprintf(`{"metadata":{"labels":{%q:"elsewhere"}}}`, label.Rack))
	if _, err := d.admin.CDI.DataVolumes(namespace).Patch(t.Context(), job+"-r0-n0-root", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the disk is no longer seen as the rack's", func() string {
		if _, ok := w.view.DataVolume(job + "-r0-n0-root"); ok {
			return "it is"
		}
		return ""
	})
	attempt = id(t, "a")
	w.claim(withPorts(request("leak", job, attempt, 1)))
	w.until(attempt, up1)
	// The mesh moves while it runs: its guest may reach the new place, too.
	w.Server.Engine.SetReach([]string{"/ip4/198.51.100.9/tcp/4811", "/dns4/elsewhere.example/tcp/4811"})
	eventually(t, "the policy lets the new address through", func() string {
		p, err := d.admin.Networking.NetworkPolicies(namespace).Get(t.Context(), attempt, metav1.GetOptions{})
		if text := fmt.Sprint(p.Spec.Egress); err != nil || !strings.Contains(text, "198.51.100.9/32") || !strings.Contains(text, "192.0.2.7/32") {
			return fmt.Sprint(text, err)
		}
		return ""
	})
	if _, err := w.Server.ListHoldings(t.Context(), &workerv1.ListHoldingsRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Server.CheckRack(t.Context(), &workerv1.CheckRackRequest{}); err != nil {
		t.Fatal(err)
	}
	w.remove(attempt)
	w.gone(attempt)
	// Somebody takes the DataVolume away and leaves what it filled: that must not
	// keep the job for ever.
	alone := metav1.DeletePropagationOrphan
	if err := d.admin.CDI.DataVolumes(namespace).Delete(t.Context(), job+"-r0-n0-root", metav1.DeleteOptions{PropagationPolicy: &alone}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the volume is left without its DataVolume", func() string {
		if _, ok := w.view.DataVolume(job + "-r0-n0-root"); ok {
			return "the DataVolume is there"
		}
		if _, ok := w.view.Volume(job + "-r0-n0-root"); !ok {
			t.Fatal("the volume went with its DataVolume")
		}
		return ""
	})
	w.insist("delete the disks", deleteDisks(w, job))
	eventually(t, "nothing is left", func() string { return strings.Join(d.left(t, label.Job+"="+job), ", ") })

	granted := map[string]bool{}
	for _, r := range preflight.Rights {
		scope := "namespace"
		if r.ClusterWide {
			scope = "cluster"
		}
		for _, verb := range r.Verbs {
			granted[fmt.Sprintf("%s %s/%s %s", scope, r.Group, r.Resource, verb)] = true
		}
	}
	eventually(t, "every right was used", func() string {
		record.mu.Lock()
		defer record.mu.Unlock()
		var unused, missing []string
		for row := range granted {
			if !record.rows[row] {
				unused = append(unused, row)
			}
		}
		for row := range record.rows {
			// Pods of the namespace are read by the right to read them everywhere.
			if !granted[row] && !granted[strings.Replace(row, "namespace", "cluster", 1)] {
				missing = append(missing, row)
			}
		}
		slices.Sort(missing)
		if len(missing) > 0 {
			t.Fatalf("asked without a right in the table: %v", missing)
		}
		slices.Sort(unused)
		return strings.Join(unused, ", ")
	})
}

// TestTheReadinessCheckSaysWhatIsMissingAndWhatToDo looks at the development
// cluster as a worker, and as an account that may do nothing.
func TestTheReadinessCheckSaysWhatIsMissingAndWhatToDo(t *testing.T) {
	t.Parallel()
	d := start(t)
	look := func(args ...string) (int, string) {
		var out, errs bytes.Buffer
		code := check(t.Context(), append([]string{"--kubeconfig", d.kubeconfig}, args...), &out, &errs)
		return code, out.String() + errs.String()
	}
	code, text := look("--node-selector", "topology.kubernetes.io/region=check")
	if code != checkGood {
		t.Fatalf("a good cluster: code %d\n%s", code, text)
	}
	for _, row := range []string{"node check-gpu-00", "2 in all, 2 healthy, 0 held, 2 offered", "storage class", "CDI v", "KubeVirt v1.7", "this account may do what a worker does", "clock agrees"} {
		if !strings.Contains(text, row) {
			t.Errorf("nothing of %q:\n%s", row, text)
		}
	}
	if strings.Contains(text, "cannot read") {
		t.Errorf("the shipped Role does not let it read everything:\n%s", text)
	}
	if code, text = look("--node-selector", "topology.kubernetes.io/region=nowhere"); code != checkBlocked || !strings.Contains(text, "no node matches") {
		t.Errorf("no nodes: code %d\n%s", code, text)
	}
	if code, text = look("--storage-class", "fast", "--output", "json"); code != checkBlocked || !strings.Contains(text, `there is no storage class \"fast\"`) || !strings.Contains(text, `"verdict": "gate"`) {
		t.Errorf("no storage class: code %d\n%s", code, text)
	}
	if code, text = look("--namespace", "default"); code != checkBlocked || !strings.Contains(text, "may not: ") || !strings.Contains(text, "rbac.yaml") {
		t.Errorf("without rights: code %d\n%s", code, text)
	}
	nowhere := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(nowhere, []byte(kubeconfigText("http://127.0.0.1:1")), 0o600); err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	if code := check(t.Context(), []string{"--kubeconfig", nowhere}, &out, &errs); code != checkBlocked || !strings.Contains(out.String(), "does not answer") {
		t.Errorf("no cluster: code %d\n%s%s", code, out.String(), errs.String())
	}
	if code := check(t.Context(), nil, &out, &errs); code != checkUsage {
		t.Errorf("no kubeconfig: code %d", code)
	}
}

// TestWhatARackHoldsIsListedWhole compares the list with the cluster.
func TestWhatARackHoldsIsListedWhole(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "leak").serves()
	job, attempt := id(t, "j"), id(t, "a")
	w.claim(withPorts(request("leak", job, attempt, 2)))
	w.until(attempt, up1)
	kinds := func() string {
		res, err := w.Server.ListHoldings(t.Context(), &workerv1.ListHoldingsRequest{})
		if err != nil || len(res.Unread) > 0 || res.RackId != "leak" {
			t.Fatalf("%v, %v", res, err)
		}
		var out []string
		for _, h := range res.Holdings {
			if h.JobId == job {
				out = append(out, fmt.Sprintf("%s:%d", h.Kind, h.GpuCount))
			}
		}
		return strings.Join(out, " ")
	}
	if got, want := kinds(), "Claim:2 ConfigMap:2 DataVolume:0 NetworkPolicy:0 PersistentVolumeClaim:0 Pod:0 Service:0 VirtualMachineInstance:2"; got != want {
		t.Errorf("while it runs: %s, want %s", got, want)
	}
	w.remove(attempt)
	w.gone(attempt)
	if got := kinds(); got != "DataVolume:0 PersistentVolumeClaim:0" {
		t.Errorf("after a stop: %s", got)
	}
	w.insist("delete the disks", deleteDisks(w, job))
	eventually(t, "nothing is listed", kinds)
}
