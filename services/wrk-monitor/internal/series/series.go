// Package series keeps samples in an embedded Prometheus time series database
// and reads them back under a project's view. It does not fetch anything.
package series

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"regexp"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"
	"github.com/prometheus/prometheus/util/annotations"
	"golang.org/x/sys/unix"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// Bounds of what one target may bring. A tenant owns its agent's words.
const (
	MaximumSeriesDaemon = 5000
	MaximumSeriesAgent  = 500
	maximumLabels       = 32
	maximumLabelBytes   = 256
)

// agentNames are the metric families taken from agents.
var agentNames = regexp.MustCompile(`^(vllm:|DCGM_|cosmicac_|process_|go_goroutines$|go_memstats_)`)

// Target is where samples come from; its labels are the monitor's word and
// replace whatever the target says of itself.
type Target struct {
	// Instance is the name in the roster, or the attempt's id.
	Instance string
	Role     string
	// Agents only.
	Agent                                  bool
	ProjectID, JobID, ReplicaID, AttemptID string
}

func (t Target) own() map[string]string {
	m := map[string]string{"instance": t.Instance, "role": t.Role}
	if t.Agent {
		m["project_id"], m["job_id"], m["replica_id"], m["attempt_id"] = t.ProjectID, t.JobID, t.ReplicaID, t.AttemptID
	}
	return m
}

var reserved = []string{"instance", "role", "project_id", "job_id", "replica_id", "attempt_id"}

// Store is the time series database. Append and Query may run at once.
type Store struct {
	db      *tsdb.DB
	symbols *labels.SymbolTable
	mu      sync.Mutex
	dropped prometheus.Counter
}

// Open opens or makes the database in a folder. retention bounds the age of
// samples.
func Open(dir string, retention time.Duration, reg prometheus.Registerer) (*Store, error) {
	o := tsdb.DefaultOptions()
	o.RetentionDuration = retention.Milliseconds()
	o.NoLockfile = true // the state folder is locked as a whole
	// One daemon's own store: small stripes keep an idle one under 60 MB.
	o.StripeSize = 1024
	if err := room(dir); err != nil {
		return nil, err
	}
	db, err := tsdb.Open(dir, slog.New(slog.DiscardHandler), nil, o, nil)
	if err != nil {
		return nil, fault.Wrap(fault.Unavailable, err, "open the time series in %s", dir)
	}
	s := &Store{db: db, symbols: labels.NewSymbolTable(), dropped: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "cosmicac_monitor_samples_dropped_total", Help: "Samples refused: too many series, odd labels, out of order."})}
	if reg != nil {
		reg.MustRegister(s.dropped)
	}
	return s, nil
}

// leastRoom is the free space without which nothing is opened, in bytes: the library
// reserves 128 MiB at once for its newest file, panics when it cannot, and leaves a
// little more behind at each start.
const leastRoom = 160 << 20

func room(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fault.Wrap(fault.Unavailable, err, "make the folder of the time series, %s", dir)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return fault.Wrap(fault.Unavailable, err, "look at the disk of %s", dir)
	}
	if free := fs.Bavail * uint64(fs.Bsize); free < leastRoom {
		return fault.New(fault.Unavailable, "open the time series in %s: its disk has %d MiB left, and at least %d are needed; free space there", dir, free>>20, leastRoom>>20)
	}
	return nil
}

// Close flushes and closes.
func (s *Store) Close() error { return s.db.Close() }

// Append stores one exposition of a target at time now, and its `up`. A nil
// exposition is a target that did not answer. Samples beyond the bounds are
// dropped and counted, the rest is kept.
func (s *Store) Append(ctx context.Context, t Target, exposition []byte, now time.Time, took time.Duration) error {
	app := s.db.Appender(ctx)
	ts := now.UnixMilli()
	up := 0.0
	if exposition != nil {
		up = 1
		if err := s.appendText(app, t, exposition, ts); err != nil {
			_ = app.Rollback()
			return err
		}
	}
	for name, v := range map[string]float64{"up": up, "scrape_duration_seconds": took.Seconds()} {
		own := t.own()
		own[model.MetricNameLabel] = name
		if _, err := app.Append(0, labels.FromMap(own), ts, v); err != nil && !outOfOrder(err) {
			_ = app.Rollback()
			return fault.Wrap(fault.Unavailable, err, "store %s of %s", name, t.Instance)
		}
	}
	if err := app.Commit(); err != nil {
		return fault.Wrap(fault.Unavailable, err, "store samples of %s", t.Instance)
	}
	return nil
}

