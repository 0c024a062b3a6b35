package app

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/cosmicac/cosmicac/pkg/fault"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/label"
	"github.com/cosmicac/cosmicac/services/wrk-server-k8s-nvidia/internal/tenure"
)

// heard is an operator who listens to a probe.
type heard struct {
	grpc.ServerStream
	ctx  context.Context
	rows []string
}

func (h *heard) Context() context.Context { return h.ctx }

func (h *heard) Send(r *workerv1.ProbeRackResponse) error {
	f := r.Finding
	row := strings.ToLower(strings.TrimPrefix(f.Verdict.String(), "CHECK_VERDICT_")) + " " + f.Row + ": " + f.Message
	if f.Remedy != "" {
		row += " -> " + f.Remedy
	}
	h.rows = append(h.rows, row)
	return nil
}

// probes runs a probe and gives its rows.
func (w *worker) probes(ctx context.Context, image string) (string, error) {
	h := &heard{ctx: ctx}
	err := w.Server.ProbeRack(&workerv1.ProbeRackRequest{Image: image}, h)
	return strings.Join(h.rows, "\n"), err
}

// ofProbes selects what probes of a rack have.
func ofProbes(rack string) string { return label.Probe + "=true," + label.Rack + "=" + rack }

func (w *worker) mustProbe(want ...string) {
	w.t.Helper()
	w.mustProbeOn("", want...)
}

func (w *worker) mustProbeOn(image string, want ...string) {
	w.t.Helper()
	rows, err := w.probes(w.t.Context(), image)
	if err != nil {
		w.t.Fatalf("%v\n%s", err, rows)
	}
	for _, words := range want {
		if !strings.Contains(rows, words) {
			w.t.Errorf("nothing of %q:\n%s", words, rows)
		}
	}
	// The call has returned: nothing is left.
	if left := w.d.left(w.t, ofProbes(w.rack)); len(left) > 0 {
		w.t.Errorf("left: %v\n%s", left, rows)
	}
}

const h100 = "GH100_H100_SXM5_80GB"

// TestAProbeSaysWhatRunsAndLeavesNothing probes a rack that is well, one whose GPUs are
// held, and one that cannot get the image.
func TestAProbeSaysWhatRunsAndLeavesNothing(t *testing.T) {
	t.Parallel()
	d := start(t)
	w := begin(t, d, "probe").serves()

	// While a job holds three of four GPUs, the probe gets the fourth: never one twice.
	first, second := id(t, "a"), id(t, "b")
	w.claim(request("probe", id(t, "j"), first, 2, "probe-gpu-00"))
	w.claim(request("probe", id(t, "k"), second, 1, "probe-gpu-01"))
	w.until(first, up1)
	w.until(second, up1)
	watched, stop := make(chan string, 1), make(chan struct{})
	go func() { watched <- w.watchGPUs(d, stop) }()
	w.mustProbe(
		"warning probe: the nodes are simulated", "ok probe disk: docker://ghcr.io/cosmicac/runtime-command:test became a root disk",
		"ok probe machine: a VM without a GPU ran on node probe-gpu-0", "ok probe "+h100+": a VM with one GPU ran on node probe-gpu-01 after ",
		"ok probe removal: nothing is left of 2 probes")
	close(stop)
	if words := <-watched; words != "" {
		t.Error(words)
	}

	// With every GPU held, none is taken for it.
	third := id(t, "c")
	w.claim(request("probe", id(t, "l"), third, 1, "probe-gpu-01"))
	w.until(third, up1)
	w.mustProbe("ok probe machine", "unknown probe "+h100+": not tried: none is offered; 4 in all, 4 held", "ok probe removal: nothing is left of 1 probes")
	for _, a := range []string{first, second, third} {
		if st := w.status(a); st.GetPhase() != up1 {
			t.Errorf("a job beside the probes: %v", st)
		}
		w.remove(a)
		w.gone(a)
	}

	w.mustProbeOn("images.example/does-not-exist:1", "gate probe disk: images.example/does-not-exist:1 does not become a root disk", "manifest unknown", "-> see that CDI reaches the registry",
		"unknown probe machine: not tried", "unknown probe "+h100+": not tried", "ok probe removal: nothing is left of 1 probes")

	if rows, err := w.probes(t.Context(), "two words"); fault.KindOf(err) != fault.Invalid {
		t.Errorf("an image of two words: %v\n%s", err, rows)
	}
	// Another process of the rack gives nothing out.
	other := begin(t, d, "probe", func(s *Setup) { s.Self = tenure.Holder{Key: "another", Place: "elsewhere:/state", Instance: "2"} })
	if rows, err := other.probes(t.Context(), ""); fault.KindOf(err) != fault.Unavailable || rows != "" {
		t.Errorf("a worker that does not hold the rack: %v\n%s", err, rows)
	}
}

