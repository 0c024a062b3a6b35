package soak

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/services/cosmicac-cli/internal/client"
)

const (
	// settle is how long the three sides of a card's ledger may differ while
	// every process serves: what a killed or cut off daemon missed is caught up
	// with by then, also by way of its slowest deadline of a default
	// configuration (an order is repeated after 30 s).
	settle = 60 * time.Second
	// stale is how old the last word of a rack may be that is shown as connected.
	stale = 45 * time.Second
	look  = time.Second
)

// cards counts GPUs by attempt and node.
type cards map[[2]string]int

func (c cards) nodes() map[string]int {
	sum := map[string]int{}
	for k, n := range c {
		sum[k[1]] += n
	}
	return sum
}

func (c cards) attempts() map[string]bool {
	out := map[string]bool{}
	for k := range c {
		out[k[0]] = true
	}
	return out
}

// watcher holds three sides of every card against each other all through the
// trouble: the anchors of claims and the launcher pods, as the cluster itself
// has them, and the attempts that the orchestrator calls live. What may never
// be is broken at once; what may differ for a moment is broken when it lasts.
// It also looks at what the rules say of things that were seen: a mark expires,
// and no mark is of another's clock.
type watcher struct {
	p      *platform
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu      sync.Mutex
	broken  []string
	told    map[string]bool
	lasting map[string]time.Duration // how long each difference was seen, undisturbed
	longest map[string]time.Duration // by kind
	looks   int
	most    [3]int // cards seen at once by claims, pods and records
	last    time.Time
}

// newWatcher begins to look; end it with stop.
func newWatcher(p *platform) *watcher {
	p.t.Helper()
	w := &watcher{p: p, told: map[string]bool{}, lasting: map[string]time.Duration{}, longest: map[string]time.Duration{}}
	var ctx context.Context
	ctx, w.cancel = context.WithCancel(context.Background())
	w.done.Go(func() {
		for ctx.Err() == nil {
			w.look()
			select {
			case <-ctx.Done():
			case <-time.After(look):
			}
		}
	})
	p.t.Cleanup(w.stop)
	return w
}

func (w *watcher) stop() {
	w.cancel()
	w.done.Wait()
}

// check returns what was found broken since the last check.
func (w *watcher) check() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.broken
	w.broken = nil
	return out
}

// report says how often it looked and what differed for how long.
func (w *watcher) report() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var words []string
	for _, kind := range slices.Sorted(maps.Keys(w.longest)) {
		words = append(words, fmt.Sprintf("%s %s", kind, w.longest[kind].Round(time.Second)))
	}
	if slices.Contains(w.most[:], 0) {
		w.p.t.Errorf("the watcher never saw a card on all three sides: %v", w.most)
	}
	return fmt.Sprintf("looked %d times, at up to %d cards of claims, %d of pods, %d of records; what differed longest: %s",
		w.looks, w.most[0], w.most[1], w.most[2], strings.Join(words, ", "))
}

func (w *watcher) breaks(format string, args ...any) {
	words := fmt.Sprintf(format, args...)
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.told[words] {
		w.told[words] = true
		w.broken = append(w.broken, words)
		w.p.note("%s", words)
	}
}

// scene is what one look saw.
type scene struct {
	claims, pods cards
	jobs         []record
	racks        []client.Rack
	silent       map[string]bool // nodes that the cluster does not hear of
}

// record is what the rules ask of a job, as the API shows it.
type record struct {
	ID          string
	Name        string
	CreatedAt   time.Time `json:"created_at"`
	Conditions  []client.Condition
	ReplicaList []struct {
		Attempts []struct {
			client.Attempt
			ClaimedAt *time.Time `json:"claimed_at"`
			Abandoned bool
		}
	} `json:"replica_list"`
}

