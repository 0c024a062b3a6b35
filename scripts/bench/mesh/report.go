package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// series is one figure of one subject, a value for each round.
type series struct {
	group, metric, subject, unit string
	values                       []float64
	n                            int // measured calls, attempts, connections or rounds in all
}

// results are all figures, in the order in which they were first measured.
type results struct{ list []*series }

func (r *results) find(group, metric, subject string) *series {
	for _, s := range r.list {
		if s.group == group && s.metric == metric && s.subject == subject {
			return s
		}
	}
	return nil
}

// add adds one round's value, which n measurements are behind.
func (r *results) add(group, metric, subject, unit string, value float64, n int) {
	s := r.find(group, metric, subject)
	if s == nil {
		s = &series{group: group, metric: metric, subject: subject, unit: unit}
		r.list = append(r.list, s)
	}
	s.values, s.n = append(s.values, value), s.n+n
}

// worst adds a percentile over the values of a metric as a metric of its own.
func (r *results) worst(group, metric, name string, p float64) {
	for _, s := range slices.Clone(r.list) {
		if s.group == group && s.metric == metric && r.find(group, name, s.subject) == nil {
			r.add(group, name, s.subject, s.unit, percentile(slices.Sorted(slices.Values(s.values)), p), s.n)
		}
	}
}

// writeJSON writes one object a line.
func (r *results) writeJSON(w io.Writer) error {
	encoder := json.NewEncoder(w)
	for _, s := range r.list {
		if err := encoder.Encode(struct {
			Figure  string  `json:"figure"`
			Subject string  `json:"subject"`
			Value   float64 `json:"value"`
			Unit    string  `json:"unit"`
			N       int     `json:"n"`
		}{s.group + ", " + s.metric, s.subject, median(s.values), s.unit, s.n}); err != nil {
			return err
		}
	}
	return nil
}

// print writes a table for each group: a line for each subject.
func (r *results) print(w io.Writer) {
	var groups []string
	for _, s := range r.list {
		if !slices.Contains(groups, s.group) {
			groups = append(groups, s.group)
		}
	}
	for _, group := range groups {
		var metrics, subjects []string
		for _, s := range r.list {
			if s.group != group {
				continue
			}
			if !slices.Contains(metrics, s.metric) {
				metrics = append(metrics, s.metric)
			}
			if !slices.Contains(subjects, s.subject) {
				subjects = append(subjects, s.subject)
			}
		}
		fmt.Fprintf(w, "\n%s\n", group)
		var t table
		head := []string{""}
		for _, metric := range metrics {
			for _, s := range r.list {
				if s.group == group && s.metric == metric {
					head = append(head, strings.TrimSpace(metric+" "+parentheses(s.unit)))
					break
				}
			}
		}
		t.row(head...)
		for _, subject := range subjects {
			cells := []string{subject}
			for _, metric := range metrics {
				cell := ""
				if s := r.find(group, metric, subject); s != nil {
					cell = number(median(s.values))
				}
				cells = append(cells, cell)
			}
			t.row(cells...)
		}
		t.print(w)
	}
}

func parentheses(unit string) string {
	if unit == "" || unit == "1/s" {
		return ""
	}
	return "(" + unit + ")"
}

// number shows three digits, more of whole numbers.
func number(v float64) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v):
		return ""
	case a >= 100 || v == math.Trunc(v):
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	case a >= 1:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3f", v)
}

// table aligns columns: the first to the left, the others to the right.
// table aligns its columns: the first to the left, the others to the right.
type table [][]string

func (t *table) row(cells ...string) { *t = append(*t, cells) }

