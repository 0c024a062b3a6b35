package app

import (
	"strings"
	"time"

	"github.com/cosmicac/cosmicac/pkg/daemon"
	"github.com/cosmicac/cosmicac/pkg/fault"
)

// Config is proxy-inference's configuration file. Durations are written like "15m".
type Config struct {
	daemon.Base `yaml:",inline"`

	HTTP     HTTP     `yaml:"http"`
	Routing  Routing  `yaml:"routing"`
	Timeouts Timeouts `yaml:"timeouts"`
	Usage    Usage    `yaml:"usage"`
}

// HTTP is the face to the front door.
type HTTP struct {
	// Listen is "127.0.0.1:8082" or "unix:/run/x.sock".
	Listen string `yaml:"listen"`
	// BodyLimitMiB is the largest request body.
	BodyLimitMiB int64 `yaml:"body_limit_mib"`
	// BodyMemoryMiB is for the bodies of all requests together.
	BodyMemoryMiB int64 `yaml:"body_memory_mib"`
	// MaximumRequests may be under way at once.
	MaximumRequests int64 `yaml:"maximum_requests"`
}

// Routing is how a replica is chosen.
type Routing struct {
	// LoadingHold is how long a request waits for a replica that is loading.
	LoadingHold time.Duration `yaml:"loading_hold"`
	// MaximumHeld requests wait so at once.
	MaximumHeld int `yaml:"maximum_held"`
	// ReplicaInFlight bounds this proxy's requests on one replica.
	ReplicaInFlight int `yaml:"replica_in_flight"`
	// Attempts is on how many replicas one request is tried before its first byte.
	Attempts int `yaml:"attempts"`
	// AffinityBytes of a prompt's beginning decide its home; zero for no affinity.
	AffinityBytes int `yaml:"affinity_bytes"`
}

// Timeouts bound silence, never the whole of a request.
type Timeouts struct {
	Connect         time.Duration `yaml:"connect"`
	FirstByte       time.Duration `yaml:"first_byte"`
	Idle            time.Duration `yaml:"idle"`
	EngineKeepAlive time.Duration `yaml:"engine_keep_alive"`
	Upload          time.Duration `yaml:"upload"`
	ClientWrite     time.Duration `yaml:"client_write"`
	// HeadersAfter is when a stream's headers go out though it has no event yet.
	HeadersAfter time.Duration `yaml:"headers_after"`
	// StreamComments is how often a comment follows them until the first event.
	StreamComments time.Duration `yaml:"stream_comments"`
}

// Usage is the spool of usage records.
type Usage struct {
	SpoolMiB     int64         `yaml:"spool_mib"`
	SyncInterval time.Duration `yaml:"sync_interval"`
	SendInterval time.Duration `yaml:"send_interval"`
}

// Defaults is the configuration without a file.
func Defaults() Config {
	return Config{
		Base: daemon.Base{Name: "proxy-inference", StateDirectory: "/var/lib/cosmicac/proxy-inference",
			Mesh: daemon.MeshConfig{Listen: []string{"/ip4/0.0.0.0/tcp/4812", "/ip4/0.0.0.0/udp/4812/quic-v1"}}},
		HTTP:    HTTP{Listen: "127.0.0.1:8082", BodyLimitMiB: 32, BodyMemoryMiB: 512, MaximumRequests: 4096},
		Routing: Routing{LoadingHold: 10 * time.Second, MaximumHeld: 1000, ReplicaInFlight: 192, Attempts: 3, AffinityBytes: 1024},
		Timeouts: Timeouts{Connect: 2 * time.Second, FirstByte: 30 * time.Minute, Idle: 15 * time.Minute, EngineKeepAlive: 4 * time.Second,
			Upload: time.Minute, ClientWrite: 5 * time.Minute, HeadersAfter: 10 * time.Second},
		Usage: Usage{SpoolMiB: 256, SyncInterval: 100 * time.Millisecond, SendInterval: time.Second},
	}
}

// Base gives the part that every daemon has.
func Base(c *Config) *daemon.Base { return &c.Base }

// Validate lists what cannot work.
func (c Config) Validate() (faults []fault.Detail) {
	bad := func(field, rule string) { faults = append(faults, fault.Detail{Field: field, Rule: rule}) }
	if l := c.HTTP.Listen; !strings.HasPrefix(l, "unix:") && !strings.Contains(l, ":") {
		bad("http.listen", "must be HOST:PORT such as 127.0.0.1:8082, or unix:/PATH")
	}
	whole := func(field string, v, least, most int64) {
		if v < least || v > most {
			bad(field, "is out of range")
		}
	}
	whole("http.body_limit_mib", c.HTTP.BodyLimitMiB, 1, 1024)
	whole("http.body_memory_mib", c.HTTP.BodyMemoryMiB, c.HTTP.BodyLimitMiB+1, 1<<20)
	whole("http.maximum_requests", c.HTTP.MaximumRequests, 1, 1<<20)
	whole("routing.maximum_held", int64(c.Routing.MaximumHeld), 0, 1<<20)
	whole("routing.replica_in_flight", int64(c.Routing.ReplicaInFlight), 1, 240)
	whole("routing.attempts", int64(c.Routing.Attempts), 1, 10)
	whole("routing.affinity_bytes", int64(c.Routing.AffinityBytes), 0, 1<<20)
	whole("usage.spool_mib", c.Usage.SpoolMiB, 1, 1<<20)
	t := c.Timeouts
	for _, k := range []struct {
		key   string
		value time.Duration
	}{
		{"timeouts.connect", t.Connect}, {"timeouts.first_byte", t.FirstByte}, {"timeouts.idle", t.Idle}, {"timeouts.engine_keep_alive", t.EngineKeepAlive},
		{"timeouts.upload", t.Upload}, {"timeouts.client_write", t.ClientWrite}, {"usage.sync_interval", c.Usage.SyncInterval}, {"usage.send_interval", c.Usage.SendInterval},
	} {
		if k.value <= 0 {
			bad(k.key, "must be a duration longer than zero, like 15m")
		}
	}
	for key, v := range map[string]time.Duration{"routing.loading_hold": c.Routing.LoadingHold, "timeouts.headers_after": t.HeadersAfter, "timeouts.stream_comments": t.StreamComments} {
		if v < 0 {
			bad(key, "must be a duration like 10s, or 0s for none")
		}
	}
	return faults
}
