package app

import (
	"time"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"
	"github.com/cosmicac/cosmicac/services/app-node/internal/catalogue"
	"github.com/cosmicac/cosmicac/services/app-node/internal/grants"
)

// Config is app-node's configuration; app-node.example.yaml explains every key.
type Config struct {
	daemon.Base `yaml:",inline"`
	HTTP        HTTPConfig       `yaml:"http"`
	Sessions    SessionsConfig   `yaml:"sessions"`
	Grants      GrantsConfig     `yaml:"grants"`
	Retention   RetentionConfig  `yaml:"retention"`
	Catalogue   catalogue.Config `yaml:"catalogue"`
}

// HTTPConfig is where the API listens.
type HTTPConfig struct {
	// Listen is host:port on loopback, or unix:///path.
	Listen string `yaml:"listen"`
}

// SessionsConfig is how long sign-ins last.
type SessionsConfig struct {
	// Idle is how long after the last use.
	Idle time.Duration `yaml:"idle"`
	// Longest is how long in all.
	Longest time.Duration `yaml:"longest"`
}

// GrantsConfig is about grants to reach agents.
type GrantsConfig struct {
	// Validity is how long a grant is good.
	Validity time.Duration `yaml:"validity"`
}

// RetentionConfig is how long rows are kept that only grow.
type RetentionConfig struct {
	// Audit is for entries of the audit log.
	Audit time.Duration `yaml:"audit"`
	// UsageRecords is for single records; hourly sums are kept for good.
	UsageRecords time.Duration `yaml:"usage_records"`
}

const day = 24 * time.Hour

// Defaults is the configuration of an empty file.
func Defaults() Config {
	return Config{
		HTTP:      HTTPConfig{Listen: "127.0.0.1:8081"},
		Sessions:  SessionsConfig{Idle: day, Longest: 30 * day},
		Grants:    GrantsConfig{Validity: 12 * time.Hour},
		Retention: RetentionConfig{Audit: 400 * day, UsageRecords: 90 * day},
		Catalogue: catalogue.Defaults(),
	}
}

// Base is the part that every daemon has.
func Base(c *Config) *daemon.Base { return &c.Base }

// Validate names every key that breaks a rule.
func (c *Config) Validate() (faults []fault.Detail) {
	bad := func(key, rule string) { faults = append(faults, fault.Detail{Field: key, Rule: rule}) }
	if c.HTTP.Listen == "" {
		bad("http.listen", "must be host:port or unix:///path")
	}
	for _, d := range []struct {
		key               string
		value             time.Duration
		shortest, longest time.Duration
	}{
		{"sessions.idle", c.Sessions.Idle, time.Minute, 30 * day},
		{"sessions.longest", c.Sessions.Longest, time.Minute, 365 * day},
		{"grants.validity", c.Grants.Validity, time.Minute, grants.Longest},
		{"retention.audit", c.Retention.Audit, day, 100 * 365 * day},
		{"retention.usage_records", c.Retention.UsageRecords, 7 * day, 100 * 365 * day},
	} {
		if d.value < d.shortest || d.value > d.longest {
			bad(d.key, "must be a duration from "+d.shortest.String()+" to "+d.longest.String())
		}
	}
	if _, err := catalogue.Build(c.Catalogue); err != nil {
		bad("catalogue", err.Error())
	}
	return faults
}