// watchGPUs looks at every report until it is told to stop, and says what is wrong.
func (w *worker) watchGPUs(d *devcluster, stop chan struct{}) string {
	for held := false; ; time.Sleep(20 * time.Millisecond) {
		r, _ := w.Hub.Latest()
		for _, n := range r.GetNodes() {
			for _, g := range n.GetGpus() {
				for holder := range g.GetHolders() {
					held = held || strings.HasPrefix(holder, "probe-")
				}
				if g.Held > g.Total {
					return fmt.Sprintf("%d of %d GPUs of %s are held", g.Held, g.Total, n.Name)
				}
			}
		}
		for _, a := range r.GetAttempts() {
			if strings.HasPrefix(a.AttemptId, "probe-") {
				return "a report tells of a probe, which no record knows: " + a.AttemptId
			}
		}
		for _, job := range r.GetDiskJobIds() {
			if strings.HasPrefix(job, "probe-") {
				return "a report tells of a probe's disk: " + job
			}
		}
		select {
		case <-stop:
			if !held {
				return "the probe's GPU was never counted as held"
			}
			return ""
		default:
		}
	}
}

// TestAProbeThatFailsOrIsBrokenOffLeavesNothing probes a rack with a fault of a node and
// of the import, then ends the operator's call, and then the worker, in the middle of a
// probe. It is not parallel: others use the same switches.
func TestAProbeThatFailsOrIsBrokenOffLeavesNothing(t *testing.T) {
	d := start(t)
	w := begin(t, d, "halt", func(s *Setup) { s.Config.Deadlines.ImportIdle = 10 * time.Second }).serves()
	broken := func(name, target string) {
		d.breaks(t, name, target)
		time.Sleep(2 * time.Second) // the switches are read each second
	}
	broken("vfio-busy", "halt-gpu-00")
	w.mustProbe("ok probe machine", "gate probe "+h100+": a VM with one GPU does not run on node halt-gpu-00: ", "/dev/vfio/42",
		"-> look at the node's virt-handler", "ok probe removal: nothing is left of 2 probes")
	broken("vfio-busy", "")
	broken("import-stalled", "probe-")
	w.mustProbe("gate probe disk", "no progress", "37 %", "raise deadlines", "unknown probe machine: not tried", "unknown probe "+h100, "ok probe removal: nothing is left of 1 probes")
	broken("import-stalled", "")
	broken("stuck-scheduled", "halt-gpu-00")
	defer d.breaks(t, "stuck-scheduled", "")

	// begun starts a probe that cannot end, and waits until its machine is made.
	begun := func(w *worker) (cancel func(), done chan error) {
		ctx, cancel := context.WithCancel(t.Context())
		done = make(chan error, 1)
		go func() {
			_, err := w.probes(ctx, "")
			done <- err
		}()
		eventually(t, "the probe's machine is made", func() string {
			if left := d.left(t, ofProbes("halt")); !strings.Contains(strings.Join(left, " "), "VMI ") {
				return fmt.Sprint(left)
			}
			return ""
		})
		return cancel, done
	}
	nothing := func() {
		t.Helper()
		eventually(t, "nothing is left of the probe", func() string { return strings.Join(d.left(t, ofProbes("halt")), ", ") })
	}

	cancel, done := begun(w)
	if _, err := w.probes(t.Context(), ""); fault.KindOf(err) != fault.Conflict {
		t.Errorf("a second probe at once: %v", err)
	}
	// doctor is told that these are a probe's.
	res, err := w.Server.ListHoldings(t.Context(), &workerv1.ListHoldingsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]bool{}
	for _, h := range res.Holdings {
		if h.RackId == "halt" {
			if kinds[h.Kind] = true; !h.Probe {
				t.Errorf("not told of as a probe's: %v", h)
			}
		}
	}
	if !kinds["Claim"] || !kinds["DataVolume"] || !kinds["ConfigMap"] {
		t.Errorf("held: %v", kinds)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("broken off: %v", err)
	}
	nothing()

	// The worker dies, and what it knew dies with it.
	cancel, done = begun(w)
	w.end()
	cancel()
	<-done
	if left := d.left(t, ofProbes("halt")); len(left) == 0 {
		t.Fatal("the worker that ended took its probe along; it is to be found by the next")
	}
	next := begin(t, d, "halt").serves()
	nothing()
	eventually(t, "no claim is left", func() string {
		if g := next.gpu("halt-gpu-00"); g.Held != 0 {
			return g.String()
		}
		return ""
	})
}
