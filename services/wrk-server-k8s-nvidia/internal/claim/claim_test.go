package claim

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/capacity"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
)

const model = "GH100_H100_SXM5_80GB"

func node(name string) *corev1.Node {
	l := corev1.ResourceList{
		corev1.ResourceName("nvidia.com/" + model): resource.MustParse("8"), corev1.ResourceCPU: resource.MustParse("192"),
		corev1.ResourceMemory: resource.MustParse("1Ti"), corev1.ResourcePods: resource.MustParse("110"),
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{label.KubeVirtSchedulable: "true"}},
		Status:     corev1.NodeStatus{Capacity: l, Allocatable: l, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	}
}

func book(entry *orkv1.RackEntry, nodes ...*corev1.Node) *Book {
	return NewBook(func(claims []capacity.Claim) *capacity.Rack {
		return capacity.Count(capacity.Input{
			Nodes: nodes, Claims: claims, Entry: entry,
			Permitted: capacity.Permitted{Known: true, Devices: []capacity.Device{{Resource: "nvidia.com/" + model, PCI: "10DE:2330"}}},
		})
	}, time.Now)
}

func record(id, node string, gpus int) *Record {
	return &Record{
		Version: 1, AttemptID: id, JobID: "j-1", ReplicaID: "r-1", Model: model,
		Nodes: []RecordNode{{Node: node, GPUs: gpus, CPUCores: 8 * int64(max(1, gpus)), MemoryBytes: 64 * capacity.GiB}},
	}
}

func written(context.Context) error { return nil }

func TestAHundredAskForEightGPUsAndNeverMoreAreGranted(t *testing.T) {
	t.Parallel()
	b := book(&orkv1.RackEntry{Id: "rk"}, node("n"))
	var wg sync.WaitGroup
	var mu sync.Mutex
	granted, busy, most := 0, 0, 0
	for i := range 100 {
		wg.Go(func() {
			refused, err := b.Grant(t.Context(), record(fmt.Sprintf("a-%d", i), "n", 1), func(context.Context) error {
				mu.Lock()
				defer mu.Unlock()
				if held := b.Rack().Nodes["n"].GPUs[model].Held; held > most {
					most = held
				}
				return nil
			})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				t.Errorf("grant %d: %v", i, err)
			case refused.OK():
				granted++
			case refused.Reason == orkv1.Reason_REASON_BUSY:
				busy++
			default:
				t.Errorf("grant %d: %+v", i, refused)
			}
		})
	}
	wg.Wait()
	if granted != 8 || busy != 92 || most != 8 {
		t.Fatalf("granted %d, busy %d, at most %d held at once", granted, busy, most)
	}
}

