package main

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		if err := serveProgram(); err != nil {
			broke("serve", err)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// tiny is a bench that is over in a moment and proves nothing about speed.
func tiny(t *testing.T) (*bench, *bytes.Buffer) {
	t.Helper()
	var out bytes.Buffer
	b := &bench{out: &out, began: time.Now(), rounds: 1, slice: 20 * time.Millisecond, bulkBytes: 32 << 20, bulkSlice: 200 * time.Millisecond,
		connections: 5, dhts: []dht{{5, 2}}, backRounds: 1, strangerSlice: time.Second}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s", out.Bytes())
		}
	})
	return b, &out
}

// withHolepunch installs Holepunch; without it the other subjects are run.
func withHolepunch(t *testing.T, b *bench) {
	t.Helper()
	dir, err := installHolepunch(b.out)
	if err != nil {
		t.Logf("Holepunch is left out: %v", err)
		return
	}
	b.holepunch = dir
}

func (b *bench) want(t *testing.T, group, metric, subject string) float64 {
	t.Helper()
	s := b.results.find(group, metric, subject)
	if s == nil {
		t.Errorf("%s, %s of %s was not measured", group, metric, subject)
		return 0
	}
	if v := median(s.values); v < 0 || s.n == 0 {
		t.Errorf("%s, %s of %s is %v of %d", group, metric, subject, v, s.n)
	}
	return median(s.values)
}

func TestEverySubjectAnswersCalls(t *testing.T) {
	b, _ := tiny(t)
	withHolepunch(t, b)
	if err := b.measureUnary(); err != nil {
		t.Fatal(err)
	}
	for _, s := range subjects {
		if !s.calls || (s.name == holepunch && b.holepunch == "") {
			continue
		}
		for _, p := range payloads {
			for _, callers := range callerCounts {
				if rate := b.want(t, unaryGroup(p.name, callers), "calls/s", s.name); rate == 0 {
					t.Errorf("%s made no calls", s.name)
				}
			}
		}
	}
}

func TestEverySubjectCarriesBulk(t *testing.T) {
	b, _ := tiny(t)
	withHolepunch(t, b)
	if err := b.measureBulk(); err != nil {
		t.Fatal(err)
	}
	for _, s := range subjects {
		if s.bulk && (s.name != holepunch || b.holepunch != "") && b.want(t, bulkGroup, "speed", s.name) == 0 {
			t.Errorf("%s carried nothing", s.name)
		}
	}
}

func TestCallsGoOnBesideBulk(t *testing.T) {
	b, _ := tiny(t)
	if err := b.measureBeside(); err != nil {
		t.Fatal(err)
	}
	for _, subject := range []string{oursTCP, oursQUIC} {
		for _, from := range []string{"server", "caller"} {
			if b.want(t, besideGroup, "bulk", subject+", bulk from the "+from) == 0 {
				t.Errorf("%s carried no bulk from the %s", subject, from)
			}
		}
	}
}

func TestConnectionsAreWeighed(t *testing.T) {
	b, _ := tiny(t)
	if err := b.measureMemory(); err != nil {
		t.Fatal(err)
	}
	if v := b.want(t, memoryGroup, "one idle node, resident", "ours"); v < 5 {
		t.Errorf("a node of %v MB", v)
	}
	b.want(t, memoryGroup, "goroutines a connection", oursQUIC)
}

func TestKeysAreFound(t *testing.T) {
	b, _ := tiny(t)
	withHolepunch(t, b)
	if err := b.findOurs(dht{6, 2}); err != nil {
		t.Fatal(err)
	}
	b.want(t, coldGroup(6), "p95", oursTCP)
	b.want(t, warmGroup(6), "p50", oursTCP)
	if b.holepunch == "" {
		t.Skip("Holepunch is not installed")
	}
	if err := b.findHolepunch(dht{6, 2}); err != nil {
		t.Fatal(err)
	}
	b.want(t, coldGroup(6), "p95", holepunch)
}

func TestClientComesBack(t *testing.T) {
	b, _ := tiny(t)
	if err := b.measureReconnect(); err != nil {
		t.Fatal(err)
	}
	b.want(t, backGroup, "back", oursTCP)
	b.want(t, backGroup, "back", oursQUIC)
}

func TestStrangersAreRefusedAndCounted(t *testing.T) {
	b, _ := tiny(t)
	if err := b.measureStranger(); err != nil {
		t.Fatal(err)
	}
	for _, subject := range []string{oursTCP, oursQUIC} {
		if b.want(t, strangerGroup, "attempts/s", subject) == 0 {
			t.Errorf("no attempts on %s", subject)
		}
	}
}

func TestOutputIsATableAndJSONLines(t *testing.T) {
	t.Parallel()
	var r results
	r.add("unary 128 B, 1 caller", "p50", oursTCP, "us", 100, 10)
	r.add("unary 128 B, 1 caller", "p50", oursTCP, "us", 300, 10)
	r.add("unary 128 B, 1 caller", "p50", grpcTLS, "us", 400, 10)
	var table bytes.Buffer
	r.print(&table)
	printGoals(&table, &r, []string{"unary"})
	for _, want := range []string{"p50 (us)", "ours TCP", "200", "0.50 x", "met aim", "not measured"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("the tables do not say %q:\n%s", want, table.String())
		}
	}
	if strings.Contains(table.String(), "stranger") {
		t.Errorf("the table of promises shows figures that nobody chose:\n%s", table.String())
	}
	var lines bytes.Buffer
	if err := r.writeJSON(&lines); err != nil {
		t.Fatal(err)
	}
	var line map[string]any
	if err := json.NewDecoder(&lines).Decode(&line); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"figure": "unary 128 B, 1 caller, p50", "subject": "ours TCP", "value": 200.0, "unit": "us", "n": 20.0}
	for k, v := range want {
		if line[k] != v {
			t.Errorf("%s is %v, want %v", k, line[k], v)
		}
	}
}