func outOfOrder(err error) bool {
	return errors.Is(err, storage.ErrOutOfOrderSample) || errors.Is(err, storage.ErrDuplicateSampleForTimestamp) || errors.Is(err, storage.ErrOutOfBounds)
}

func (s *Store) appendText(app storage.Appender, t Target, exposition []byte, ts int64) error {
	limit := MaximumSeriesDaemon
	if t.Agent {
		limit = MaximumSeriesAgent
	}
	// The symbol table is not safe for concurrent use.
	s.mu.Lock()
	defer s.mu.Unlock()
	p := textparse.NewPromParser(exposition, s.symbols, false)
	own := t.own()
	for n := 0; ; {
		entry, err := p.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fault.Wrap(fault.Invalid, err, "metrics of %s are not in Prometheus text form", t.Instance)
		}
		if entry != textparse.EntrySeries {
			continue
		}
		_, _, v := p.Series()
		var l labels.Labels
		p.Labels(&l)
		l, ok := relabel(l, own, t.Agent)
		if n++; !ok || n > limit {
			s.dropped.Inc()
			continue
		}
		if _, err := app.Append(0, l, ts, v); err != nil {
			if outOfOrder(err) {
				s.dropped.Inc()
				continue
			}
			return fault.Wrap(fault.Unavailable, err, "store samples of %s", t.Instance)
		}
	}
}

// relabel puts the monitor's own labels in place of the target's and refuses
// what is out of bounds.
func relabel(l labels.Labels, own map[string]string, agent bool) (labels.Labels, bool) {
	name := l.Get(model.MetricNameLabel)
	if name == "" || l.Len() > maximumLabels || agent && !agentNames.MatchString(name) {
		return l, false
	}
	b := labels.NewBuilder(l)
	b.Del(reserved...)
	fine := true
	l.Range(func(x labels.Label) {
		fine = fine && len(x.Name) <= maximumLabelBytes && len(x.Value) <= maximumLabelBytes
	})
	for k, v := range own {
		if v != "" {
			b.Set(k, v)
		}
	}
	return b.Labels(), fine
}

// View gives a reader what it may see: everything, or the series of some
// projects only. A view of no project sees nothing.
func (s *Store) View(everything bool, projects []string) storage.Queryable {
	if everything {
		return s.db
	}
	quoted := make([]string, len(projects))
	for i, p := range projects {
		quoted[i] = regexp.QuoteMeta(p)
	}
	sort.Strings(quoted)
	if len(quoted) == 0 {
		quoted = []string{"$none^"}
	}
	return &view{s.db, labels.MustNewMatcher(labels.MatchRegexp, "project_id", strings.Join(quoted, "|"))}
}

type view struct {
	db   *tsdb.DB
	only *labels.Matcher
}

func (v *view) Querier(mint, maxt int64) (storage.Querier, error) {
	q, err := v.db.Querier(mint, maxt)
	if err != nil {
		return nil, fmt.Errorf("open a querier: %w", err)
	}
	return &narrow{q, v.only}, nil
}

// narrow adds the view's matcher to whatever is asked.
type narrow struct {
	storage.Querier
	only *labels.Matcher
}

func (n *narrow) Select(ctx context.Context, sorted bool, hints *storage.SelectHints, m ...*labels.Matcher) storage.SeriesSet {
	return n.Querier.Select(ctx, sorted, hints, append(append([]*labels.Matcher(nil), m...), n.only)...)
}

func (n *narrow) LabelValues(ctx context.Context, name string, hints *storage.LabelHints, m ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return n.Querier.LabelValues(ctx, name, hints, append(append([]*labels.Matcher(nil), m...), n.only)...)
}

func (n *narrow) LabelNames(ctx context.Context, hints *storage.LabelHints, m ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return n.Querier.LabelNames(ctx, hints, append(append([]*labels.Matcher(nil), m...), n.only)...)
}
