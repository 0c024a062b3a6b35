package cloudinit

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Unit is the part of a systemd service that a simulated VM plays.
type Unit struct {
	Exec        []string // program and arguments
	Environment []string // KEY=value
	WorkingDir  string
	Restart     string        // no, always, on-failure, ...
	RestartWait time.Duration // between an end and the next start
	StopWait    time.Duration // between SIGTERM and SIGKILL
	Ignored     []string      // directives of [Service] that would matter and are not played
}

// playedNot are directives that change what runs; leaving them out silently would mislead.
var playedNot = map[string]bool{
	"User": true, "Group": true, "EnvironmentFile": true, "ExecStartPre": true, "ExecStartPost": true, "ExecStop": true,
	"ExecStopPost": true, "RootDirectory": true, "DynamicUser": true,
}

// ParseUnit reads a service file.
func ParseUnit(raw []byte) (Unit, error) {
	u := Unit{Restart: "no", RestartWait: 100 * time.Millisecond, StopWait: 90 * time.Second}
	lines := bufio.NewScanner(bytes.NewReader(bytes.ReplaceAll(raw, []byte("\\\n"), []byte(" "))))
	lines.Buffer(nil, 1<<20)
	section := ""
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if line == "" || line[0] == '#' || line[0] == ';' {
			continue
		}
		if line[0] == '[' {
			section = line
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok || section != "[Service]" {
			continue
		}
		key, value = strings.TrimSpace(key), strings.TrimSpace(value)
		var err error
		switch key {
		case "ExecStart":
			if value == "" { // systemd: an empty value clears the list
				u.Exec = nil
				continue
			}
			if u.Exec != nil {
				return u, errors.New("more than one ExecStart is not played")
			}
			u.Exec, err = split(strings.TrimLeft(value, "-@+!:"))
		case "Environment":
			var pairs []string
			if pairs, err = split(value); err == nil {
				u.Environment = append(u.Environment, pairs...)
			}
		case "WorkingDirectory":
			u.WorkingDir = strings.TrimLeft(value, "-")
		case "Restart":
			u.Restart = value
		case "RestartSec":
			u.RestartWait, err = seconds(value)
		case "TimeoutStopSec":
			u.StopWait, err = seconds(value)
		default:
			if playedNot[key] {
				u.Ignored = append(u.Ignored, key)
			}
		}
		if err != nil {
			return u, fmt.Errorf("%s: %w", key, err)
		}
	}
	if err := lines.Err(); err != nil {
		return u, err
	}
	if len(u.Exec) == 0 {
		return u, errors.New("ExecStart is missing")
	}
	for i, a := range u.Exec {
		u.Exec[i] = u.expand(a)
	}
	return u, nil
}

// Restarts says whether the unit starts again after it ended with this code (0 is success).
func (u Unit) Restarts(code int) bool {
	switch u.Restart {
	case "always":
		return true
	case "on-success":
		return code == 0
	case "on-failure", "on-abnormal", "on-abort", "on-watchdog":
		return code != 0
	default:
		return false
	}
}

// expand replaces %% and ${NAME} from the unit's own environment; other specifiers stay as they are.
func (u Unit) expand(s string) string {
	for _, kv := range u.Environment {
		k, v, _ := strings.Cut(kv, "=")
		s = strings.ReplaceAll(s, "${"+k+"}", v)
	}
	return strings.ReplaceAll(s, "%%", "%")
}

// split cuts at white space outside quotes, with systemd's backslash escapes of the simple kind.
func split(s string) ([]string, error) {
	var out []string
	var cur strings.Builder
	var quote rune
	open, escaped := false, false
	for _, r := range s {
		switch {
		case escaped:
			cur.WriteRune(r)
			escaped = false
		case r == '\\' && quote != '\'':
			escaped, open = true, true
		case quote != 0:
			if r == quote {
				quote = 0
			} else {
				cur.WriteRune(r)
			}
		case r == '"' || r == '\'':
			quote, open = r, true
		case r == ' ' || r == '\t':
			if open {
				out = append(out, cur.String())
				cur.Reset()
				open = false
			}
		default:
			cur.WriteRune(r)
			open = true
		}
	}
	if quote != 0 || escaped {
		return nil, fmt.Errorf("quote or escape is not closed in %q", s)
	}
	if open {
		out = append(out, cur.String())
	}
	return out, nil
}

func seconds(s string) (time.Duration, error) {
	if s == "infinity" {
		return 24 * time.Hour, nil
	}
	if n, err := strconv.ParseFloat(s, 64); err == nil && n >= 0 && n < 1e6 {
		return time.Duration(n * float64(time.Second)), nil
	}
	d, err := time.ParseDuration(strings.ReplaceAll(strings.ReplaceAll(s, " ", ""), "min", "m"))
	if err != nil || d < 0 {
		return 0, fmt.Errorf("want a time span, got %q", s)
	}
	return d, nil
}