func (t table) print(w io.Writer) {
	var widths []int
	for _, row := range t {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	for _, row := range t {
		line := fmt.Sprintf("  %-*s", widths[0], row[0])
		for i, cell := range row[1:] {
			line += fmt.Sprintf("  %*s", widths[i+1], cell)
		}
		fmt.Fprintln(w, strings.TrimRight(line, " "))
	}
}

// goal is a promise about a figure: a value against another subject's, or by itself.
type goal struct {
	figure                 string // of figures
	group, metric, subject string
	otherGroup, other      string  // what it is compared with; none compares the value
	must, aim              float64 // NaN: none
	more                   bool    // more is better
	unit                   string
}

var none = math.NaN()

// goals are what the product promises, by the ratios within one run.
func goals() []goal {
	one, some, many := unaryGroup("128 B", 1), unaryGroup("128 B", 16), unaryGroup("128 B", 128)
	list := []goal{
		{figure: "unary", group: one, metric: "p50", subject: oursTCP, other: grpcTLS, must: 0.9, aim: 0.7},
		{figure: "unary", group: one, metric: "p50", subject: oursTCP, other: holepunch, must: 0.9, aim: 0.6},
		{figure: "unary", group: some, metric: "calls/s", subject: oursTCP, other: grpcTLS, must: 2.5, aim: 3.5, more: true},
		{figure: "unary", group: some, metric: "calls/s", subject: oursTCP, other: holepunch, must: 2, aim: 2.8, more: true},
		{figure: "unary", group: some, metric: "calls/s", subject: oursTCP, other: natsTLS, must: 2, aim: 2.6, more: true},
		{figure: "unary", group: many, metric: "calls/s", subject: oursTCP, other: grpcTLS, must: 5, aim: 7, more: true},
		{figure: "unary", group: many, metric: "calls/s", subject: oursTCP, other: holepunch, must: 3, aim: 4, more: true},
		{figure: "unary", group: many, metric: "calls/s", subject: oursTCP, other: natsTLS, must: 2.5, aim: 3.5, more: true},
		{figure: "unary", group: many, metric: "CPU a call", subject: oursTCP, other: grpcTLS, must: 0.35, aim: 0.2},
	}
	for _, transport := range []string{oursTCP, oursQUIC} {
		for _, from := range []string{"server", "caller"} {
			list = append(list, goal{figure: "beside", group: besideGroup, metric: "p99", subject: transport + ", bulk from the " + from, must: 10, aim: 5, unit: "ms"})
		}
	}
	return append(list,
		goal{figure: "bulk", group: bulkGroup, metric: "speed", subject: oursTCP, other: tlsTCP, must: 0.45, aim: 0.6, more: true},
		goal{figure: "bulk", group: bulkGroup, metric: "speed", subject: oursTCP, other: holepunch, must: 4, aim: 6, more: true},
		goal{figure: "memory", group: memoryGroup, metric: "idle connection", subject: oursTCP, must: 85, aim: 60, unit: "KB"},
		goal{figure: "memory", group: memoryGroup, metric: "idle connection", subject: oursQUIC, must: 140, aim: 100, unit: "KB"},
		goal{figure: "find", group: coldGroup(200), metric: "p95", subject: oursTCP, must: 1000, aim: 300, unit: "ms"},
		goal{figure: "find", group: coldGroup(200), metric: "p50", subject: oursTCP, otherGroup: coldGroup(comparedSize), other: holepunch, must: 1, aim: none},
		goal{figure: "find", group: coldGroup(comparedSize), metric: "p50", subject: oursTCP, other: holepunch, must: 1, aim: none},
		goal{figure: "reconnect", group: backGroup, metric: "back", subject: oursTCP, must: 1, aim: 0.2, unit: "s"},
		goal{figure: "reconnect", group: backGroup, metric: "back", subject: oursQUIC, must: 3, aim: 2, unit: "s"},
		goal{figure: "stranger", group: strangerGroup, metric: "CPU", subject: oursTCP, must: 1.5, aim: 1, unit: "ms"},
		goal{figure: "stranger", group: strangerGroup, metric: "CPU", subject: oursQUIC, must: 1.5, aim: 1, unit: "ms"},
		goal{figure: "stranger", group: strangerGroup, metric: "a listed peer's failed calls", subject: oursTCP, must: 0, aim: none},
		goal{figure: "stranger", group: strangerGroup, metric: "a listed peer's failed calls", subject: oursQUIC, must: 0, aim: none},
	)
}

// measured is the goal's value; ok is false when one of the two was not measured.
func (g goal) measured(r *results) (v float64, ok bool) {
	ours := r.find(g.group, g.metric, g.subject)
	if ours == nil {
		return 0, false
	}
	if g.other == "" {
		return median(ours.values), true
	}
	group := g.group
	if g.otherGroup != "" {
		group = g.otherGroup
	}
	theirs := r.find(group, g.metric, g.other)
	if theirs == nil {
		return 0, false
	}
	if g.otherGroup != "" { // not of the same rounds
		return median(ours.values) / median(theirs.values), true
	}
	return ratio(ours.values, theirs.values), true
}

// verdict says how a measured value stands to the goal.
func (g goal) verdict(v float64) string {
	reached := func(bound float64) bool {
		if g.more {
			return v >= bound
		}
		return v <= bound
	}
	switch {
	case reached(g.aim): // never when there is no aim
		return "met aim"
	case reached(g.must):
		return "met must"
	}
	return "missed"
}

func (g goal) name() string {
	name := g.group + ", " + g.metric
	if !strings.HasPrefix(g.subject, oursTCP) || g.other == "" {
		name += ", " + strings.TrimPrefix(g.subject, "ours ")
	}
	if g.otherGroup != "" {
		return name + " / " + g.other + ", " + g.otherGroup[strings.LastIndex(g.otherGroup, ", ")+2:]
	}
	if g.other != "" {
		return name + " / " + g.other
	}
	return name
}

// bound shows a must or an aim.
func (g goal) bound(v float64) string {
	switch {
	case math.IsNaN(v):
		return ""
	case g.other != "":
		return fmt.Sprintf("%g x", v)
	}
	return strings.TrimSpace(fmt.Sprintf("%g %s", v, g.unit))
}

// printGoals writes the table of the goals of the chosen figures.
func printGoals(w io.Writer, r *results, chosen []string) {
	fmt.Fprintf(w, "\nwhat is promised, in this run\n")
	var t table
	t.row("figure", "measured", "must", "aim", "verdict")
	for _, g := range goals() {
		if !slices.Contains(chosen, g.figure) {
			continue
		}
		v, ok := g.measured(r)
		if !ok {
			t.row(g.name(), "", g.bound(g.must), g.bound(g.aim), "not measured")
			continue
		}
		shown := number(v)
		if g.other != "" {
			shown = fmt.Sprintf("%.2f x", v)
		} else if g.unit != "" {
			shown += " " + g.unit
		}
		t.row(g.name(), shown, g.bound(g.must), g.bound(g.aim), g.verdict(v))
	}
	t.print(w)
}
