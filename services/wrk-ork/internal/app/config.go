package app

import (
	"time"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/life"
	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/record"
)

// Config is wrk-ork's configuration file. Durations are written like "15m".
type Config struct {
	daemon.Base `yaml:",inline"`

	// Deadlines bound how long an attempt may take for a step.
	Deadlines Deadlines `yaml:"deadlines"`
	// Retries bound what is tried again.
	Retries Retries `yaml:"retries"`
	// Placement is the queue's policy.
	Placement Placement `yaml:"placement"`
	// Quarantine closes nodes that fail to start what is placed there.
	Quarantine Quarantine `yaml:"quarantine"`
	// Retention is how long what is kept.
	Retention Retention `yaml:"retention"`
	// Agents are the lives of what agents are given.
	Agents Agents `yaml:"agents"`
	// Workers is how racks' workers are called.
	Workers Workers `yaml:"workers"`
}

// Deadlines count only time in which the other side could be heard.
type Deadlines struct {
	AgentHello     time.Duration `yaml:"agent_hello"`
	ContainerReady time.Duration `yaml:"container_ready"`
	EngineReady    time.Duration `yaml:"engine_ready"`
	AgentSilence   time.Duration `yaml:"agent_silence"`
	RackSilence    time.Duration `yaml:"rack_silence"`
	AbsenceGrace   time.Duration `yaml:"absence_grace"`
	Drain          time.Duration `yaml:"drain"`
}

// Retries are first and longest pauses, which double in between, and counts.
type Retries struct {
	RefusalFirst  time.Duration `yaml:"refusal_first"`
	RefusalMost   time.Duration `yaml:"refusal_most"`
	RefusalsFinal uint32        `yaml:"refusals_final"`
	RestartFirst  time.Duration `yaml:"restart_first"`
	RestartMost   time.Duration `yaml:"restart_most"`
	RestartCount  uint32        `yaml:"restart_count"`
	HealthyAfter  time.Duration `yaml:"healthy_after"`
	StartCount    uint32        `yaml:"start_count"`
}

// Quarantine is when a node is closed that fails to start what is placed there.
type Quarantine struct {
	Failures     int           `yaml:"failures"`
	Window       time.Duration `yaml:"window"`
	StartsAtOnce int           `yaml:"starts_at_once"`
	MostPercent  int           `yaml:"most_percent"`
}

// Retention is how long what is kept.
type Retention struct {
	Tombstones      time.Duration `yaml:"tombstones"`
	IdempotencyKeys time.Duration `yaml:"idempotency_keys"`
	Events          time.Duration `yaml:"events"`
	EventsPerJob    int           `yaml:"events_per_job"`
}

// Placement is the queue's policy.
type Placement struct {
	ReserveAfter time.Duration `yaml:"reserve_after"`
	Age          time.Duration `yaml:"age"`
}

// Agents are the lives of certificates and join tokens.
type Agents struct {
	CertificateLife time.Duration `yaml:"certificate_life"`
	TokenLife       time.Duration `yaml:"token_life"`
}

// Workers is how racks' workers are called.
type Workers struct {
	StreamSilence time.Duration `yaml:"stream_silence"`
	CallTimeout   time.Duration `yaml:"call_timeout"`
	Repeat        time.Duration `yaml:"repeat"`
}

// Defaults is the configuration without a file.
func Defaults() Config {
	l, p := life.DefaultLimits(), record.DefaultPolicy()
	return Config{
		Base: daemon.Base{Name: "wrk-ork", StateDirectory: "/var/lib/cosmicac/wrk-ork"},
		Deadlines: Deadlines{
			AgentHello: l.AgentHello, ContainerReady: l.ContainerReady, EngineReady: l.EngineReady,
			AgentSilence: l.AgentSilence, RackSilence: l.RackSilence, AbsenceGrace: l.AbsenceGrace, Drain: l.Drain,
		},
		Retries: Retries{
			RefusalFirst: l.RefusalFirst, RefusalMost: l.RefusalMost, RefusalsFinal: l.RefusalsFinal,
			RestartFirst: l.RestartFirst, RestartMost: l.RestartMost, RestartCount: l.RestartCount, HealthyAfter: l.HealthyAfter,
			StartCount: l.StartCount,
		},
		Quarantine: Quarantine{Failures: p.QuarantineFailures, Window: p.QuarantineWindow, StartsAtOnce: 4, MostPercent: p.QuarantineMostPercent},
		Retention:  Retention{Tombstones: p.Tombstones, IdempotencyKeys: p.IdempotencyKeys, Events: p.Events, EventsPerJob: p.EventsPerJob},
		Placement:  Placement{ReserveAfter: 10 * time.Minute, Age: 10 * time.Minute},
		Agents:     Agents{CertificateLife: 24 * time.Hour, TokenLife: 30 * time.Minute},
		Workers:    Workers{StreamSilence: 30 * time.Second, CallTimeout: 20 * time.Second, Repeat: 30 * time.Second},
	}
}

