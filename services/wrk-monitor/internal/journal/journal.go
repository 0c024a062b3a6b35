// Package journal keeps log lines of daemons and jobs in files, one folder a
// source, and reads their last lines back. It does not fetch anything and
// never interprets a line: guests write what they like.
package journal

import (
	"bufio"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// Line is one stored line.
type Line struct {
	Time     time.Time `json:"time"`
	Instance string    `json:"instance"`
	// Source is "daemon", "agent", "console" or "engine".
	Source string `json:"source"`
	Text   string `json:"text"`
	// Gap says that lines before this one are missing.
	Gap bool `json:"gap,omitempty"`
}

// Owner is whom a source belongs to. Daemons belong to no project.
type Owner struct {
	ProjectID string `json:"project_id,omitempty"`
	JobID     string `json:"job_id,omitempty"`
}

// Journal is a folder of sources. Each source holds two files of at most half
// the bound, so its oldest lines go first.
type Journal struct {
	dir          string
	maximumBytes int64
	mu           sync.Mutex
	open         map[string]*source
	retention    time.Duration
}

type source struct {
	mu       sync.Mutex
	dir      string
	file     *os.File
	size     int64
	maximum  int64
	position string
}

var name = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,79}$`)

// Open opens a journal. maximumBytes bounds each source, retention how long a
// source without new lines is kept.
func Open(dir string, maximumBytes int64, retention time.Duration) (*Journal, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fault.Wrap(fault.Unavailable, err, "make the journal folder %s", dir)
	}
	return &Journal{dir: dir, maximumBytes: maximumBytes, retention: retention, open: map[string]*source{}}, nil
}

// Close closes every file. Lines written before it are on disk.
func (j *Journal) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	var errs []error
	for _, s := range j.open {
		s.mu.Lock()
		if s.file != nil {
			errs = append(errs, s.file.Close())
			s.file = nil
		}
		s.mu.Unlock()
	}
	j.open = map[string]*source{}
	return errors.Join(errs...)
}

func (j *Journal) source(instance string) (*source, error) {
	if !name.MatchString(instance) {
		return nil, fault.New(fault.Invalid, "log source %q: 1 to 80 lower-case letters, digits, dots and hyphens", instance)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if s := j.open[instance]; s != nil {
		return s, nil
	}
	s := &source{dir: filepath.Join(j.dir, instance), maximum: j.maximumBytes / 2}
	if raw, err := os.ReadFile(filepath.Join(s.dir, "position")); err == nil {
		s.position = string(raw)
	}
	j.open[instance] = s
	return s, nil
}

// Position is where the source's stream was left: what to ask for next.
func (j *Journal) Position(instance string) string {
	s, err := j.source(instance)
	if err != nil {
		return ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.position
}

// Append writes lines in order and remembers the position after them. A crash
// between the two repeats lines rather than losing them.
func (j *Journal) Append(instance string, owner Owner, position string, lines []Line) error {
	s, err := j.source(instance)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file == nil {
		if err := s.start(owner); err != nil {
			return fault.Wrap(fault.Unavailable, err, "open the log of %s", instance)
		}
	}
	var raw []byte
	for _, l := range lines {
		l.Instance = instance
		one, err := json.Marshal(l)
		if err != nil {
			return err
		}
		raw = append(append(raw, one...), '\n')
	}
	n, err := s.file.Write(raw)
	s.size += int64(n)
	if err != nil {
		return fault.Wrap(fault.Unavailable, err, "write the log of %s", instance)
	}
	s.position = position
	if err := os.WriteFile(filepath.Join(s.dir, "position"), []byte(position), 0o600); err != nil {
		return fault.Wrap(fault.Unavailable, err, "write the log position of %s", instance)
	}
	if s.size > s.maximum {
		s.file.Close()
		s.file = nil
		if err := os.Rename(filepath.Join(s.dir, "lines"), filepath.Join(s.dir, "lines.old")); err != nil {
			return fault.Wrap(fault.Unavailable, err, "turn over the log of %s", instance)
		}
	}
	return nil
}

func (s *source) start(owner Owner) error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	raw, err := json.Marshal(owner)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(s.dir, "owner.json"), raw, 0o600); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(s.dir, "lines"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return err
	}
	s.file, s.size = f, info.Size()
	return nil
}

// Filter selects sources; empty fields match all.
type Filter struct {
	Instance, JobID string
	// Projects limits to these unless Everything is set.
	Projects   []string
	Everything bool
}

// Tail returns the last n lines of the matching sources, oldest first.
func (j *Journal) Tail(f Filter, n int) ([]Line, error) {
	entries, err := os.ReadDir(j.dir)
	if err != nil {
		return nil, fault.Wrap(fault.Unavailable, err, "read the journal")
	}
	var lines []Line
	for _, e := range entries {
		if !e.IsDir() || f.Instance != "" && e.Name() != f.Instance {
			continue
		}
		var owner Owner
		if raw, err := os.ReadFile(filepath.Join(j.dir, e.Name(), "owner.json")); err != nil || json.Unmarshal(raw, &owner) != nil {
			continue
		}
		if f.JobID != "" && owner.JobID != f.JobID || !f.Everything && !slices.Contains(f.Projects, owner.ProjectID) {
			continue
		}
		for _, part := range []string{"lines.old", "lines"} {
			if lines, err = readLines(filepath.Join(j.dir, e.Name(), part), lines); err != nil {
				return nil, err
			}
		}
	}
	slices.SortStableFunc(lines, func(a, b Line) int { return a.Time.Compare(b.Time) })
	if len(lines) > n {
		lines = lines[len(lines)-n:]
	}
	return lines, nil
}

func readLines(path string, lines []Line) ([]Line, error) {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return lines, nil
	}
	if err != nil {
		return lines, fault.Wrap(fault.Unavailable, err, "read a log")
	}
	defer file.Close()
	scanner := bufio.NewScanner(file)
	scanner.Buffer(make([]byte, 64<<10), 1<<20)
	for scanner.Scan() {
		var l Line
		// A line cut by a crash is skipped.
		if json.Unmarshal(scanner.Bytes(), &l) == nil {
			lines = append(lines, l)
		}
	}
	return lines, scanner.Err()
}

// Prune removes sources that got nothing for the retention time.
func (j *Journal) Prune(now time.Time) error {
	entries, err := os.ReadDir(j.dir)
	if err != nil {
		return fault.Wrap(fault.Unavailable, err, "read the journal")
	}
	for _, e := range entries {
		info, err := os.Stat(filepath.Join(j.dir, e.Name(), "position"))
		if err != nil || now.Sub(info.ModTime()) < j.retention {
			continue
		}
		j.mu.Lock()
		s := j.open[e.Name()]
		delete(j.open, e.Name())
		j.mu.Unlock()
		if s != nil {
			s.mu.Lock()
			if s.file != nil {
				s.file.Close()
				s.file = nil
			}
			s.mu.Unlock()
		}
		if err := os.RemoveAll(filepath.Join(j.dir, e.Name())); err != nil {
			return fault.Wrap(fault.Unavailable, err, "remove the log of %s", e.Name())
		}
	}
	return nil
}