// look reads everything once. What cannot be read now, since its daemon is
// down, is looked at the next time.
func (w *watcher) look() {
	before, err := w.claims()
	if err != nil {
		return
	}
	pods, err := w.p.kube.list("/api/v1", "pods")
	if err != nil {
		return
	}
	s := &scene{pods: cards{}, silent: map[string]bool{}}
	for i := range pods {
		if o := &pods[i]; !o.final() && o.Spec.NodeName != "" && o.gpus() > 0 {
			s.pods[[2]string{o.Metadata.Labels["cosmicac.dev/attempt"], o.Spec.NodeName}] += o.gpus()
		}
	}
	if s.claims, err = w.claims(); err != nil {
		return
	}
	w.never(before, s)

	var nodes struct {
		Items []struct {
			Metadata struct{ Name string }
			Status   struct {
				Conditions []struct{ Type, Status string }
			}
		}
	}
	if err := w.p.kube.get("/api/v1/nodes", &nodes); err != nil {
		return
	}
	for _, n := range nodes.Items {
		for _, c := range n.Status.Conditions {
			if c.Type == "Ready" && c.Status != "True" {
				s.silent[n.Metadata.Name] = true
			}
		}
	}
	if s.jobs, err = w.jobs(); err != nil {
		return
	}
	var racks struct{ Racks []client.Rack }
	if err := w.p.ask("GET", "/api/v1/racks", nil, nil, &racks); err != nil {
		return
	}
	s.racks = racks.Racks
	w.marks(s)
	w.compare(s)
}

// claims reads the anchors: what the workers have granted.
func (w *watcher) claims() (cards, error) {
	anchors, err := w.p.kube.list("/api/v1", "configmaps")
	if err != nil {
		return nil, err
	}
	out := cards{}
	for i := range anchors {
		attempt := anchors[i].Metadata.Labels["cosmicac.dev/attempt"]
		if attempt == "" {
			continue
		}
		var granted struct {
			Nodes []struct {
				Node string
				GPUs int
			}
		}
		if err := json.Unmarshal([]byte(anchors[i].Data["record"]), &granted); err != nil {
			w.breaks("the anchor of attempt %s cannot be read: %v", attempt, err)
			continue
		}
		for _, n := range granted.Nodes {
			out[[2]string{attempt, n.Node}] += n.GPUs
		}
	}
	return out, nil
}

func (w *watcher) jobs() ([]record, error) {
	var all []record
	for page := ""; ; {
		var list struct {
			Jobs          []record
			NextPageToken string `json:"next_page_token"`
		}
		path := "/api/v1/jobs"
		if page != "" {
			path += "?page_token=" + url.QueryEscape(page)
		}
		if err := w.p.ask("GET", path, nil, nil, &list); err != nil {
			return nil, err
		}
		all = append(all, list.Jobs...)
		if page = list.NextPageToken; page == "" {
			return all, nil
		}
	}
}

// never holds what may not be at any instant. before are the claims of just
// before the pods were read.
func (w *watcher) never(before cards, s *scene) {
	for _, claims := range []cards{before, s.claims} {
		for node, n := range claims.nodes() {
			if n > capacity(node) {
				w.breaks("cards granted twice: claims of %s hold %d of %d: %v", node, n, capacity(node), claims)
			}
		}
	}
	for k, n := range s.pods {
		if granted := max(before[k], s.claims[k]); n > granted {
			w.breaks("cards without a grant: pods of attempt %q on %s hold %d, its claim is %d", k[0], k[1], n, granted)
		}
	}
}

// marks looks at what the API shows as seen, which expires and is never of
// the future.
func (w *watcher) marks(s *scene) {
	now := time.Now()
	for _, r := range s.racks {
		if age := now.Sub(r.LastSeenAt); r.Connected && age > stale {
			w.breaks("rack %s is shown as connected and was last seen %s ago", r.ID, age.Round(time.Second))
		}
	}
	for _, j := range s.jobs {
		for _, c := range j.Conditions {
			if c.Since.After(now.Add(2*time.Second)) || c.Since.Before(j.CreatedAt.Add(-2*time.Second)) {
				w.breaks("job %s, made at %s, is %s since %s; it is %s", j.Name, j.CreatedAt, c.Kind, c.Since, now)
			}
		}
	}
	if w.looks%5 != 0 {
		return
	}
	var health struct {
		Warnings []struct{ Daemon, Code, Text string }
	}
	if err := w.p.ask("GET", "/api/v1/health", nil, nil, &health); err != nil {
		return
	}
	for _, warning := range health.Warnings {
		// All processes have one clock: who stood still is silent, not fast or slow.
		if warning.Code == "clock_skew" {
			w.breaks("%s says of one and the same clock: %s", warning.Daemon, warning.Text)
		}
	}
}

