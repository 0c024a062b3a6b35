// Package collect pulls metrics and follows logs of every daemon of the roster
// and every running agent, over the mesh. It decides nothing about them and
// serves nobody.
package collect

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/libp2p/go-libp2p/core/peer"
	"google.golang.org/grpc"

	"github.com/cosmicac/cosmicac/pkg/identity"
	"github.com/cosmicac/cosmicac/pkg/trust"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	"github.com/cosmicac/cosmicac/services/wrk-monitor/internal/journal"
	"github.com/cosmicac/cosmicac/services/wrk-monitor/internal/series"
)

// Mesh is what collect needs of the node.
type Mesh interface {
	Client(p peer.ID, addresses ...string) grpc.ClientConnInterface
	Network() *trust.Network
}

// Collector owns one goroutine pair a target: one pulls metrics, one follows
// logs. Targets come and go with the roster and with ork's job records.
type Collector struct {
	Mesh    Mesh
	Series  *series.Store
	Journal *journal.Journal
	// Every is the time between two pulls of one target.
	Every time.Duration
	Log   hclog.Logger
	Now   func() time.Time

	mu   sync.Mutex
	jobs map[string]*orkv1.Job
}

// target is one thing to collect from.
type target struct {
	series.Target
	key       string
	addresses string
}

// Run collects until ctx is done; it returns when every goroutine has ended.
func (c *Collector) Run(ctx context.Context) error {
	c.jobs = map[string]*orkv1.Job{}
	var all sync.WaitGroup
	defer all.Wait()
	changed := make(chan struct{}, 1)
	all.Go(func() { c.watchJobs(ctx, changed) })
	roster, stop := c.Mesh.Network().Subscribe()
	defer stop()
	running := map[target]context.CancelFunc{}
	defer func() {
		for _, cancel := range running {
			cancel()
		}
	}()
	tick := time.NewTicker(10 * time.Second)
	defer tick.Stop()
	for {
		want := c.targets()
		for t, cancel := range running {
			if !want[t] {
				cancel()
				delete(running, t)
			}
		}
		for t := range want {
			if running[t] != nil {
				continue
			}
			id, err := identity.ParseID(t.key)
			if err != nil {
				continue
			}
			own, cancel := context.WithCancel(ctx)
			running[t] = cancel
			conn := c.Mesh.Client(id, strings.Fields(t.addresses)...)
			all.Go(func() { c.pull(own, t, meshv1.NewNodeClient(conn)) })
			all.Go(func() { c.follow(own, t, meshv1.NewNodeClient(conn)) })
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-roster:
		case <-tick.C:
		}
	}
}

// targets are the roster's daemons and the agents of live attempts.
func (c *Collector) targets() map[target]bool {
	want := map[target]bool{}
	for _, m := range c.Mesh.Network().Roster().GetMembers() {
		role := ""
		for _, r := range m.GetRoles() {
			if r != meshv1.Role_ROLE_OPERATOR {
				role = strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(r.String(), "ROLE_")), "_", "-")
			}
		}
		if role != "" {
			want[target{Target: series.Target{Instance: m.GetName(), Role: role}, key: m.GetKey()}] = true
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, j := range c.jobs {
		for _, r := range j.GetReplicas() {
			for _, a := range r.GetAttempts() {
				// Kept until the cluster says it is gone, so that last lines are read.
				if a.GetAgentKey() == "" || a.GetGone() || a.GetEndedAt() != nil {
					continue
				}
				want[target{Target: series.Target{Instance: a.GetId(), Role: "agent", Agent: true, ProjectID: j.GetOwner().GetProjectId(), JobID: j.GetId(), ReplicaID: r.GetId(), AttemptID: a.GetId()},
					key: a.GetAgentKey(), addresses: strings.Join(a.GetAgentAddresses(), " ")}] = true
			}
		}
	}
	return want
}

func (c *Collector) watchJobs(ctx context.Context, changed chan<- struct{}) {
	signal := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	for ; ctx.Err() == nil; pause(ctx, 2*time.Second) {
		for _, m := range c.Mesh.Network().ByRole(meshv1.Role_ROLE_ORK) {
			id, err := identity.ParseID(m.GetKey())
			if err != nil {
				continue
			}
			stream, err := orkv1.NewJobsClient(c.Mesh.Client(id)).WatchJobs(ctx, &orkv1.WatchJobsRequest{})
			if err != nil {
				c.Log.Debug("watch of jobs failed", "error", err)
				continue
			}
			// What a new stream does not name before `synced` is gone.
			fresh := map[string]*orkv1.Job{}
			synced := false
			for {
				change, err := stream.Recv()
				if err != nil {
					c.Log.Debug("watch of jobs ended", "error", err)
					break
				}
				c.mu.Lock()
				table := c.jobs
				if !synced {
					table = fresh
				}
				switch {
				case change.GetJob() != nil:
					table[change.GetJob().GetId()] = change.GetJob()
				case change.GetDeletedJobId() != "":
					delete(table, change.GetDeletedJobId())
				case change.GetSynced():
					synced, c.jobs = true, fresh
				}
				c.mu.Unlock()
				signal()
			}
		}
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// pull stores a sample of the target each Every, or that it is down.
func (c *Collector) pull(ctx context.Context, t target, node meshv1.NodeClient) {
	tick := time.NewTicker(c.Every)
	defer tick.Stop()
	for {
		call, cancel := context.WithTimeout(ctx, min(c.Every, 10*time.Second))
		started := c.Now()
		r, err := node.GetMetrics(call, &meshv1.GetMetricsRequest{})
		cancel()
		if ctx.Err() != nil {
			return
		}
		var exposition []byte
		if err != nil {
			c.Log.Debug("pull of metrics failed", "target", t.Instance, "error", err)
		} else if exposition = r.GetExposition(); exposition == nil {
			exposition = []byte{}
		}
		if err := c.Series.Append(ctx, t.Target, exposition, started, c.Now().Sub(started)); err != nil && ctx.Err() == nil {
			c.Log.Warn("samples not stored", "target", t.Instance, "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// follow writes the target's log lines to the journal, in order; after a break
// it goes on where it left.
func (c *Collector) follow(ctx context.Context, t target, node meshv1.NodeClient) {
	owner := journal.Owner{ProjectID: t.ProjectID, JobID: t.JobID}
	for ; ctx.Err() == nil; pause(ctx, 2*time.Second) {
		stream, err := node.StreamLogs(ctx, &meshv1.StreamLogsRequest{After: c.Journal.Position(t.Instance), Tail: 1000, Follow: true})
		if err != nil {
			continue
		}
		for {
			r, err := stream.Recv()
			if err != nil {
				break
			}
			lines := make([]journal.Line, 0, len(r.GetLines()))
			position := ""
			for _, l := range r.GetLines() {
				text := l.GetText()
				if len(text) > 16<<10 {
					text = text[:16<<10]
				}
				lines = append(lines, journal.Line{Time: l.GetTime().AsTime(), Source: l.GetSource(), Text: strings.ToValidUTF8(string(text), "\uFFFD"), Gap: l.GetGap()})
				position = l.GetPosition()
			}
			if len(lines) == 0 {
				continue
			}
			if err := c.Journal.Append(t.Instance, owner, position, lines); err != nil {
				c.Log.Warn("log lines not stored", "target", t.Instance, "error", err)
				break
			}
		}
	}
}
