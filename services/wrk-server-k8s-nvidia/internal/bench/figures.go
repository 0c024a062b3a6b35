package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"text/tabwriter"
	"time"
)

// figure is one measured number.
type figure struct {
	Figure  string  `json:"figure"`
	Subject string  `json:"subject"`
	Value   float64 `json:"value"`
	Unit    string  `json:"unit"`
	N       int     `json:"n"`
}

type figures struct {
	notes []string
	all   []figure
}

func (f *figures) note(format string, a ...any) { f.notes = append(f.notes, fmt.Sprintf(format, a...)) }

func (f *figures) add(name, subject string, value float64, unit string, n int) {
	f.all = append(f.all, figure{name, subject, value, unit, n})
	say("%s, %s: %.4g %s", name, subject, value, unit)
}

// value finds a number that was measured before.
func (f *figures) value(name, subject string) float64 {
	for _, one := range f.all {
		if one.Figure == name && one.Subject == subject {
			return one.Value
		}
	}
	return 0
}

// report prints a table and, with a file, the same as lines of JSON.
func (f *figures) report(out io.Writer, file string) error {
	for _, n := range f.notes {
		fmt.Fprintln(out, n)
	}
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "figure\tsubject\tvalue\tunit\tn")
	for _, one := range f.all {
		fmt.Fprintf(t, "%s\t%s\t%.4g\t%s\t%d\n", one.Figure, one.Subject, one.Value, one.Unit, one.N)
	}
	if err := t.Flush(); err != nil || file == "" {
		return err
	}
	w, err := os.Create(file)
	if err != nil {
		return err
	}
	e := json.NewEncoder(w)
	for _, one := range f.all {
		if err := e.Encode(one); err != nil {
			return err
		}
	}
	return w.Close()
}

// quantile of durations, in milliseconds.
func quantile(all []time.Duration, q float64) float64 {
	if len(all) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(all))
	return sorted[int(q*float64(len(sorted)-1))].Seconds() * 1000
}
