// Package log is one process's log: named go-hclog loggers whose lines go to
// standard error, to a file that is rotated here, and to a ring in memory that
// StreamLogs reads.
//
// A line that cannot be written to the file is still on the other two; the
// failure is kept for a health warning and never stops the program.
//
// It does not ship lines anywhere, does not filter secrets (what must not be read
// must not be logged), and is no audit trail.
package log

import (
	"bytes"
	"io"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// Config says where lines go and which.
type Config struct {
	// File is the log file. "none" keeps no file. Its folder must exist.
	File string `yaml:"file"`
	// Level is trace, debug, info, warn or error. [info]
	Level string `yaml:"level"`
	// Format is text or json. [text]
	Format string `yaml:"format"`
	// MaxSizeMB is the size in MiB at which the file is rotated. [50]
	MaxSizeMB int `yaml:"max_size_mb"`
	// MaxFiles is how many rotated files are kept beside it. [7]
	MaxFiles int `yaml:"max_files"`
	// MaxAgeDays is the age at which rotated files are removed. [30]
	MaxAgeDays int `yaml:"max_age_days"`
}

// Fill puts the defaults where nothing is set.
func (c *Config) Fill() {
	if c.Level == "" {
		c.Level = "info"
	}
	if c.Format == "" {
		c.Format = "text"
	}
	if c.MaxSizeMB == 0 {
		c.MaxSizeMB = 50
	}
	if c.MaxFiles == 0 {
		c.MaxFiles = 7
	}
	if c.MaxAgeDays == 0 {
		c.MaxAgeDays = 30
	}
}

// Validate names every key that breaks a rule, after Fill.
func (c *Config) Validate() (faults []fault.Detail) {
	if l := hclog.LevelFromString(c.Level); l == hclog.NoLevel || l == hclog.Off {
		faults = append(faults, fault.Detail{Field: "level", Rule: "must be trace, debug, info, warn or error"})
	}
	if c.Format != "text" && c.Format != "json" {
		faults = append(faults, fault.Detail{Field: "format", Rule: "must be text or json"})
	}
	for _, n := range []struct {
		key   string
		value int
	}{{"max_size_mb", c.MaxSizeMB}, {"max_files", c.MaxFiles}, {"max_age_days", c.MaxAgeDays}} {
		if n.value < 1 || n.value > 100000 {
			faults = append(faults, fault.Detail{Field: n.key, Rule: "must be 1 to 100000"})
		}
	}
	return faults
}

// Log is the log of a process. It is safe for concurrent use.
type Log struct {
	root hclog.Logger
	ring *Ring
	out  *output
}

// Open starts the log of a service. Stderr may be nil.
func Open(service string, c Config, stderr io.Writer, ring *Ring) (*Log, error) {
	c.Fill()
	out := &output{stderr: stderr, ring: ring, now: time.Now}
	if c.File != "" && c.File != "none" {
		f, err := openFile(c.File, int64(c.MaxSizeMB)<<20, c.MaxFiles, time.Duration(c.MaxAgeDays)*24*time.Hour, time.Now)
		if err != nil {
			return nil, err
		}
		out.file = f
	}
	return &Log{
		root: hclog.New(&hclog.LoggerOptions{
			Name: service, Level: hclog.LevelFromString(c.Level), JSONFormat: c.Format == "json", Output: out,
			TimeFn: func() time.Time { return time.Now().UTC() }, TimeFormat: "2006-01-02T15:04:05.000Z",
		}),
		ring: ring, out: out,
	}, nil
}

// Logger is the root logger, named after the service.
func (l *Log) Logger() hclog.Logger { return l.root }

// Ring is where lines are kept in memory.
func (l *Log) Ring() *Ring { return l.ring }

// File is the path of the log file, or "".
func (l *Log) File() string {
	if l.out.file == nil {
		return ""
	}
	return l.out.file.path
}

// Reopen opens the file anew under its name, after another program moved it.
func (l *Log) Reopen() error {
	l.out.mu.Lock()
	defer l.out.mu.Unlock()
	if l.out.file == nil {
		return nil
	}
	l.out.failure = l.out.file.reopen()
	return l.out.failure
}

// Failure is why the last line did not reach the file, or nil.
func (l *Log) Failure() error {
	l.out.mu.Lock()
	defer l.out.mu.Unlock()
	return l.out.failure
}

// Quiet stops writing to standard error.
func (l *Log) Quiet() {
	l.out.mu.Lock()
	defer l.out.mu.Unlock()
	l.out.stderr = nil
}

// Close closes the file. Later lines go to the other places only.
func (l *Log) Close() error {
	l.out.mu.Lock()
	defer l.out.mu.Unlock()
	if l.out.file == nil {
		return nil
	}
	err := l.out.file.close()
	l.out.file = nil
	return err
}

// output gets one whole record a Write, in order.
type output struct {
	mu      sync.Mutex
	stderr  io.Writer
	file    *file
	ring    *Ring
	now     func() time.Time
	failure error
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.stderr != nil {
		_, _ = o.stderr.Write(p)
	}
	if o.file != nil {
		o.failure = o.file.write(p)
	}
	if o.ring != nil {
		now := o.now()
		for line := range bytes.SplitSeq(bytes.TrimRight(p, "\n"), []byte{'\n'}) {
			o.ring.Add("daemon", now, line)
		}
	}
	return len(p), nil
}
