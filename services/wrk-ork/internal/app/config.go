package app

import (
	"time"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"

	"github.com/cosmicac/cosmicac/services/wrk-ork/internal/life"
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
}

// Placement is the queue's policy.
type Placement struct {
	ReserveAfter time.Duration `yaml:"reserve_after"`
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
	l := life.DefaultLimits()
	return Config{
		Base: daemon.Base{Name: "wrk-ork", StateDirectory: "/var/lib/cosmicac/wrk-ork"},
		Deadlines: Deadlines{
			AgentHello: l.AgentHello, ContainerReady: l.ContainerReady, EngineReady: l.EngineReady,
			AgentSilence: l.AgentSilence, RackSilence: l.RackSilence, AbsenceGrace: l.AbsenceGrace, Drain: l.Drain,
		},
		Retries: Retries{
			RefusalFirst: l.RefusalFirst, RefusalMost: l.RefusalMost, RefusalsFinal: l.RefusalsFinal,
			RestartFirst: l.RestartFirst, RestartMost: l.RestartMost, RestartCount: l.RestartCount, HealthyAfter: l.HealthyAfter,
		},
		Placement: Placement{ReserveAfter: 10 * time.Minute},
		Agents:    Agents{CertificateLife: 24 * time.Hour, TokenLife: 30 * time.Minute},
		Workers:   Workers{StreamSilence: 30 * time.Second, CallTimeout: 20 * time.Second, Repeat: 30 * time.Second},
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
	}
}

// Check refuses what cannot work.
func (c Config) Check() error {
	for key, d := range map[string]time.Duration{
		"deadlines.agent_hello": c.Deadlines.AgentHello, "deadlines.container_ready": c.Deadlines.ContainerReady,
		"deadlines.engine_ready": c.Deadlines.EngineReady, "deadlines.agent_silence": c.Deadlines.AgentSilence,
		"deadlines.rack_silence": c.Deadlines.RackSilence, "deadlines.absence_grace": c.Deadlines.AbsenceGrace,
		"retries.refusal_first": c.Retries.RefusalFirst, "retries.refusal_most": c.Retries.RefusalMost,
		"retries.restart_first": c.Retries.RestartFirst, "retries.restart_most": c.Retries.RestartMost,
		"agents.certificate_life": c.Agents.CertificateLife, "agents.token_life": c.Agents.TokenLife,
		"workers.stream_silence": c.Workers.StreamSilence, "workers.call_timeout": c.Workers.CallTimeout,
		"workers.repeat": c.Workers.Repeat, "placement.reserve_after": c.Placement.ReserveAfter,
		"retries.healthy_after": c.Retries.HealthyAfter,
	} {
		if d <= 0 {
			return fault.New(fault.Invalid, "%s must be longer than zero", key).With(fault.Detail{Field: key, Rule: "a duration like 15m"})
		}
	}
	if c.Deadlines.Drain < 0 {
		return fault.New(fault.Invalid, "deadlines.drain must not be negative").With(fault.Detail{Field: "deadlines.drain", Rule: "a duration like 30s, or 0"})
	}
	if c.Retries.RefusalsFinal == 0 {
		return fault.New(fault.Invalid, "retries.refusals_final must be at least 1").With(fault.Detail{Field: "retries.refusals_final", Rule: "at least 1"})
	}
	return nil
}
