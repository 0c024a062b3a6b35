package app

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	agentv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/agent/v1"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
	orkv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/ork/v1"
)

// closedTo waits until an agent is cut off, and checks that its certificate
// opens nothing, neither on the link it had nor on a new one.
func (l *lab) closedTo(a *agent) {
	l.t.Helper()
	l.eventually("the agent is cut off and refused", func() bool {
		_, err := a.client.RenewCertificate(l.ctx, &orkv1.RenewCertificateRequest{})
		return refusal(err)
	})
	n, err := mesh.New(context.Background(), mesh.Options{
		Key: a.key, Network: l.bare(), Credential: mesh.Certificate(a.certificate), Log: hclog.NewNullLogger(),
	})
	if err == nil {
		err = n.Start(context.Background())
	}
	if err != nil {
		l.t.Fatal(err)
	}
	defer closeNode(n)
	// Pinging needs no more than being admitted.
	_, err = meshv1.NewNodeClient(n.Client(l.orkKey.ID(), l.address)).Ping(l.ctx, &meshv1.PingRequest{})
	if !refusal(err) || !strings.Contains(err.Error(), "refused this node") {
		l.t.Errorf("a new link with the void certificate: %v", err)
	}
}

func refusal(err error) bool {
	k := fault.KindOf(err)
	return err != nil && (k == fault.Denied || k == fault.FailedPrecondition)
}

func TestStoppedAttemptsCertificateOpensNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	boot := l.node(l.bootKey, meshv1.Role_ROLE_BOOTSTRAP, nil)
	watch, err := orkv1.NewRevocationsClient(boot.Client(l.orkKey.ID(), l.address)).WatchVoidCertificates(l.ctx, &orkv1.WatchVoidCertificatesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if first, err := watch.Recv(); err != nil || len(first.Certificates) != 0 {
		t.Fatalf("nothing is void yet: %v, %v", first, err)
	}
	j := l.create(containerSpec("x", 1))
	first := newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING))
	a := l.boot(first.Id)
	l.await(j.Id, orkv1.State_STATE_RUNNING)
	if a.certificateFloor(j.Replicas[0].Id) != 1 {
		t.Errorf("floor of the first attempt: %d", a.certificateFloor(j.Replicas[0].Id))
	}
	// The VM takes its time to go; its certificate does not.
	l.worker.change(func() { l.worker.holdDelete = true })
	if _, err := l.jobs.StopJob(l.ctx, &orkv1.StopJobRequest{Id: j.Id}); err != nil {
		t.Fatal(err)
	}
	l.await(j.Id, orkv1.State_STATE_STOPPING)
	l.closedTo(a)
	l.eventually("the agent is told in words that its time is over", func() bool {
		err := a.ended()
		return fault.KindOf(err) == fault.FailedPrecondition && strings.Contains(err.Error(), "attempt "+first.Id+" is over")
	})
	if void, err := watch.Recv(); err != nil || len(void.Certificates) != 1 || void.Certificates[0].AttemptId != first.Id {
		t.Errorf("what bootstraps are told: %v, %v", void, err)
	}
	a.stop()
	l.worker.change(func() { l.worker.holdDelete = false })
	l.await(j.Id, orkv1.State_STATE_STOPPED)

	// The next attempt's agent is told not to take the first one's for a peer.
	if _, err := l.jobs.StartJob(l.ctx, &orkv1.StartJobRequest{Id: j.Id}); err != nil {
		t.Fatal(err)
	}
	second := l.boot(newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING)).Id)
	l.await(j.Id, orkv1.State_STATE_RUNNING)
	l.eventually("the floor rose", func() bool { return second.certificateFloor(j.Replicas[0].Id) == 2 })

	// A restart forgets none of it, and lets the living in.
	l.stop()
	l.startOrk()
	l.closedTo(a)
	l.eventually("the second attempt's agent renews", func() bool {
		_, err := second.client.RenewCertificate(l.ctx, &orkv1.RenewCertificateRequest{})
		return err == nil
	})
	// Nor does the end of the job's record.
	if _, err := l.jobs.DeleteJob(l.ctx, &orkv1.DeleteJobRequest{Id: j.Id}); err != nil {
		t.Fatal(err)
	}
	l.eventually("the record is gone", func() bool {
		_, err := l.jobs.GetJob(l.ctx, &orkv1.GetJobRequest{Id: j.Id})
		return fault.KindOf(err) == fault.NotFound
	})
	second.stop()
	l.closedTo(second)
}

