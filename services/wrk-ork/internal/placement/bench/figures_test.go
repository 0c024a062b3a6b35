package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestASmallRunHasEveryFigureAndWritesThemAsLines(t *testing.T) {
	t.Parallel()
	all := append(speed(2, 40, 200, 20, 1), queue(50, 100, 1)...)
	for _, s := range strategies(40, 1) {
		all = append(all, compare(s, 40, 2000, 1)...)
	}
	file := filepath.Join(t.TempDir(), "figures.json")
	var table bytes.Buffer
	if err := report(&table, file, all); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	stranded := map[string]float64{}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	for _, line := range lines {
		var f figure
		if err := json.Unmarshal([]byte(line), &f); err != nil || f.Figure == "" || f.Subject == "" || f.Unit == "" || f.N == 0 {
			t.Errorf("%s: %v", line, err)
		}
		if f.Figure == "stranded for 8 GPUs" {
			stranded[f.Subject] = f.Value
		}
	}
	if len(lines) != len(all) || len(stranded) != 4 || stranded["kube-scheduler default"] <= stranded["wrk-ork, pack"] {
		t.Errorf("%d lines of %d; stranded %v: packing strands less than spreading\n%s", len(lines), len(all), stranded, table.String())
	}
}

func TestTheSameSeedPlacesTheSame(t *testing.T) {
	t.Parallel()
	for k := range strategies(40, 7) {
		a, b := compare(strategies(40, 7)[k], 40, 1000, 7), compare(strategies(40, 7)[k], 40, 1000, 7)
		for i := range a {
			if a[i] != b[i] {
				t.Errorf("%+v, then %+v", a[i], b[i])
			}
		}
	}
}