func TestWhyAPlanDoesNotHold(t *testing.T) {
	t.Parallel()
	cordoned := node("n")
	cordoned.Spec.Unschedulable = true
	entry := &orkv1.RackEntry{Id: "rk"}
	big := record("a-1", "n", 1)
	big.Nodes[0].MemoryBytes = 2 << 40
	full := record("a-1", "n", 1)
	full.Nodes[0].MemoryBytes = 900 * capacity.GiB
	unknown := record("a-1", "n", 1)
	unknown.Model = "GB100_B200"
	two := record("a-1", "n", 8)
	two.Nodes = append(two.Nodes, two.Nodes[0])
	two.Nodes[1].Node, two.Adapter = "m", cx7
	for _, c := range []struct {
		name   string
		book   *Book
		rec    *Record
		held   int
		reason orkv1.Reason
		words  string
	}{
		{"it holds", book(entry, node("n")), record("a-1", "n", 8), 0, 0, ""},
		{"a machine without GPUs", book(entry, node("n")), record("a-1", "n", 0), 8, 0, ""},
		{"two nodes", book(entry, node("n"), node("m")), two, 0, 0, ""},
		{"half a gang", book(entry, node("n"), node("m")), two, 1, orkv1.Reason_REASON_BUSY, "offers 7 of 8"},
		{"busy", book(entry, node("n")), record("a-1", "n", 4), 5, orkv1.Reason_REASON_BUSY, "offers 3 of 8"},
		{"more than the node has", book(entry, node("n")), record("a-1", "n", 9), 0, orkv1.Reason_REASON_NEVER_FITS, "has 8"},
		{"never fits comes before busy", book(entry, node("n")), record("a-1", "n", 9), 8, orkv1.Reason_REASON_NEVER_FITS, "has 8"},
		{"more memory than the node has", book(entry, node("n")), big, 0, orkv1.Reason_REASON_NEVER_FITS, "memory in all"},
		{"memory is taken", book(entry, node("n")), full, 3, orkv1.Reason_REASON_BUSY, "memory free"},
		{"another node", book(entry, node("m")), record("a-1", "n", 1), 0, orkv1.Reason_REASON_CLAIM_REFUSED, "not in this rack"},
		{"a model it lacks", book(entry, node("n")), unknown, 0, orkv1.Reason_REASON_UNKNOWN_MODEL, "has no GB100_B200"},
		{"a model the entry lacks", book(&orkv1.RackEntry{AllowedModels: []string{"X"}}, node("n")), record("a-1", "n", 1), 0, orkv1.Reason_REASON_UNKNOWN_MODEL, "does not offer"},
		{"a cordoned node", book(entry, cordoned), record("a-1", "n", 1), 0, orkv1.Reason_REASON_CORDONED, "cordoned"},
		{"a cordoned rack", book(&orkv1.RackEntry{Cordoned: true}, node("n")), record("a-1", "n", 1), 0, orkv1.Reason_REASON_CORDONED, "rack is cordoned"},
		{"more than the entry allows ever", book(&orkv1.RackEntry{MaximumGpus: 2}, node("n")), record("a-1", "n", 4), 0, orkv1.Reason_REASON_NEVER_FITS, "allows 2 GPUs"},
		{"more than the entry allows now", book(&orkv1.RackEntry{MaximumGpus: 6}, node("n")), record("a-1", "n", 4), 3, orkv1.Reason_REASON_BUSY, "allows 6 GPUs, 3 are granted"},
		{"before the entry is known", book(nil, node("n")), record("a-1", "n", 1), 0, orkv1.Reason_REASON_CLAIM_REFUSED, "entry"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if c.held > 0 {
				held := record("a-held", "n", c.held)
				held.Nodes[0].CPUCores, held.Nodes[0].MemoryBytes = 1, 200*capacity.GiB
				c.book.Restore(held.Claim())
			}
			got, err := c.book.Grant(t.Context(), c.rec, written)
			if err != nil || got.Reason != c.reason || !strings.Contains(got.Message, c.words) {
				t.Fatalf("%v %q, error %v; want %v %q", got.Reason, got.Message, err, c.reason, c.words)
			}
		})
	}
}

func TestAnUnansweredWriteKeepsItsClaim(t *testing.T) {
	t.Parallel()
	b := book(&orkv1.RackEntry{}, node("n"))
	lost := errors.New("connection reset")
	if _, err := b.Grant(t.Context(), record("a-1", "n", 8), func(context.Context) error { return lost }); !errors.Is(err, lost) {
		t.Fatalf("error %v", err)
	}
	if refused, _ := b.Grant(t.Context(), record("a-2", "n", 1), written); refused.Reason != orkv1.Reason_REASON_BUSY {
		t.Fatalf("its GPUs were given away: %+v", refused)
	}
	if open := b.Open(0); len(open) != 1 || open[0] != "a-1" {
		t.Fatalf("open %v", open)
	}
	if refused, err := b.Grant(t.Context(), record("a-1", "n", 8), written); err != nil || !refused.OK() {
		t.Fatalf("asked again: %+v %v", refused, err)
	}
	if open := b.Open(0); len(open) != 0 {
		t.Fatalf("still open: %v", open)
	}
	b.Release("a-1")
	if refused, _ := b.Grant(t.Context(), record("a-2", "n", 1), written); !refused.OK() {
		t.Fatalf("not free after the release: %+v", refused)
	}
	// A write that certainly failed leaves nothing.
	if _, err := b.Grant(t.Context(), record("a-3", "n", 7), func(context.Context) error { return errors.Join(lost, ErrNotWritten) }); err == nil || b.Holds("a-3") {
		t.Fatalf("error %v, holds %v", err, b.Holds("a-3"))
	}
}

