package daemon

import (
	"encoding/json"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/cosmicac/cosmicac/pkg/fault"
	meshv1 "github.com/cosmicac/cosmicac/proto/gen/cosmicac/mesh/v1"
)

// Status is the status file: what a daemon says of itself to its host. It is
// replaced whole, so a reader never sees half of it. UpdatedAt older than 15 s, or
// a StoppedAt, means that nobody is there.
type Status struct {
	Service       string            `json:"service"`
	Name          string            `json:"name"`
	Key           string            `json:"key"`
	Network       string            `json:"network"`
	InstanceID    string            `json:"instance_id"`
	Version       string            `json:"version"`
	PID           int               `json:"pid"`
	StartedAt     time.Time         `json:"started_at"`
	UpdatedAt     time.Time         `json:"updated_at"`
	StoppedAt     *time.Time        `json:"stopped_at,omitempty"`
	Ready         bool              `json:"ready"`
	Addresses     []string          `json:"addresses"`
	HTTPAddresses []string          `json:"http_addresses"`
	RosterVersion uint64            `json:"roster_version"`
	LogFile       string            `json:"log_file,omitempty"`
	Warnings      []json.RawMessage `json:"warnings"`
}

// write replaces the file. It does not sync: after a power failure the process
// is gone too.
func (s *Status) write(path string) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fault.Wrap(fault.Internal, err, "encode status")
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fault.Wrap(fault.Unavailable, err, "write status file %s", path)
	}
	_, err = tmp.Write(append(data, '\n'))
	if err == nil {
		err = tmp.Chmod(0o644)
	}
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		_ = os.Remove(tmp.Name())
		return fault.Wrap(fault.Unavailable, err, "write status file %s", path)
	}
	return nil
}

var warningJSON = protojson.MarshalOptions{UseProtoNames: true}

func rawWarnings(list []*meshv1.Warning) []json.RawMessage {
	out := make([]json.RawMessage, 0, len(list))
	for _, w := range list {
		if b, err := warningJSON.Marshal(w); err == nil {
			out = append(out, b)
		}
	}
	return out
}

// ReadStatus reads a status file.
func ReadStatus(path string) (*Status, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fault.Wrap(fault.NotFound, err, "read status file")
	}
	s := &Status{}
	if err := json.Unmarshal(data, s); err != nil {
		return nil, fault.Wrap(fault.Invalid, err, "status file %s", path)
	}
	return s, nil
}