// compare counts how long each difference lasts. Only time in which every
// process served counts.
func (w *watcher) compare(s *scene) {
	found, recorded := differences(s)
	w.mu.Lock()
	w.looks++
	for i, c := range []cards{s.claims, s.pods, recorded} {
		sum := 0
		for _, n := range c {
			sum += n
		}
		w.most[i] = max(w.most[i], sum)
	}
	took := min(time.Since(w.last), 5*look)
	w.last = time.Now()
	w.mu.Unlock()
	if !w.p.undisturbed() {
		took = 0
	}
	var late []string
	w.mu.Lock()
	for d := range w.lasting {
		if found[d] == "" {
			delete(w.lasting, d)
		}
	}
	for d, words := range found {
		if _, known := w.lasting[d]; !known {
			w.lasting[d] = 0
			continue
		}
		w.lasting[d] += took
		kind, _, _ := strings.Cut(d, ":")
		w.longest[kind] = max(w.longest[kind], w.lasting[d])
		if w.lasting[d] > settle {
			late = append(late, words)
		}
	}
	w.mu.Unlock()
	for _, words := range late {
		w.breaks("for more than %s: %s", settle, words)
	}
}

// differences are by a key that begins with their kind; the value says what
// differs. recorded are the cards that the orchestrator's records hold.
func differences(s *scene) (found map[string]string, recorded cards) {
	found, recorded = map[string]string{}, cards{}
	differs := func(kind, attempt, node, format string, args ...any) {
		found[kind+": "+attempt+" "+node] = kind + ": " + fmt.Sprintf(format, args...)
	}
	claimed, live := s.claims.attempts(), map[string]bool{}
	for i := range s.jobs {
		j := &s.jobs[i]
		unseen := slices.ContainsFunc(j.Conditions, func(c client.Condition) bool { return c.Kind == "unreachable" })
		silent, running := false, false
		for _, rep := range j.ReplicaList {
			for _, a := range rep.Attempts {
				if a.ClaimedAt == nil || a.Gone || a.Abandoned {
					continue
				}
				live[a.ID] = true
				running = running || a.State == "running"
				if !claimed[a.ID] && slices.ContainsFunc(a.Nodes, func(n client.AttemptNode) bool { return n.GPUCount > 0 }) {
					differs("a record without a claim", a.ID, "", "attempt %s of %s is %s (%s) and not gone, and no claim is there", a.ID, j.Name, a.State, a.Reason)
				}
				for _, n := range a.Nodes {
					k := [2]string{a.ID, n.NodeName}
					recorded[k] = int(n.GPUCount)
					silent = silent || a.State == "running" && s.silent[n.NodeName]
					if claimed[a.ID] && s.claims[k] != int(n.GPUCount) {
						differs("a claim of another size", a.ID, n.NodeName, "attempt %s of %s has %d cards of %s in the record, its claim %d", a.ID, j.Name, n.GPUCount, n.NodeName, s.claims[k])
					}
					if a.State == "running" && s.pods[k] != int(n.GPUCount) {
						differs("running without its cards", a.ID, n.NodeName, "attempt %s of %s runs with %d cards of %s, its pods have %d", a.ID, j.Name, n.GPUCount, n.NodeName, s.pods[k])
					}
				}
			}
		}
		switch {
		case silent && !unseen:
			differs("a silent node is not shown", j.ID, "", "job %s runs on a node that is not heard of, its conditions are %v", j.Name, j.Conditions)
		case unseen && running && !silent:
			differs("a mark is kept", j.ID, "", "job %s runs, all its nodes are heard of, its conditions are %v", j.Name, j.Conditions)
		}
	}
	for attempt := range claimed {
		if !live[attempt] {
			differs("a claim without a record", attempt, "", "attempt %s has a claim, and the orchestrator calls it gone or does not know it", attempt)
		}
	}
	held := map[string]int{}
	for k := range s.claims {
		held[k[1]] += max(s.claims[k], s.pods[k])
	}
	for _, rack := range s.racks {
		if !rack.Connected {
			differs("a rack is not connected", rack.ID, "", "rack %s: %s", rack.ID, rack.Message)
			continue
		}
		for _, n := range rack.Nodes {
			for _, g := range n.GPUs {
				if int(g.Held) != held[n.Name] {
					differs("a ledger of its own", rack.ID, n.Name, "%s is said to have %d cards held, claims and pods there hold %d", n.Name, g.Held, held[n.Name])
				}
			}
		}
	}
	return found, recorded
}