// Limits is the part of the configuration that package life judges by.
func (c Config) Limits() life.Limits {
	d, r := c.Deadlines, c.Retries
	return life.Limits{
		AgentHello: d.AgentHello, ContainerReady: d.ContainerReady, EngineReady: d.EngineReady,
		AgentSilence: d.AgentSilence, RackSilence: d.RackSilence, AbsenceGrace: d.AbsenceGrace, Drain: d.Drain,
		RefusalFirst: r.RefusalFirst, RefusalMost: r.RefusalMost, RefusalsFinal: r.RefusalsFinal,
		RestartFirst: r.RestartFirst, RestartMost: r.RestartMost, RestartCount: r.RestartCount, HealthyAfter: r.HealthyAfter,
		StartCount: r.StartCount,
	}
}

// Policy is the part of the configuration that the record keeps to.
func (c Config) Policy() record.Policy {
	q, r := c.Quarantine, c.Retention
	return record.Policy{
		Tombstones: r.Tombstones, IdempotencyKeys: r.IdempotencyKeys, Events: r.Events, EventsPerJob: r.EventsPerJob,
		QuarantineFailures: q.Failures, QuarantineWindow: q.Window, QuarantineMostPercent: q.MostPercent,
	}
}

// Validate lists what cannot work.
func (c Config) Validate() []fault.Detail {
	var faults []fault.Detail
	d, r, w := c.Deadlines, c.Retries, c.Workers
	for _, k := range []struct {
		key   string
		value time.Duration
	}{
		{"deadlines.agent_hello", d.AgentHello}, {"deadlines.container_ready", d.ContainerReady},
		{"deadlines.engine_ready", d.EngineReady}, {"deadlines.agent_silence", d.AgentSilence},
		{"deadlines.rack_silence", d.RackSilence}, {"deadlines.absence_grace", d.AbsenceGrace},
		{"retries.refusal_first", r.RefusalFirst}, {"retries.refusal_most", r.RefusalMost},
		{"retries.restart_first", r.RestartFirst}, {"retries.restart_most", r.RestartMost},
		{"retries.healthy_after", r.HealthyAfter}, {"placement.reserve_after", c.Placement.ReserveAfter},
		{"placement.age", c.Placement.Age},
		{"agents.certificate_life", c.Agents.CertificateLife}, {"agents.token_life", c.Agents.TokenLife},
		{"quarantine.window", c.Quarantine.Window}, {"retention.tombstones", c.Retention.Tombstones},
		{"retention.idempotency_keys", c.Retention.IdempotencyKeys}, {"retention.events", c.Retention.Events},
		{"workers.stream_silence", w.StreamSilence}, {"workers.call_timeout", w.CallTimeout}, {"workers.repeat", w.Repeat},
	} {
		if k.value <= 0 {
			faults = append(faults, fault.Detail{Field: k.key, Rule: "must be a duration longer than zero, like 15m"})
		}
	}
	if d.Drain < 0 {
		faults = append(faults, fault.Detail{Field: "deadlines.drain", Rule: "must be a duration like 30s, or 0s for none"})
	}
	if c.Agents.CertificateLife > record.LongestCertificate {
		faults = append(faults, fault.Detail{Field: "agents.certificate_life", Rule: "must be at most " + record.LongestCertificate.String()})
	}
	for _, k := range []struct {
		key   string
		value int
	}{{"quarantine.failures", c.Quarantine.Failures}, {"quarantine.starts_at_once", c.Quarantine.StartsAtOnce}, {"retention.events_per_job", c.Retention.EventsPerJob}} {
		if k.value < 1 {
			faults = append(faults, fault.Detail{Field: k.key, Rule: "must be at least 1"})
		}
	}
	if most := c.Quarantine.MostPercent; most < 0 || most > 100 {
		faults = append(faults, fault.Detail{Field: "quarantine.most_percent", Rule: "must be 0 to 100"})
	}
	if r.RefusalsFinal == 0 {
		faults = append(faults, fault.Detail{Field: "retries.refusals_final", Rule: "must be at least 1"})
	}
	return faults
}