func TestAReplicaThatFinishesItsRequestsIsStillHeard(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 1))
	l.stop()
	l.config.Deadlines.Drain = time.Hour
	l.startOrk()
	l.connected(true)
	j := l.create(inferenceSpec("m", 1))
	a := l.boot(newest(l.await(j.Id, orkv1.State_STATE_PROVISIONING)).Id)
	l.await(j.Id, orkv1.State_STATE_RUNNING)
	if _, err := l.jobs.StopJob(l.ctx, &orkv1.StopJobRequest{Id: j.Id}); err != nil {
		t.Fatal(err)
	}
	l.await(j.Id, orkv1.State_STATE_STOPPING)
	select {
	case <-a.drain:
	case <-time.After(patience):
		t.Fatal("the agent was never told to drain")
	}
	if _, err := a.client.RenewCertificate(l.ctx, &orkv1.RenewCertificateRequest{}); err != nil {
		t.Errorf("while it drains: %v", err)
	}
	a.stop()
	l.attend(a, agentv1.Phase_PHASE_DRAINING) // done: nothing runs, nothing waits
	l.await(j.Id, orkv1.State_STATE_STOPPED)
	l.closedTo(a)
}

func TestRevokedGrantsAreToldToTheAgentsConcerned(t *testing.T) {
	t.Parallel()
	l := newLab(t, gpuNode("n1", 3))
	agents := map[string]*agent{}
	run := func(project string) *agent {
		l.quota(project, &orkv1.ProjectQuota{Revision: 1, Unlimited: true})
		r, err := l.jobs.CreateJob(l.ctx, &orkv1.CreateJobRequest{Spec: containerSpec(project, 1), Owner: &orkv1.Owner{ProjectId: project, UserId: "u-1"}})
		if err != nil {
			t.Fatal(err)
		}
		agents[project] = l.boot(newest(l.await(r.Job.Id, orkv1.State_STATE_PROVISIONING)).Id)
		l.await(r.Job.Id, orkv1.State_STATE_RUNNING)
		return agents[project]
	}
	mine, other := run("p-mine"), run("p-other")
	put := func(project, user string, epoch uint64) (uint64, error) {
		r, err := orkv1.NewRevocationsClient(l.app.Client(l.orkKey.ID(), l.address)).PutGrantFloors(l.ctx, &orkv1.PutGrantFloorsRequest{
			Floors: []*orkv1.ProjectGrantFloor{{ProjectId: project, Floor: &agentv1.GrantFloor{
				UserId: user, MinimumEpoch: epoch, Until: timestamppb.New(time.Now().Add(time.Hour)),
			}}},
		})
		return r.GetHighestEpoch(), err
	}
	if _, err := put("p-mine", "u-gone", 7); err != nil {
		t.Fatal(err)
	}
	l.eventually("the project's agent knows", func() bool { return mine.told("u-gone") == 7 })
	// A lower one, come late, changes nothing.
	if highest, err := put("p-mine", "u-gone", 3); err != nil || highest != 7 {
		t.Errorf("a lower floor: %d, %v", highest, err)
	}
	// Who could see every project is refused in every project.
	if _, err := put("", "u-admin", 8); err != nil {
		t.Fatal(err)
	}
	l.eventually("every agent knows", func() bool { return mine.told("u-admin") == 8 && other.told("u-admin") == 8 })
	if other.told("u-gone") != 0 {
		t.Error("another project's agent was told whom it does not concern")
	}

	// An agent that was away, and one that is new, learn at their first contact,
	// over a restart.
	mine.stop()
	mine.was.Reset()
	l.stop()
	l.startOrk()
	l.connected(true)
	l.attend(mine, agentv1.Phase_PHASE_READY)
	l.eventually("the agent that was away knows", func() bool { return mine.told("u-gone") == 7 && mine.told("u-admin") == 8 })
	late := run("p-late")
	l.eventually("the new agent knows", func() bool { return late.told("u-admin") == 8 && late.told("u-gone") == 0 })

	// Nobody but app-node may say so, and nothing without sense is taken.
	_, err := orkv1.NewRevocationsClient(l.rack.Client(l.orkKey.ID(), l.address)).PutGrantFloors(l.ctx, &orkv1.PutGrantFloorsRequest{})
	refused(t, err, fault.Denied, "")
	_, err = put("p-mine", strings.Repeat("u", 100), 9)
	refused(t, err, fault.Invalid, "floors[0].floor.user_id")
	_, err = put("p-mine", "u-gone", 0)
	refused(t, err, fault.Invalid, "floors[0].floor.minimum_epoch")
}
