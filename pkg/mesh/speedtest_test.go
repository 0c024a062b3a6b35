package mesh_test

import (
	"sync"
	"testing"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/pkg/mesh"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

func TestASpeedTestMeasuresBothWaysAndCallsBesideThem(t *testing.T) {
	t.Parallel()
	for name, listen := range transports {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			ork := l.start(l.ork, func(o *mesh.Options) { o.Role, o.Listen = meshv1.Role_ROLE_ORK, listen })
			app := l.start(l.app, func(o *mesh.Options) { o.Role, o.Listen = meshv1.Role_ROLE_APP_NODE, listen })
			if err := ping(within(t), app.Node, ork.ID(), ork.Addresses()...); err != nil {
				t.Fatal(err)
			}
			const most = 4 << 20
			r, err := app.SpeedTest(within(t), ork.ID(), 5*time.Second, most)
			if err != nil {
				t.Fatal(err)
			}
			for what, b := range map[string]*meshv1.BulkSpeed{"up": r.GetUp(), "down": r.GetDown()} {
				if b.GetBytes() == 0 || b.GetBytes() > most || b.GetTookMicroseconds() <= 0 {
					t.Errorf("%s: %v", what, b)
				}
			}
			for what, c := range map[string]*meshv1.CallTimes{"alone": r.GetAlone(), "beside up": r.GetBesideUp(), "beside down": r.GetBesideDown()} {
				if c.GetCalls() == 0 || c.GetP50Microseconds() <= 0 || c.GetP99Microseconds() < c.GetP50Microseconds() {
					t.Errorf("%s: %v", what, c)
				}
			}
			if r.GetPath().GetTransport() != name || r.GetPath().GetRelayed() {
				t.Errorf("%v", r.GetPath())
			}
		})
	}
}

func TestSpeedTestsAreBoundedAndOneAtATime(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	app := l.start(l.app, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_APP_NODE })
	if err := ping(within(t), app.Node, ork.ID(), ork.Addresses()...); err != nil {
		t.Fatal(err)
	}
	_, err := app.SpeedTest(within(t), ork.ID(), time.Minute, 0)
	wantKind(t, err, fault.Invalid, "at most 10s")
	_, err = app.SpeedTest(within(t), ork.ID(), 0, 1<<40)
	wantKind(t, err, fault.Invalid, "bytes")
	_, err = app.SpeedTest(within(t), app.ID(), 0, 0)
	wantKind(t, err, fault.Invalid, "itself")

	results := make([]error, 3)
	var running sync.WaitGroup
	for i := range results {
		running.Go(func() { _, results[i] = app.SpeedTest(within(t), ork.ID(), time.Second, 0) })
	}
	running.Wait()
	good := 0
	for _, err := range results {
		if err == nil {
			good++
			continue
		}
		wantKind(t, err, fault.Exhausted, "runs already")
	}
	if good != 1 {
		t.Errorf("%d tests of one pair ran at a time", good)
	}
	if _, err := app.SpeedTest(within(t), ork.ID(), time.Second, 1<<20); err != nil {
		t.Errorf("after them: %v", err)
	}
	eventually(t, "no stream stays", func() bool { return ork.Streams() < 16 })
}

func TestATenantCannotTestTheSpeed(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	ork := l.start(l.ork, func(o *mesh.Options) { o.Role = meshv1.Role_ROLE_ORK })
	key, certificate := l.agent("j-0000000000001")
	agent := l.start(key, func(o *mesh.Options) {
		o.Network, o.Credential, o.DHT = l.bare(), mesh.Certificate(certificate), mesh.DHTOff
	})
	if err := ping(within(t), agent.Node, ork.ID(), ork.Addresses()...); err != nil {
		t.Fatal(err)
	}
	_, err := agent.SpeedTest(within(t), ork.ID(), time.Second, 1<<20)
	wantKind(t, err, fault.Denied)
}
