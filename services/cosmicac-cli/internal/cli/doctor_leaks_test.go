package cli

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/types/known/timestamppb"

	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
	workerv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/worker/v1"
)

// whole is a rack that holds everything of one attempt.
func whole(rack, job, attempt string) []*workerv1.Holding {
	var out []*workerv1.Holding
	for _, kind := range []string{"Claim", "ConfigMap", "NetworkPolicy", "Pod", "VirtualMachineInstance"} {
		out = append(out, &workerv1.Holding{Kind: kind, Name: attempt, RackId: rack, JobId: job, AttemptId: attempt, GpuCount: 2})
	}
	return append(out, &workerv1.Holding{Kind: "DataVolume", Name: job + "-r0-n0-root", RackId: rack, JobId: job})
}

// ofProbe makes holdings a probe's, whose disk is its attempt's own.
func ofProbe(all []*workerv1.Holding) []*workerv1.Holding {
	for _, h := range all {
		h.Probe, h.AttemptId = true, h.JobId
	}
	return all
}

func TestLeaksAreWhatNoRecordExplains(t *testing.T) {
	t.Parallel()
	live := func(id, rack string) *orkv1.Attempt {
		return &orkv1.Attempt{Id: id, RackId: rack, ClaimedAt: timestamppb.Now()}
	}
	gone := live("a-1", "us")
	gone.Gone = true
	rec := func(attempts ...*orkv1.Attempt) recorded {
		r := recorded{jobs: map[string]bool{"j-1": true}, attempts: map[string]*orkv1.Attempt{}}
		for _, a := range attempts {
			r.attempts[a.Id] = a
		}
		return r
	}
	rack := func(holdings ...*workerv1.Holding) *workerv1.ListHoldingsResponse {
		return &workerv1.ListHoldingsResponse{RackId: "us", Holdings: holdings}
	}
	with := func(r *workerv1.ListHoldingsResponse, change func(*workerv1.ListHoldingsResponse)) *workerv1.ListHoldingsResponse {
		change(r)
		return r
	}
	for _, c := range []struct {
		name  string
		rec   recorded
		racks []*workerv1.ListHoldingsResponse
		want  []string // kind: words
	}{
		{"nothing anywhere", rec(), []*workerv1.ListHoldingsResponse{rack()}, nil},
		{"all in order", rec(live("a-1", "us")), []*workerv1.ListHoldingsResponse{rack(whole("us", "j-1", "a-1")...)}, nil},
		{"two racks of one cluster see the same", rec(live("a-1", "us")), []*workerv1.ListHoldingsResponse{
			rack(whole("us", "j-1", "a-1")...), {RackId: "in", Holdings: whole("us", "j-1", "a-1")[1:]},
		}, nil},
		{"an ended attempt", rec(gone), []*workerv1.ListHoldingsResponse{rack(whole("us", "j-1", "a-1")...)},
			[]string{"Claim: nothing of its attempt", "ConfigMap: nothing of", "NetworkPolicy: nothing of", "Pod: nothing of", "VirtualMachineInstance: nothing of"}},
		{"a job that was never heard of", recorded{}, []*workerv1.ListHoldingsResponse{rack(whole("us", "j-9", "a-9")[5])}, []string{`DataVolume: no record of job "j-9"`}},
		{"a machine without an anchor", rec(live("a-1", "us")), []*workerv1.ListHoldingsResponse{rack(whole("us", "j-1", "a-1")[0], whole("us", "j-1", "a-1")[4])},
			[]string{"Claim: no anchor", "VirtualMachineInstance: no anchor"}},
		{"a probe that runs", rec(), []*workerv1.ListHoldingsResponse{rack(ofProbe(whole("us", "probe-1", "probe-1"))...), {RackId: "in", Holdings: ofProbe(whole("us", "probe-1", "probe-1")[1:2])}}, nil},
		{"what a probe left behind", rec(), []*workerv1.ListHoldingsResponse{rack(ofProbe(whole("us", "probe-1", "probe-1")[4:5])...)}, []string{"VirtualMachineInstance: a probe left it"}},
		{"a record without a claim", rec(live("a-1", "us")), []*workerv1.ListHoldingsResponse{rack()}, []string{"Record: has no claim"}},
		{"a record on a rack that was not looked at", rec(live("a-1", "in")), []*workerv1.ListHoldingsResponse{rack()}, nil},
		{"what could not be read", rec(live("a-1", "us")), []*workerv1.ListHoldingsResponse{
			with(rack(whole("us", "j-1", "a-1")[0]), func(r *workerv1.ListHoldingsResponse) { r.Unread = []string{"ConfigMap: forbidden"} }),
		}, []string{"Rack: could not be listed: ConfigMap"}},
	} {
		got := compare(c.rec, c.racks)
		ok := len(got) == len(c.want)
		for i := range got {
			kind, words, _ := strings.Cut(append(c.want, make([]string, len(got))...)[i], ": ")
			ok = ok && got[i].Kind == kind && strings.Contains(got[i].What, words)
		}
		if !ok {
			t.Errorf("%s: %+v, want %q", c.name, got, c.want)
		}
	}
}

func TestOnlyWhatStandsIsALeak(t *testing.T) {
	t.Parallel()
	a, b := leak{Rack: "us", Kind: "Pod", Name: "p"}, leak{Rack: "us", Kind: "Pod", Name: "q"}
	if got := both([]leak{a, b}, []leak{b}); len(got) != 1 || got[0] != b {
		t.Errorf("%v", got)
	}
}
