// Package cloudinit reads the small part of a cloud-init seed that a simulated VM plays: the host name, the default
// user and the files to write. It parses only; nothing in a seed is ever executed by it, and keys it does not know
// (packages, runcmd, ...) are passed over without a word, as they have no meaning for a simulated VM.
package cloudinit

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

// maxFile bounds one unpacked file, so that a small compressed seed cannot fill the disk.
const maxFile = 16 << 20

// Seed is what a simulated VM takes from its user data.
type Seed struct {
	Hostname    string
	DefaultUser string // empty when the seed does not say
	Files       []File
}

// File is one file of write_files.
type File struct {
	Path    string // absolute and clean
	Mode    fs.FileMode
	Owner   string // user or user:group, empty for root
	Content []byte
	Append  bool
}

// ErrNotCloudConfig says that the user data is something else than one #cloud-config document.
var ErrNotCloudConfig = errors.New("user data is not a #cloud-config document")

// Parse reads a #cloud-config document.
func Parse(userData []byte) (Seed, error) {
	if len(bytes.TrimSpace(userData)) == 0 {
		return Seed{}, nil
	}
	first, _, _ := strings.Cut(string(userData), "\n")
	if strings.TrimSpace(first) != "#cloud-config" {
		return Seed{}, ErrNotCloudConfig
	}
	var doc struct {
		Hostname   string            `json:"hostname"`
		FQDN       string            `json:"fqdn"`
		User       json.RawMessage   `json:"user"`
		Users      []json.RawMessage `json:"users"`
		SystemInfo struct {
			DefaultUser struct {
				Name string `json:"name"`
			} `json:"default_user"`
		} `json:"system_info"`
		WriteFiles []struct {
			Path        string          `json:"path"`
			Permissions json.RawMessage `json:"permissions"`
			Owner       string          `json:"owner"`
			Content     json.RawMessage `json:"content"`
			Encoding    string          `json:"encoding"`
			Append      bool            `json:"append"`
		} `json:"write_files"`
	}
	if err := yaml.Unmarshal(userData, &doc); err != nil {
		return Seed{}, fmt.Errorf("parse #cloud-config: %w", err)
	}
	s := Seed{Hostname: doc.Hostname, DefaultUser: doc.SystemInfo.DefaultUser.Name}
	if s.Hostname == "" {
		s.Hostname, _, _ = strings.Cut(doc.FQDN, ".")
	}
	if s.DefaultUser == "" {
		s.DefaultUser = userName(doc.User)
	}
	if s.DefaultUser == "" {
		// The first named user of the list stands for the image's own when that one is not asked for.
		for _, raw := range doc.Users {
			name := userName(raw)
			if name == "default" {
				s.DefaultUser = ""
				break
			}
			if s.DefaultUser == "" {
				s.DefaultUser = name
			}
		}
	}
	if s.DefaultUser != "" && !validUser(s.DefaultUser) {
		return Seed{}, fmt.Errorf("user name %q is not a valid one", s.DefaultUser)
	}
	for i, f := range doc.WriteFiles {
		if !path.IsAbs(f.Path) || path.Clean(f.Path) == "/" {
			return Seed{}, fmt.Errorf("write_files[%d]: path must be absolute, got %q", i, f.Path)
		}
		mode, err := parseMode(f.Permissions)
		if err != nil {
			return Seed{}, fmt.Errorf("write_files[%d]: %w", i, err)
		}
		content, err := decode(text(f.Content), f.Encoding)
		if err != nil {
			return Seed{}, fmt.Errorf("write_files[%d]: %w", i, err)
		}
		s.Files = append(s.Files, File{Path: path.Clean(f.Path), Mode: mode, Owner: f.Owner, Content: content, Append: f.Append})
	}
	return s, nil
}

// userName reads a user given as a bare name or as a mapping with one.
func userName(raw json.RawMessage) string {
	var name string
	if json.Unmarshal(raw, &name) == nil {
		return name
	}
	var entry struct {
		Name string `json:"name"`
	}
	_ = json.Unmarshal(raw, &entry)
	return entry.Name
}

func validUser(name string) bool {
	for i, r := range name {
		ok := r >= 'a' && r <= 'z' || r == '_' || i > 0 && (r >= '0' && r <= '9' || r == '-')
		if !ok {
			return false
		}
	}
	return len(name) <= 32
}

// parseMode takes '0600' as text in octal, and an unquoted 0600 as the number that YAML already made of it.
func parseMode(raw json.RawMessage) (fs.FileMode, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return 0o644, nil
	}
	var n int64
	var err error
	var s string
	if json.Unmarshal(raw, &s) == nil {
		n, err = strconv.ParseInt(strings.TrimPrefix(s, "0o"), 8, 32)
	} else {
		n, err = strconv.ParseInt(string(raw), 10, 32)
	}
	if err != nil || n < 0 || n > 0o7777 {
		return 0, fmt.Errorf("permissions must be an octal mode, got %s", raw)
	}
	mode := fs.FileMode(n & 0o777)
	for bit, m := range map[int64]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if n&bit != 0 {
			mode |= m
		}
	}
	return mode, nil
}

// text takes content as YAML gave it: mostly a string, but `content: 42` is a number and means its digits.
func text(raw json.RawMessage) string {
	var s string
	if len(raw) == 0 || string(raw) == "null" {
		return ""
	}
	if json.Unmarshal(raw, &s) == nil {
		return s
	}
	return string(raw)
}

func decode(content, encoding string) ([]byte, error) {
	switch strings.ToLower(encoding) {
	case "", "text/plain":
		return []byte(content), nil
	case "b64", "base64":
		return unbase64(content)
	case "gz", "gzip":
		return gunzip([]byte(content))
	case "gz+b64", "gz+base64", "gzip+b64", "gzip+base64":
		raw, err := unbase64(content)
		if err != nil {
			return nil, err
		}
		return gunzip(raw)
	default:
		return nil, fmt.Errorf("encoding %q is not known", encoding)
	}
}

func unbase64(s string) ([]byte, error) {
	raw, err := base64.StdEncoding.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		return nil, fmt.Errorf("content is not base64: %w", err)
	}
	return raw, nil
}

func gunzip(raw []byte) ([]byte, error) {
	z, err := gzip.NewReader(bytes.NewReader(raw))
	if err != nil {
		return nil, fmt.Errorf("content is not gzip: %w", err)
	}
	out, err := io.ReadAll(io.LimitReader(z, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("content is not gzip: %w", err)
	}
	if len(out) > maxFile {
		return nil, fmt.Errorf("content is larger than %d bytes unpacked", maxFile)
	}
	return out, nil
}