// A slow cluster must not hold up other jobs' grants, nor give their GPUs twice.
func TestASlowWriteHoldsUpNoOtherAttemptAndItsGPUsAreTaken(t *testing.T) {
	t.Parallel()
	b := book(&orkv1.RackEntry{}, node("n"))
	begun, answer, granted := make(chan struct{}), make(chan struct{}), make(chan error, 2)
	grant := func(write func(context.Context) error) {
		refused, err := b.Grant(t.Context(), record("a-1", "n", 6), write)
		if err == nil && !refused.OK() {
			err = errors.New(refused.Message)
		}
		granted <- err
	}
	go grant(func(context.Context) error { close(begun); <-answer; return nil })
	<-begun
	if refused, err := b.Grant(t.Context(), record("a-2", "n", 2), written); err != nil || !refused.OK() {
		t.Fatalf("another attempt beside it: %+v %v", refused, err)
	}
	if refused, _ := b.Grant(t.Context(), record("a-3", "n", 1), written); refused.Reason != orkv1.Reason_REASON_BUSY {
		t.Fatalf("a GPU that is being claimed was given away: %+v", refused)
	}
	// The same attempt asked again waits for the first answer.
	second := false
	go grant(func(context.Context) error { second = true; return nil })
	patience, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := b.Grant(patience, record("a-1", "n", 6), written); !errors.Is(err, ErrNotWritten) || !b.Holds("a-1") {
		t.Fatalf("who gives up waiting: %v, holds %v", err, b.Holds("a-1"))
	}
	close(answer)
	for range 2 {
		if err := <-granted; err != nil {
			t.Fatal(err)
		}
	}
	if !second || len(b.Claims()) != 2 || len(b.Open(0)) != 0 {
		t.Fatalf("written again %v, claims %v, open %v", second, b.Claims(), b.Open(0))
	}
}

func TestAnAnchorSaysWhatWasClaimedAndNoSecret(t *testing.T) {
	t.Parallel()
	req := &workerv1.ApplyAttemptRequest{
		AttemptId: "a-1", JobId: "j-1", Spec: &orkv1.JobSpec{Environment: map[string]string{"TOKEN": "hush-hush"}, StartScript: "hush-hush"},
		Nodes: []*workerv1.PlanNode{{NodeName: "n", GpuCount: 2, Seed: &agentv1.Seed{JoinToken: "hush-hush"}}},
	}
	hash, err := SpecHash(req)
	if err != nil {
		t.Fatal(err)
	}
	req.Nodes[0].Seed.JoinToken = "another"
	if again, _ := SpecHash(req); again != hash {
		t.Fatal("a new token makes it another spec")
	}
	req.Nodes[0].GpuCount = 3
	if other, _ := SpecHash(req); other == hash {
		t.Fatal("another plan has the same hash")
	}
	rec := record("a-1", "n", 2)
	rec.SpecHash = hash
	data, err := rec.Data()
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range data {
		if strings.Contains(v, "hush") {
			t.Fatalf("a secret in the anchor: %s", v)
		}
	}
	patch, err := Patch("uid-1", &Intent{Delete: true, Reason: orkv1.Reason_REASON_STOP_REQUESTED}, nil, nil)
	if err != nil || !strings.Contains(string(patch), `"uid":"uid-1"`) || strings.Contains(string(patch), "outcome") {
		t.Fatalf("patch %s, %v", patch, err)
	}
	a, err := ReadAnchor(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a-1", UID: "uid-1"}, Data: data})
	if err != nil || a.Record.Claim().Nodes[0].GPUs != 2 || a.UID != "uid-1" {
		t.Fatalf("read back %+v, %v", a, err)
	}
	if _, err := ReadAnchor(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a-2"}, Data: data}); err == nil {
		t.Fatal("a record under another name was taken")
	}
	if _, err := ReadAnchor(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "kube-root-ca.crt"}}); !errors.Is(err, ErrForeign) {
		t.Fatalf("foreign: %v", err)
	}
}
