package api

import (
	"strings"
	"testing"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/rack"
)

// TestGPUsThatANodeDoesNotOfferAreNamedBesideWhatIsFree: a rack that gives some of
// its GPUs says why it does not give the others.
func TestGPUsThatANodeDoesNotOfferAreNamedBesideWhatIsFree(t *testing.T) {
	t.Parallel()
	node := func(name string, held, offerable uint32, words string) *orkv1.RackNode {
		return &orkv1.RackNode{Name: name, Gpus: []*orkv1.GpuCapacity{{Model: "H100", Total: 8, Held: held, Offerable: offerable, Message: words}}}
	}
	views := []rack.View{{Entry: &orkv1.RackEntry{Id: "rk"}, Report: &workerv1.WatchRackResponse{Nodes: []*orkv1.RackNode{
		node("good", 3, 5, ""), node("silent", 3, 0, "its device plugin reports nothing"),
	}}}}
	if got := withheld(views, "rk", "h100"); got != "5 more are not offered: node silent: its device plugin reports nothing" {
		t.Errorf("%q", got)
	}
	views[0].Report.Nodes = append(views[0].Report.Nodes, node("other", 0, 0, ""))
	if got := withheld(views, "rk", "h100"); !strings.HasPrefix(got, "13 more are not offered: 2 nodes, the first is node silent") {
		t.Errorf("%q", got)
	}
	for _, none := range []string{withheld(views, "rk", "a100"), withheld(views, "rk-2", "h100"), withheld(views[:0], "rk", "h100")} {
		if none != "" {
			t.Errorf("%q", none)
		}
	}
}
